//! Messages that a member may not send: those of the controller, of a source, of a feeder, and of another pod. Says what was answered.

use std::sync::Arc;

use serde_json::{Value, json};
use weightsync_core::protocol::{
    ActivateRequest, Announcement, BeginRequest, Call, CommitRequest, ExternalEnd, FenceRequest, FinishRequest, Incarnation, Protocols,
    ReleaseRequest, Role, UpdateId,
};
use weightsync_core::weights::{DigestAlgorithm, Dtype, Layout, Manifest, TensorHasher, TensorSpec};
use weightsync_net::https::{AgentClient, CallError, ControllerClient};

use super::{INVENTED, Others, SOON, answer_of, invented, say};
use crate::fake_agent::{FakeAgent, Pod};

fn announcement(agent: &FakeAgent, pod: &Pod) -> Announcement {
    Announcement {
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        incarnation: Incarnation { pod_uid: pod.uid.clone(), instance: "liar".into() },
        role: Role::Rollout,
        engine_port: Some(8000),
        control_address: agent.address.clone(),
        program: "liar".into(),
        speaks: Protocols::OURS,
        attached: false,
    }
}

/// It says to the controller that it is another pod, or at a foreign address.
pub(super) async fn to_the_controller(agent: &FakeAgent, controller: &str, pod: &Pod, others: &Others) {
    let name = others.member.0.rsplit('/').next().unwrap_or_default().to_owned();
    let client = ControllerClient::new(agent.identity().clone(), controller.to_owned());
    let announcement = announcement(agent, pod);
    let lies = [
        ("it announces another pod", Announcement { pod: name, incarnation: others.incarnation.clone(), ..announcement.clone() }),
        ("it announces the address of the cloud's metadata", Announcement { control_address: "169.254.169.254:80".into(), ..announcement }),
    ];
    for (lie, announcement) in lies {
        say(lie, &answer_of(&client.ask(&announcement, SOON).await));
    }
}

/// It announces a source. The controller takes roles from the plan and lets this pass. The agent gets no place then: it is the last lie.
pub(super) async fn as_a_source(agent: &FakeAgent, controller: &str, pod: &Pod) {
    let client = ControllerClient::new(agent.identity().clone(), controller.to_owned());
    let source = Announcement { role: Role::Source, engine_port: None, ..announcement(agent, pod) };
    let _answer = client.ask(&source, SOON).await;
    say("it announces a source", &json!("sent"));
}

/// It gives orders to all others, as the controller or the source would.
pub(super) async fn to_the_members(agent: &FakeAgent, others: &Others) {
    let mut id = json!(others.commit.id);
    id["epoch"] = json!(others.commit.id.epoch + 10);
    let update = json!({"epoch": others.commit.id, "version": INVENTED, "attempt": 1});
    let mut commit = json!(others.commit);
    commit["current"] = json!(invented());
    let orders = [
        (CommitRequest::PATH, commit),
        (FenceRequest::PATH, json!({"id": id, "reason": "a lie"})),
        (ReleaseRequest::PATH, json!({"id": id, "reason": "a lie"})),
        (FinishRequest::PATH, json!({"update": update, "tensorDigests": [], "manifestDigest": "0".repeat(64)})),
        (ActivateRequest::PATH, json!({"update": update})),
        (ExternalEnd::PATH, json!({"update": update, "outcome": {"kind": "delivered"}})),
    ];
    send(agent, others, &orders).await;
}

/// It begins to feed all others: bytes of its own under an invented number, and under the number that counts.
pub(super) async fn feed(agent: &FakeAgent, others: &Others) {
    let current = others.commit.current.clone().unwrap_or_else(invented);
    let begins = [INVENTED, current.version].map(|version| {
        let (layout, manifest) = weights(version);
        let begin = BeginRequest {
            update: UpdateId { epoch: others.commit.id.clone(), version, attempt: 1_000 },
            layout_digest: layout.digest(),
            layout,
            algorithm: DigestAlgorithm::default(),
            feeding: true,
            manual: false,
            manifest_digest: Some(manifest),
            statement: None,
        };
        (BeginRequest::PATH, json!(begin))
    });
    send(agent, others, &begins).await;
}

/// One tensor that no trainer made, and the digest of its manifest.
fn weights(version: u64) -> (Layout, String) {
    let tensor = TensorSpec::new("lie.weight".into(), Dtype::F32, vec![4]);
    let layout = Layout::new("model", vec![tensor], 64 << 10).unwrap();
    let mut hasher = TensorHasher::new(Arc::new(layout.clone()), DigestAlgorithm::default());
    let bytes = usize::try_from(layout.total_bytes).unwrap();
    hasher.update(&vec![7; bytes]).unwrap();
    let manifest = Manifest::new(version, layout.clone(), DigestAlgorithm::default(), &hasher.finish().unwrap()).unwrap();
    (layout, manifest.digest())
}

async fn send(agent: &FakeAgent, others: &Others, orders: &[(&str, Value)]) {
    let client = AgentClient::new(agent.identity().clone());
    for address in others.commit.addresses.iter().filter(|address| address.control != agent.address) {
        for (path, body) in orders {
            let called: Result<Value, CallError> = client.post_json(&address.control, &address.incarnation.pod_uid, path, body, SOON).await;
            say(&format!("{path} to {}", address.member.0), &answer_of(&called));
        }
    }
}
