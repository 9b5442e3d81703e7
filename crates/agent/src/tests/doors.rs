//! Who gets through an agent's data port: it asks for a certificate first, and for the epoch's secret then.

use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::ServerName;

use super::fixture::*;
use weightsync_core::protocol::*;
use weightsync_net::identity::{Ca, ClientCertificates, Identity, PeerIdentity, agent_name};
use weightsync_transport::tcp::{DataTls, TcpOptions, TcpTransport};
use weightsync_transport::{Transport, TransportError};

const HOUR: Duration = Duration::from_secs(3600);

/// Opens a chain of one to `member` with that certificate.
async fn knock(member: &Member, identity: &Identity, hello: DataHello) -> Result<(), TransportError> {
    let name = agent_name(&member.address.incarnation.pod_uid);
    let tls = DataTls {
        server: identity.server_config(ClientCertificates::Required).unwrap(),
        client: Arc::new(identity.client_config().unwrap()),
        server_name: Arc::new(move |_| ServerName::try_from(name.clone()).ok()),
    };
    let options = TcpOptions { tls: Some(tls), ..TcpOptions::default() };
    let own = TcpTransport::bind("127.0.0.1:0".parse().unwrap(), member.core.clone(), options).await.unwrap();
    tokio::time::timeout(SOON, own.open(hello, &member.address.data)).await.unwrap().map(|_| ())
}

#[tokio::test(flavor = "multi_thread")]
async fn data_port_refuses_bad_certificates_and_missing_secret() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    let members = [&source, &rollout];
    let epoch = fixture.form(&members, None).await;
    let hello = |secret: String| DataHello {
        update: UpdateId { epoch: epoch.clone(), version: 0, attempt: 0 },
        from: source.name.clone(),
        to: rollout.name.clone(),
        secret,
        rest: Vec::new(),
        tls: true,
        silence_ms: 3_000,
        probe: true,
        preflight: false,
        carried: None,
    };
    let secret = fixture.commit_request(&members, None).secret;
    let pod_uid = source.address.incarnation.pod_uid.clone();
    let agent = |weightsync: &str| PeerIdentity::Agent { weightsync: weightsync.into(), pod_uid: pod_uid.clone(), role: Role::Source };
    let known = fixture.ca.issue(&agent(WEIGHTSYNC), HOUR).unwrap();
    knock(&rollout, &known, hello(secret.clone())).await.unwrap();
    let foreign = Ca::generate().unwrap();
    for shown in [fixture.ca.issue_ended(&agent(WEIGHTSYNC)).unwrap(), foreign.issue_trusting(&fixture.ca, &agent(WEIGHTSYNC)).unwrap()] {
        let refused = knock(&rollout, &shown, hello(secret.clone())).await;
        assert!(matches!(refused, Err(TransportError::Unreachable { .. } | TransportError::Lost { .. })), "{refused:?}");
    }
    for who in [WEIGHTSYNC, "ws-other"] {
        let refused = knock(&rollout, &fixture.ca.issue(&agent(who), HOUR).unwrap(), hello("another".into())).await;
        let Err(error) = refused else { panic!("{who} is let in") };
        assert!(error.to_string().contains("the secret is not that of the epoch"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_of_a_false_sender_or_to_a_false_address_is_refused() {
    let mut fixture = Fixture::new();
    let (source, rollout, other) = (fixture.source(), fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    let members = [&source, &rollout, &other];
    let epoch = fixture.form(&members, None).await;
    let hello = |from: &MemberName| DataHello {
        update: UpdateId { epoch: epoch.clone(), version: 0, attempt: 0 },
        from: from.clone(),
        to: rollout.name.clone(),
        secret: fixture.commit_request(&members, None).secret,
        rest: Vec::new(),
        tls: true,
        silence_ms: 3_000,
        probe: true,
        preflight: false,
        carried: None,
    };
    let agent = |weightsync: &str, member: &Member| PeerIdentity::Agent {
        weightsync: weightsync.into(),
        pod_uid: member.address.incarnation.pod_uid.clone(),
        role: Role::Source,
    };
    let lies = [
        (agent(WEIGHTSYNC, &other), source.name.clone()),
        (agent(WEIGHTSYNC, &rollout), source.name.clone()),
        (agent("ws-other", &source), source.name.clone()),
        (PeerIdentity::Controller, source.name.clone()),
        (agent(WEIGHTSYNC, &other), MemberName("actors/unknown".into())),
    ];
    for (who, from) in lies {
        let shown = fixture.ca.issue(&who, HOUR).unwrap();
        let refused = knock(&rollout, &shown, hello(&from)).await;
        let refused = matches!(&refused, Err(TransportError::Refused { refusal, .. }) if refusal.code == RefusalCode::Forbidden);
        assert!(refused, "{who:?} as {from}");
    }
    let honest = fixture.ca.issue(&agent(WEIGHTSYNC, &other), HOUR).unwrap();
    knock(&rollout, &honest, hello(&other.name)).await.unwrap();
    for rest in [(source.name.clone(), "127.0.0.1:9".to_owned()), (MemberName("actors/unknown".into()), source.address.data.clone())] {
        let refused = knock(&rollout, &honest, DataHello { rest: vec![rest.clone()], ..hello(&other.name) }).await;
        let refused = matches!(&refused, Err(TransportError::Refused { refusal, .. }) if refusal.code == RefusalCode::Forbidden);
        assert!(refused, "{rest:?} is dialled");
    }
}
