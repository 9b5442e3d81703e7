//! A member with a legitimate certificate that does what it may not: as feeder it brings another version, other weights, or what it was not
//! asked for; and it keeps the update of somebody else alive.

use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::ServerName;

use super::fixture::*;
use super::trainer::*;
use weightsync_core::protocol::*;
use weightsync_core::weights::{DigestAlgorithm, Layout, Manifest, TensorHasher, bucket_digest};
use weightsync_net::https::{AgentClient, CallError};
use weightsync_net::identity::{ClientCertificates, agent_name};
use weightsync_transport::Transport;
use weightsync_transport::tcp::{DataTls, TcpOptions, TcpTransport};

/// Weights as a leader describes them.
struct Poison {
    layout: Layout,
    bytes: bytes::Bytes,
    manifest: Manifest,
}

impl Poison {
    fn of(seed: u8, version: Version) -> Self {
        let (layout, bytes) = weights(seed);
        let mut hasher = TensorHasher::new(Arc::new(layout.clone()), DigestAlgorithm::default());
        hasher.update(&bytes).unwrap();
        let manifest = Manifest::new(version, layout.clone(), DigestAlgorithm::default(), &hasher.finish().unwrap()).unwrap();
        Self { layout, bytes: bytes.into(), manifest }
    }

    fn held(&self) -> HeldVersion {
        HeldVersion { version: self.manifest.version, manifest: self.manifest.digest() }
    }

    fn begin(&self, epoch: &EpochId, attempt: u32, held: &HeldVersion) -> BeginRequest {
        BeginRequest {
            update: UpdateId { epoch: epoch.clone(), version: held.version, attempt },
            layout: self.layout.clone(),
            layout_digest: self.layout.digest(),
            algorithm: DigestAlgorithm::default(),
            feeding: true,
            manual: false,
            manifest_digest: Some(held.manifest.clone()),
            statement: None,
        }
    }

    fn finish(&self, update: &UpdateId) -> FinishRequest {
        FinishRequest {
            update: update.clone(),
            tensor_digests: self.manifest.tensor_digests.clone(),
            manifest_digest: self.manifest.digest(),
            statement: None,
            check: false,
        }
    }

    /// Sends the bytes as `from`, the way a leader does.
    async fn stream(&self, fixture: &Fixture, from: &Member, to: &Member, update: &UpdateId, secret: String) {
        let identity = fixture.identity(from);
        let name = agent_name(&to.address.incarnation.pod_uid);
        let tls = DataTls {
            server: identity.server_config(ClientCertificates::Required).unwrap(),
            client: Arc::new(identity.client_config().unwrap()),
            server_name: Arc::new(move |_| ServerName::try_from(name.clone()).ok()),
        };
        let options = TcpOptions { tls: Some(tls), ..TcpOptions::default() };
        let own = TcpTransport::bind("127.0.0.1:0".parse().unwrap(), from.core.clone(), options).await.unwrap();
        let hello = DataHello {
            update: update.clone(),
            from: from.name.clone(),
            to: to.name.clone(),
            secret,
            rest: Vec::new(),
            tls: true,
            silence_ms: 3_000,
            probe: false,
            preflight: false,
            carried: None,
        };
        let mut sink = own.open(hello, &to.address.data).await.unwrap();
        for bucket in self.layout.buckets() {
            let range = usize::try_from(bucket.offset).unwrap()..usize::try_from(bucket.offset + bucket.bytes).unwrap();
            let part = self.bytes.slice(range);
            let header = BucketHeader { sequence: bucket.sequence, flags: 0, offset: bucket.offset, bytes: bucket.bytes };
            let digest = bucket_digest(&part);
            sink.send(header, part.into(), digest).await.unwrap();
        }
        sink.finish().await.unwrap();
    }
}

fn code<T: std::fmt::Debug>(answer: Result<T, CallError>) -> RefusalCode {
    match answer {
        Err(CallError::Refused { refusal, .. }) => refusal.code,
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn feeder_that_begins_what_the_epoch_does_not_name_is_refused() {
    let mut fixture = Fixture::new();
    let (feeder, honest) = (fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    let current = Poison::of(3, 3);
    fixture.current = Some(current.held());
    let id = fixture.form(&[&feeder, &honest], Some(&feeder)).await;
    let invented = Poison::of(9, 99);
    let begins = [
        invented.begin(&id, 1, &invented.held()),
        current.begin(&id, 2, &HeldVersion { manifest: "0".repeat(64), ..current.held() }),
        BeginRequest { manifest_digest: None, ..current.begin(&id, 3, &current.held()) },
        BeginRequest { feeding: false, ..current.begin(&id, 4, &current.held()) },
    ];
    for begin in begins {
        let answer = fixture.ask_as(&feeder, &honest, &begin).await;
        assert_eq!(code(answer), RefusalCode::Forbidden, "{} {:?}", begin.update.version, begin.manifest_digest);
    }
    let begin = current.begin(&id, 5, &current.held());
    let status = fixture.ask_as(&feeder, &honest, &begin).await.unwrap();
    assert_eq!(status.step, InstallStep::Receiving);
}

#[tokio::test(flavor = "multi_thread")]
async fn feeder_that_brings_other_weights_installs_nothing() {
    let mut fixture = Fixture::new();
    let (feeder, honest) = (fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    let (current, poison) = (Poison::of(3, 3), Poison::of(9, 3));
    fixture.current = Some(current.held());
    let members = [&feeder, &honest];
    let id = fixture.form(&members, Some(&feeder)).await;
    let begin = poison.begin(&id, 1, &current.held());
    fixture.ask_as(&feeder, &honest, &begin).await.unwrap();
    poison.stream(&fixture, &feeder, &honest, &begin.update, fixture.commit_request(&members, None).secret).await;
    let answer = fixture.ask_as(&feeder, &honest, &poison.finish(&begin.update)).await;
    assert_eq!(code(answer), RefusalCode::Forbidden);
    // With the digest that the epoch names: it is not that of these bytes.
    let named = FinishRequest { manifest_digest: current.held().manifest, ..poison.finish(&begin.update) };
    let status = fixture.ask_as(&feeder, &honest, &named).await.unwrap();
    assert_eq!(status.step, InstallStep::Failed);
    let activate = ActivateRequest { update: begin.update.clone(), agreed: false };
    let status = fixture.ask_as(&feeder, &honest, &activate).await.unwrap();
    assert_eq!((status.step, honest.engine.get(|inside| inside.installs)), (InstallStep::Failed, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn attempt_of_a_source_takes_no_message_of_the_feeder() {
    let mut fixture = Fixture::new();
    let (source, feeder, honest) = (fixture.source(), fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    let (version, poison) = (Poison::of(4, 4), Poison::of(9, 4));
    let id = fixture.form(&[&source, &feeder, &honest], Some(&feeder)).await;
    let begin = BeginRequest { feeding: false, manifest_digest: None, ..version.begin(&id, 1, &version.held()) };
    fixture.ask_as(&source, &honest, &begin).await.unwrap();
    let update = begin.update.clone();
    let finish = fixture.ask_as(&feeder, &honest, &poison.finish(&update)).await;
    assert_eq!(code(finish), RefusalCode::Forbidden);
    let activate = ActivateRequest { update: update.clone(), agreed: false };
    assert_eq!(code(fixture.ask_as(&feeder, &honest, &activate).await), RefusalCode::Forbidden);
    let abort = AbortRequest { update, reason: "mine now".into() };
    fixture.ask_as(&feeder, &honest, &abort).await.unwrap();
    assert_eq!(honest.rollout().last_attempt().unwrap().step, InstallStep::Receiving);
}

#[tokio::test(flavor = "multi_thread")]
async fn status_asked_by_another_member_is_no_sign_of_the_leader() {
    let mut fixture = Fixture::new();
    fixture.policy.silence_ms = 600;
    let (source, other, honest) = (fixture.source(), fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    let id = fixture.form(&[&source, &other, &honest], None).await;
    let version = Poison::of(4, 4);
    let begin = BeginRequest { feeding: false, manifest_digest: None, ..version.begin(&id, 1, &version.held()) };
    fixture.ask_as(&source, &honest, &begin).await.unwrap();
    let asked = async {
        loop {
            let status = fixture.ask_as(&other, &honest, &StatusRequest::default()).await.unwrap();
            if status.step == InstallStep::Failed {
                return status;
            }
        }
    };
    let status = tokio::time::timeout(Duration::from_secs(5), asked).await.expect("a silent leader is noticed");
    assert!(status.reason.as_ref().is_some_and(|reason| reason.contains("its leader fell silent")), "{status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn statement_travels_with_a_version_from_source_to_joiner() {
    let mut fixture = Fixture::new();
    let (mut source, first) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &first], Some(&source)).await;
    publish(&source, 3, TestSource::of(3)).outcome().await.unwrap();
    fixture.current = source.state().installed;
    let held = fixture.current.clone().unwrap();
    let check = |state: &MemberState| {
        let about: Vec<_> = state.statements.iter().filter(|statement| statement.held == held).collect();
        assert_eq!(about.len(), 1, "{:?}", state.statements);
        fixture.client.identity().check(about[0], WEIGHTSYNC).unwrap();
    };
    check(&source.state());
    check(&first.until_installed(3).await);
    source.kill();
    let joiner = fixture.rollout("actors/r-1");
    fixture.form(&[&first, &joiner], Some(&first)).await;
    let state = joiner.until_installed(3).await;
    assert_eq!(state.statements, first.state().statements, "the feeder passes it on");
}

/// Another pod of the trainer uses a number again that too few replicas took.
#[tokio::test(flavor = "multi_thread")]
async fn number_that_a_new_source_uses_again_is_installed_everywhere() {
    let mut fixture = Fixture::new();
    let (mut source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&[&source, &rollouts[0]], Some(&source)).await;
    publish(&source, 8, TestSource::of(1)).outcome().await.unwrap();
    source.kill();
    // The controller never heard of it.
    fixture.policy.min_ready = 2;
    let again = fixture.source();
    fixture.form(&[&again, &rollouts[0], &rollouts[1]], Some(&again)).await;
    let result = publish(&again, 8, TestSource::of(2)).outcome().await.unwrap();
    assert_eq!(result.installed.len(), 2, "{:?}", result.behind);
    let (layout, bytes) = weights(2);
    for rollout in &rollouts {
        assert_eq!(rollout.engine.serves(), Some(served(&layout, &bytes)));
        let state = rollout.until_installed(8).await;
        assert_eq!(state.installed, again.state().installed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn statement_that_a_feeder_signed_itself_is_refused() {
    let mut fixture = Fixture::new();
    let (feeder, honest) = (fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    let current = Poison::of(3, 3);
    fixture.current = Some(current.held());
    let id = fixture.form(&[&feeder, &honest], Some(&feeder)).await;
    let own = fixture.identity(&feeder).state(&current.held(), &current.layout.digest(), id.epoch).unwrap();
    let begin = BeginRequest { statement: Some(Box::new(own)), ..current.begin(&id, 1, &current.held()) };
    let answer = fixture.ask_as(&feeder, &honest, &begin).await;
    assert_eq!(code(answer), RefusalCode::Forbidden);
    assert_eq!(honest.state().statements, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_that_left_the_group_is_refused_by_its_members() {
    let mut fixture = Fixture::new();
    let (source, honest, left) = (fixture.source(), fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    let strangers = fixture.ask_as(&left, &honest, &StateRequest {}).await;
    assert_eq!(code(strangers), RefusalCode::Forbidden, "there is no group yet");
    fixture.form(&[&source, &honest, &left], None).await;
    fixture.ask_as(&left, &honest, &StateRequest {}).await.unwrap();
    let client = AgentClient::new(fixture.identity(&left));
    let (control, pod) = (&honest.address.control, &honest.address.incarnation.pod_uid);
    let mut events = client.events::<AgentEvent>(control, pod, EVENTS_PATH, SOON, SOON).await.unwrap();
    events.next().await.unwrap();
    fixture.form(&[&source, &honest], None).await;
    assert_eq!(code(fixture.ask_as(&left, &honest, &StateRequest {}).await), RefusalCode::Forbidden);
    let ended = tokio::time::timeout(SOON, async { while events.next().await.is_ok() {} }).await;
    assert!(ended.is_ok(), "its open stream ends too");
    // Not when the epoch is over either.
    fixture.fence(&[&source, &honest]).await;
    assert_eq!(code(fixture.ask_as(&left, &honest, &StateRequest {}).await), RefusalCode::Forbidden);
    fixture.ask_as(&source, &honest, &StateRequest {}).await.unwrap();
}
