//! A rollout with its own token and certificate that lies: about itself, to the controller, and to the other members.
//!
//! Makes false claims and writes one line of JSON for each. It decides nothing: a test checks what the others do.

mod about_itself;
mod bytes;
mod engines;
mod orders;
mod updates;

use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use weightsync_core::protocol::{CommitRequest, HeldVersion, Incarnation, MemberName, MemberPhase, Role, UpdatePhase, UpdateView};
use weightsync_net::https::CallError;

use self::bytes::Door;
use self::updates::Part;
use crate::fake_agent::{FakeAgent, Pod};

/// What each life of a liar calls itself.
pub const INSTANCE: &str = "liar";
/// A version that no source ever announced.
pub const INVENTED: u64 = 999_999;
/// How long a lie stands, and how long the truth stands between two lies.
const STANDS: Duration = Duration::from_millis(700);
const TRUTH: Duration = Duration::from_millis(300);
/// Longest wait for the first place in a group, and for a later one.
const GROUP: Duration = Duration::from_secs(60);
const PLACE: Duration = Duration::from_secs(8);
const LOOKS: Duration = Duration::from_millis(20);
const SOON: Duration = Duration::from_secs(5);

/// What one liar lies about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// It is the source, and announced what it holds.
    Role,
    /// It holds a version that no source announced.
    InventedVersion,
    /// It holds the current version and does not.
    CurrentVersion,
    /// Its epoch is far ahead.
    Epoch,
    /// Its term is far ahead.
    Term,
    /// It is another member.
    Member,
    /// It is another pod.
    Pod,
    /// The engines refused the current version.
    RefusedVersion,
    /// It gives the others the orders of the controller and of a source.
    Orders,
    /// It passes on other bytes than it got, with sums that fit.
    Bytes,
    /// It passes on other bytes than it got, with the sums of the right ones.
    Sums,
    /// The layout of each version is invalid.
    Layout,
    /// It installed a version before it got a byte of it.
    Progress,
    /// It feeds the others an invented version, and says that it is done.
    Feeding,
    /// It has as many engines as may register, and all of them refused the current version.
    Engines,
}

impl Lie {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::Role,
        Self::InventedVersion,
        Self::CurrentVersion,
        Self::Epoch,
        Self::Term,
        Self::Member,
        Self::Pod,
        Self::RefusedVersion,
        Self::Orders,
        Self::Bytes,
        Self::Sums,
        Self::Layout,
        Self::Progress,
        Self::Feeding,
        Self::Engines,
    ];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Role => "it is the source",
            Self::InventedVersion => "it holds an invented version",
            Self::CurrentVersion => "it holds the current version and does not",
            Self::Epoch => "its epoch is far ahead",
            Self::Term => "its term is far ahead",
            Self::Member => "it is another member",
            Self::Pod => "it is another pod",
            Self::RefusedVersion => "everybody refused the current version",
            Self::Orders => "it gives orders",
            Self::Bytes => "it passes on other bytes",
            Self::Sums => "it passes on other bytes with old sums",
            Self::Layout => "the layout makes no sense",
            Self::Progress => "it installed what it did not get",
            Self::Feeding => "it feeds an invented version",
            Self::Engines => "it has sixteen engines",
        }
    }
}

/// A version that no source announced.
fn invented() -> HeldVersion {
    HeldVersion { version: INVENTED, manifest: "0".repeat(64) }
}

/// What the group is, by the last commit.
struct Others {
    commit: CommitRequest,
    /// The first of the other members.
    member: MemberName,
    incarnation: Incarnation,
}

/// Who it is, by the settings of a sidecar.
pub struct Settings {
    ip: IpAddr,
    ca: String,
    controller: String,
    pod: Pod,
}

impl Settings {
    /// Reads the environment, and the token from its file: one line, because the file may be a pipe that stays open.
    pub fn from_env() -> Self {
        let setting = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
        let file = std::fs::File::open(setting("WEIGHTSYNC_TOKEN_FILE")).expect("the token can be read");
        let mut token = String::new();
        BufReader::new(file).read_line(&mut token).expect("the token can be read");
        let pod = Pod {
            namespace: setting("POD_NAMESPACE"),
            name: setting("POD_NAME"),
            uid: setting("POD_UID"),
            role: Role::Rollout,
            token: token.trim().to_owned(),
        };
        let ip = setting("POD_IP").parse().expect("POD_IP is an address");
        Self { ip, ca: setting("WEIGHTSYNC_CONTROLLER_CA"), controller: setting("WEIGHTSYNC_CONTROLLER_URL"), pod }
    }
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

/// Joins the group as a member that responds correctly and drives no engine, and sends this lie while the file exists.
pub async fn lie_while(lie: Lie, file: &Path, settings: &Settings) {
    let Settings { ip, ca, controller, pod } = settings;
    let (part, updates) = Part::new();
    // No two lives of one pod are the same life.
    let instance = format!("{INSTANCE}-{}", std::process::id());
    let agent = FakeAgent::start_with(*ip, ca, controller, pod, &instance, updates).await;
    let door = Door::open(*ip, part.clone()).await;
    agent.take_bytes_at(&door.address);
    let follow = part.follow(&agent);
    let registered = engines::keep_registered(&agent, lie, file);
    let lies = async {
        loop {
            let now = file.exists();
            part.lie(lie, now);
            if now && lie == Lie::Engines {
                engines::tell(&agent, settings).await;
            } else if now {
                tell(lie, &agent).await;
            }
            tokio::time::sleep(LOOKS).await;
        }
    };
    tokio::join!(follow, registered, lies);
}

/// One round of one lie.
async fn tell(lie: Lie, agent: &FakeAgent) {
    let Some(others) = in_a_group(agent).await else { return tokio::time::sleep(TRUTH).await };
    if let Some(change) = about_itself::of(lie) {
        about_itself::stand(agent, change, &others).await;
        say(lie.name(), &json!("sent"));
    } else {
        match lie {
            Lie::Orders => orders::to_the_members(agent, &others).await,
            Lie::Feeding => {
                agent.tell_update(done(&others, INVENTED));
                say("an invented version is done", &json!("sent"));
                orders::feed(agent, &others).await;
            }
            // Sent to every caller and sender.
            _ => {}
        }
        tokio::time::sleep(STANDS).await;
    }
    tokio::time::sleep(TRUTH).await;
}

/// The view of an update that never was.
fn done(others: &Others, version: u64) -> UpdateView {
    UpdateView {
        id: others.commit.id.clone(),
        version,
        attempt: 1,
        phase: UpdatePhase::Done,
        total_bytes: 1,
        members: Vec::new(),
        phases_ms: Vec::new(),
        failure: None,
        feeding: true,
    }
}

/// Makes one false claim after the other, once each, and takes no part in updates.
pub async fn tell_all(settings: &Settings) {
    let Settings { ip, ca, controller, pod } = settings;
    let agent = FakeAgent::start_at(*ip, ca, controller, pod, INSTANCE).await;
    agent.take_bytes_at("127.0.0.1:9");
    let asked = async {
        while agent.prepares() == 0 {
            tokio::time::sleep(LOOKS).await;
        }
    };
    tokio::time::timeout(GROUP, asked).await.expect("a prepare");
    agent.take_bytes_at(&format!("{ip}:9"));
    say("the others would send its bytes to themselves", &json!("sent"));
    for lie in Lie::ALL {
        let Some(change) = about_itself::of(lie) else { continue };
        let others = in_a_group(&agent).await.expect("a place in a group");
        about_itself::stand(&agent, change, &others).await;
        say(lie.name(), &json!("sent"));
    }
    let others = in_a_group(&agent).await.expect("a place in a group");
    agent.tell_update(UpdateView { feeding: false, ..done(&others, INVENTED) });
    say("an invented version is done", &json!("sent"));
    orders::to_the_controller(&agent, controller, pod, &others).await;
    let others = in_a_group(&agent).await.expect("a place in a group");
    orders::to_the_members(&agent, &others).await;
    orders::as_a_source(&agent, controller, pod).await;
    agent.hang_prepares();
    say("all", &json!("sent"));
    std::future::pending::<()>().await;
}

/// Waits for a place in a group with others. One that was thrown out does not wait long: it lies from outside, with what it knows.
async fn in_a_group(agent: &FakeAgent) -> Option<Others> {
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
    let commit = tokio::time::timeout(within, placed).await.unwrap_or_else(|_| agent.commit())?;
    let other = commit.addresses.iter().find(|address| address.control != agent.address)?.clone();
    Some(Others { commit, member: other.member, incarnation: other.incarnation })
}
