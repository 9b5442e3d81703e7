//! When an agent asks again what its object wants of it.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::enrollment::{Announcer, AnnouncingEnded};
use weightsync_core::protocol::{AnnounceResponse, Announcement, Assignment, HeldVersion, Incarnation, Protocols, Role, TransportPolicy};
use weightsync_net::https::{Access, ControllerClient, Limits, serve_https};
use weightsync_net::identity::{Ca, PeerIdentity};

/// Shorter than the time between two announcements of an agent that is listened to.
const SOON: Duration = Duration::from_secs(5);
const HOUR: Duration = Duration::from_secs(3600);

async fn answer(State(assignment): State<watch::Sender<Assignment>>) -> Json<AnnounceResponse> {
    Json(AnnounceResponse { assignment: assignment.borrow().clone() })
}

#[tokio::test]
async fn an_agent_that_is_told_that_its_assignment_changed_asks_for_it_at_once() {
    let ca = Ca::generate().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let nothing = Assignment {
        role: Role::Rollout,
        engines: Vec::new(),
        serve_before_first_version: true,
        current: None,
        returned: None,
        newest: None,
        suspended: false,
        transport: TransportPolicy::default(),
    };
    let wanted = watch::Sender::new(nothing.clone());
    let routes = Router::new().route("/v1/agents/announce", post(answer)).with_state(wanted.clone());
    let identity = ca.issue(&PeerIdentity::Controller, HOUR).unwrap();
    let cancel = CancellationToken::new();
    let serving = serve_https(listener, identity, Access::Open, routes, Limits::default(), cancel.clone());
    let _server = AbortOnDropHandle::new(tokio::spawn(async move { serving.await.unwrap() }));

    let agent = PeerIdentity::Agent { weightsync: "ws".into(), pod_uid: "uid-0".into(), role: Role::Rollout };
    let refresh = Arc::new(Notify::new());
    // It knows of nothing yet, so that its first announcement is seen.
    let heard = watch::Sender::new(Assignment { serve_before_first_version: false, ..nothing.clone() });
    let announcer = Announcer {
        client: ControllerClient::new(ca.issue(&agent, HOUR).unwrap(), address),
        announcement: Announcement {
            namespace: "default".into(),
            pod: "actor-0".into(),
            incarnation: Incarnation { pod_uid: "uid-0".into(), instance: "a".into() },
            role: Role::Rollout,
            engine_port: Some(8000),
            control_address: "127.0.0.1:1".into(),
            program: "test".into(),
            speaks: Protocols::OURS,
            attached: false,
        },
        attached: Arc::new(|| true),
        refresh: refresh.clone(),
        assignment: heard.clone(),
    };
    let over = cancel.clone();
    let announcing = tokio::spawn(async move { announcer.run(over).await });
    let hears = async |assignment: &Assignment| {
        let mut heard = heard.subscribe();
        assert!(tokio::time::timeout(SOON, heard.wait_for(|heard| heard == assignment)).await.is_ok(), "not heard: {assignment:?}");
    };
    hears(&nothing).await;
    for version in 1..=3 {
        let current = Some(HeldVersion { version, manifest: "m".into() });
        wanted.send_modify(|wanted| wanted.current = current);
        refresh.notify_one();
        let now = wanted.borrow().clone();
        hears(&now).await;
    }
    cancel.cancel();
    assert_eq!(tokio::time::timeout(SOON, announcing).await.expect("it ends").unwrap(), AnnouncingEnded::Cancelled);
}
