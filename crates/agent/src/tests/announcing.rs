//! When an agent asks again what its object wants of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::enrollment::{Announcer, AnnouncingEnded, Applicant, TokenSource, enroll};
use weightsync_core::protocol::{
    AnnounceResponse, Announcement, Assignment, Call, EnrollRequest, HeldVersion, Incarnation, Protocols, Rejection, Role, TransportPolicy,
};
use weightsync_core::weights::IgnoredTensors;
use weightsync_net::https::{Access, CallError, ControllerClient, Failed, Limits, serve_https};
use weightsync_net::identity::{Ca, Identity, PeerIdentity};

/// Shorter than the time between two announcements of an agent that is listened to.
const SOON: Duration = Duration::from_secs(5);
const HOUR: Duration = Duration::from_secs(3600);

/// A controller that answers every enrolment with this rejection.
async fn refusing(rejection: Rejection) -> (Ca, String, AbortOnDropHandle<()>) {
    let ca = Ca::generate().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let identity = ca.issue(&PeerIdentity::Controller, HOUR).unwrap();
    let refuse = move || {
        let rejection = rejection.clone();
        async move { Err::<(), _>(Failed(rejection)) }
    };
    let routes = Router::new().route(EnrollRequest::PATH, post(refuse));
    let serving = serve_https(listener, identity, Access::Open, routes, Limits::default(), CancellationToken::new());
    (ca, address, AbortOnDropHandle::new(tokio::spawn(async move { serving.await.unwrap() })))
}

#[tokio::test]
async fn agent_whose_given_token_is_refused_for_good_ends() {
    let rejection = Rejection { message: "the token is unknown".into(), retryable: false };
    let (ca, address, _server) = refusing(rejection).await;
    let identity = Identity::new(ca.certificate_pem()).unwrap();
    let applicant = Applicant {
        namespace: "default".into(),
        pod: "actor-0".into(),
        incarnation: Incarnation { pod_uid: "uid-0".into(), instance: "a".into() },
        token: TokenSource::Given("wst1-none".into()),
    };
    let client = ControllerClient::new(identity.clone(), address);
    let cancel = CancellationToken::new();
    let asked = tokio::time::timeout(SOON, enroll(&client, &identity, &applicant, |_| (), &cancel)).await.expect("it ends");
    let message = asked.unwrap_err().to_string();
    assert!(message.contains("the token is unknown") && message.contains("new agent"), "{message}");

    // A projected token is rotated: the next one may count.
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "projected").unwrap();
    let patient = Applicant { token: TokenSource::File(file.path().to_owned()), ..applicant };
    let asking = enroll(&client, &identity, &patient, |_| (), &cancel);
    assert!(tokio::time::timeout(Duration::from_millis(500), asking).await.is_err(), "it asks again");
}

/// Assigned to no engine, of no version.
fn nothing() -> Assignment {
    Assignment {
        role: Role::Rollout,
        engines: Vec::new(),
        registered: false,
        serve_before_first_version: true,
        current: None,
        returned: None,
        newest: None,
        suspended: false,
        hindrance: None,
        ignored: IgnoredTensors::default(),
        transport: TransportPolicy::default(),
    }
}

fn announcer(client: ControllerClient, attached: bool, assignment: watch::Sender<Assignment>) -> Announcer {
    Announcer {
        client,
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
        attached: Arc::new(move || attached),
        refresh: Arc::default(),
        assignment,
    }
}

/// Announcements of a minute to a controller that takes them, or is away.
async fn announced_in_a_minute(taken: bool, attached: bool) -> u32 {
    let identity = Identity::new(Ca::generate().unwrap().certificate_pem()).unwrap();
    let announcer = announcer(ControllerClient::new(identity, "127.0.0.1:1".to_owned()), attached, watch::Sender::new(nothing()));
    let count = AtomicU32::new(0);
    let ask = |_| {
        count.fetch_add(1, Ordering::Relaxed);
        let away =
            || CallError::Rejected { address: "controller".into(), rejection: Rejection { message: "away".into(), retryable: true } };
        std::future::ready(if taken { Ok(AnnounceResponse { assignment: nothing() }) } else { Err(away()) })
    };
    let announcing = announcer.run_by(ask, CancellationToken::new());
    assert!(tokio::time::timeout(Duration::from_secs(60), announcing).await.is_err(), "it announces for ever");
    count.into_inner()
}

/// 4,500 agents that announced themselves each second kept a new controller from listening to any of them.
#[tokio::test(start_paused = true)]
async fn agent_no_one_comes_to_hear_announces_ever_less_often() {
    // Each pause is up to three tenths shorter, and up to a look longer: 1 s, 2 s, then 4 s, of a controller that is busy.
    let busy = announced_in_a_minute(true, false).await;
    assert!((15..=24).contains(&busy), "{busy}");
    // Each second to one that is away, and every ten seconds while it listens.
    let away = announced_in_a_minute(false, false).await;
    assert!((50..=87).contains(&away), "{away}");
    let heard = announced_in_a_minute(true, true).await;
    assert_eq!(heard, 6);
}

async fn answer(State(assignment): State<watch::Sender<Assignment>>) -> Json<AnnounceResponse> {
    Json(AnnounceResponse { assignment: assignment.borrow().clone() })
}

#[tokio::test]
async fn agent_asks_for_a_changed_assignment_at_once() {
    let ca = Ca::generate().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let nothing = nothing();
    let wanted = watch::Sender::new(nothing.clone());
    let routes = Router::new().route(Announcement::PATH, post(answer)).with_state(wanted.clone());
    let identity = ca.issue(&PeerIdentity::Controller, HOUR).unwrap();
    let cancel = CancellationToken::new();
    let serving = serve_https(listener, identity, Access::Open, routes, Limits::default(), cancel.clone());
    let _server = AbortOnDropHandle::new(tokio::spawn(async move { serving.await.unwrap() }));

    let agent = PeerIdentity::Agent { weightsync: "ws".into(), pod_uid: "uid-0".into(), role: Role::Rollout };
    // It knows of nothing yet, so that its first announcement is seen.
    let heard = watch::Sender::new(Assignment { serve_before_first_version: false, ..nothing.clone() });
    let announcer = announcer(ControllerClient::new(ca.issue(&agent, HOUR).unwrap(), address), true, heard.clone());
    let refresh = announcer.refresh.clone();
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
