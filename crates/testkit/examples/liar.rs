//! A rollout pod that lies in every message that it may send: about itself, to the controller, and to the other members.
//!
//! It enrols with its own token and joins the group as an honest agent would; then it tells one lie after the other, and prints a line of JSON
//! for each. It decides nothing: the end-to-end test looks at what the others do. Settings are those of the sidecar.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::net::IpAddr;
use std::time::Duration;

use serde_json::{Value, json};
use weightsync_core::protocol::{
    Announcement, CommitRequest, HeldVersion, Incarnation, MemberName, MemberPhase, MemberState, Protocols, RefusedVersion, Role,
    UpdatePhase, UpdateView,
};
use weightsync_net::https::{AgentClient, CallError, ControllerClient};
use weightsync_testkit::fake_agent::{FakeAgent, Pod};

const SOON: Duration = Duration::from_secs(5);
/// How long a lie stands.
const STANDS: Duration = Duration::from_millis(700);
/// Longest wait for the first place in a group, and for a later one.
const GROUP: Duration = Duration::from_secs(60);
const PLACE: Duration = Duration::from_secs(8);
const LOOKS: Duration = Duration::from_millis(20);
/// A version that no source ever announced.
const INVENTED: u64 = 999_999;
/// An epoch beyond every bound.
const FAR: u64 = (1 << 62) - 1;

/// A lie about itself, told in its events.
type AboutItself = fn(&mut MemberState, &Others);

const ABOUT_ITSELF: [(&str, AboutItself); 8] = [
    ("it is the source", |state, _| state.role = Role::Source),
    ("it holds an invented version", |state, _| (state.installed, state.retained) = (Some(invented()), Some(invented()))),
    ("it holds the current version and does not", |state, others| {
        state.installed.clone_from(&others.commit.current);
        state.retained.clone_from(&others.commit.current);
    }),
    ("its epoch is far ahead", |state, _| {
        if let Some(epoch) = &mut state.epoch {
            epoch.epoch = FAR;
        }
    }),
    ("its term is far ahead", |state, _| {
        if let Some(epoch) = &mut state.epoch {
            epoch.term = FAR;
        }
    }),
    ("it is another member", |state, others| state.member = Some(others.member.clone())),
    ("it is another pod", |state, others| state.incarnation = others.incarnation.clone()),
    ("everybody refused the current version", |state, others| {
        let refuse = |held: &HeldVersion| RefusedVersion { held: held.clone(), measured: "a lie".into() };
        state.refused = others.commit.current.iter().map(refuse).collect();
    }),
];

fn invented() -> HeldVersion {
    HeldVersion { version: INVENTED, manifest: "0".repeat(64) }
}

/// What the group is, as the last commit told.
struct Others {
    commit: CommitRequest,
    /// The first of the other members.
    member: MemberName,
    incarnation: Incarnation,
}

fn setting(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

fn say(lie: &str, answer: &Value) {
    println!("{}", json!({"lie": lie, "answer": answer}));
}

fn answer_of<T>(called: &Result<T, CallError>) -> Value {
    match called {
        Ok(_) => json!("taken"),
        Err(error) => json!({"refused": error.to_string()}),
    }
}

#[tokio::main]
async fn main() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let ip: IpAddr = setting("POD_IP").parse().expect("POD_IP is an address");
    let token = std::fs::read_to_string(setting("WEIGHTSYNC_TOKEN_FILE")).expect("the token can be read");
    let pod = Pod {
        namespace: setting("POD_NAMESPACE"),
        name: setting("POD_NAME"),
        uid: setting("POD_UID"),
        role: Role::Rollout,
        token: token.trim().to_owned(),
    };
    let (ca, controller) = (setting("WEIGHTSYNC_CONTROLLER_CA"), setting("WEIGHTSYNC_CONTROLLER_URL"));
    let agent = FakeAgent::start_at(ip, &ca, &controller, &pod, "liar").await;
    agent.take_bytes_at("127.0.0.1:9");
    let asked = async {
        while agent.prepares() == 0 {
            tokio::time::sleep(LOOKS).await;
        }
    };
    tokio::time::timeout(GROUP, asked).await.expect("a prepare");
    agent.take_bytes_at(&format!("{ip}:9"));
    say("the others would send its bytes to themselves", &json!("told"));
    for (lie, tell) in ABOUT_ITSELF {
        let others = in_a_group(&agent).await;
        let truth = agent.state();
        agent.change(|state| tell(state, &others));
        tokio::time::sleep(STANDS).await;
        agent.change(|state| {
            (state.role, state.incarnation, state.member) = (truth.role, truth.incarnation, truth.member);
            (state.installed, state.retained, state.refused) = (None, None, Vec::new());
            if let (Some(epoch), Some(was)) = (&mut state.epoch, truth.epoch)
                && (epoch.epoch == FAR || epoch.term == FAR)
            {
                *epoch = was;
            }
        });
        say(lie, &json!("told"));
    }
    let others = in_a_group(&agent).await;
    agent.tell_update(UpdateView {
        id: others.commit.id.clone(),
        version: INVENTED,
        attempt: 1,
        phase: UpdatePhase::Done,
        total_bytes: 1,
        members: Vec::new(),
        phases_ms: Vec::new(),
        failure: None,
        feeding: false,
    });
    say("an invented version is done", &json!("told"));
    to_the_controller(&agent, &controller, &pod).await;
    agent.hang_prepares();
    say("all", &json!("told"));
    std::future::pending::<()>().await;
}

/// Waits for a place in a group with others. One that was thrown out does not wait long: it lies from outside, with what it knows.
async fn in_a_group(agent: &FakeAgent) -> Others {
    let others = |commit: CommitRequest| {
        let other = commit.addresses.iter().find(|address| address.control != agent.address)?.clone();
        Some(Others { commit, member: other.member, incarnation: other.incarnation })
    };
    let within = if agent.commit().is_some() { PLACE } else { GROUP };
    let placed = async {
        loop {
            let state = agent.state();
            let commit = agent.commit().filter(|commit| state.phase == MemberPhase::Ready && Some(&commit.id) == state.epoch.as_ref());
            if commit.is_some() {
                return commit;
            }
            tokio::time::sleep(LOOKS).await;
        }
    };
    let commit = tokio::time::timeout(within, placed).await.unwrap_or_else(|_| agent.commit());
    commit.and_then(others).expect("a place in a group")
}

/// It says that it is somebody else, and gives the others orders in between.
async fn to_the_controller(agent: &FakeAgent, controller: &str, pod: &Pod) {
    let others = in_a_group(agent).await;
    let name = others.member.0.rsplit('/').next().unwrap_or_default().to_owned();
    let client = ControllerClient::new(agent.identity().clone(), controller.to_owned());
    let announcement = Announcement {
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        incarnation: Incarnation { pod_uid: pod.uid.clone(), instance: "liar".into() },
        role: Role::Rollout,
        engine_port: Some(8000),
        control_address: agent.address.clone(),
        program: "liar".into(),
        speaks: Protocols::OURS,
        attached: false,
    };
    let lies = [
        ("it announces another pod", Announcement { pod: name, incarnation: others.incarnation, ..announcement.clone() }),
        (
            "it announces the address of the cloud's metadata",
            Announcement { control_address: "169.254.169.254:80".into(), ..announcement.clone() },
        ),
    ];
    for (lie, announcement) in lies {
        let called: Result<Value, CallError> = client.post_json("/v1/agents/announce", &announcement, SOON).await;
        say(lie, &answer_of(&called));
    }
    to_the_members(agent).await;
    // The controller takes roles from the plan and lets this pass. This agent gets no place any more: it is the last lie.
    let source = Announcement { role: Role::Source, engine_port: None, ..announcement };
    let _answer: Result<Value, CallError> = client.post_json("/v1/agents/announce", &source, SOON).await;
    say("it announces a source", &json!("told"));
}

/// It gives orders to all others, as the controller or the source would.
async fn to_the_members(agent: &FakeAgent) {
    let others = in_a_group(agent).await;
    let client = AgentClient::new(agent.identity().clone());
    let mut id = json!(others.commit.id);
    id["epoch"] = json!(others.commit.id.epoch + 10);
    let update = json!({"epoch": others.commit.id, "version": INVENTED, "attempt": 1});
    let mut commit = json!(others.commit);
    commit["current"] = json!(invented());
    let orders = [
        ("/v1/epoch/commit", commit),
        ("/v1/epoch/fence", json!({"id": id, "reason": "a lie"})),
        ("/v1/release", json!({"id": id, "reason": "a lie"})),
        ("/v1/update/finish", json!({"update": update, "tensorDigests": [], "manifestDigest": "0".repeat(64)})),
        ("/v1/update/activate", json!({"update": update})),
        ("/v1/update/external/end", json!({"update": update, "outcome": {"kind": "delivered"}})),
    ];
    for address in others.commit.addresses.iter().filter(|address| address.control != agent.address) {
        for (path, body) in &orders {
            let called: Result<Value, CallError> = client.post_json(&address.control, &address.incarnation.pod_uid, path, body, SOON).await;
            say(&format!("{path} to {}", address.member.0), &answer_of(&called));
        }
    }
}
