//! What may never happen, watched all the time: answers computed from weights that no one published, a pod that says it is ready and
//! answers with weights older than the group's, a roster or a pod's `/readyz` that says for longer than it may what the engine does not say
//! (`truth`), and a group that stays in a step of its forming beyond that step's deadline.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;
use weightsync_coordinator::local::Group;
use weightsync_core::membership::{GroupStage, MembershipView};

use crate::fixture::pod;
use crate::net::{ENGINE, Link, PROBES};
use crate::plan::ROLLOUTS;
use crate::truth::{BUSY, Claim, Holds, Ledger, Truth};

/// Where engines are asked for a token.
pub const COMPLETIONS: &str = "/v1/completions";
/// Between two requests to one engine.
const EVERY: Duration = Duration::from_millis(250);
/// Deadlines of a prepare and of a commit (`MembershipConfig`), and what a busy machine adds.
const STEPS: [(GroupStage, Duration); 2] =
    [(GroupStage::Preparing, Duration::from_secs(5)), (GroupStage::Committing, Duration::from_secs(10))];

#[derive(Default)]
struct Seen {
    /// Versions by what an engine answers that holds them.
    versions: Mutex<HashMap<String, u64>>,
    /// Digests of the tensors of each version.
    digests: Mutex<BTreeMap<u64, Value>>,
    /// Engines that answer nothing by the test's own doing although they run.
    mute: [AtomicBool; ROLLOUTS],
    /// Pods whose agent lies as the test requested: reports about them cannot be compared, because their agent makes them.
    lies: [AtomicBool; ROLLOUTS],
    /// Engines that are no members by the test's own doing.
    away: [AtomicBool; ROLLOUTS],
    /// What the test does now.
    fault: Mutex<String>,
    /// Every ready pod served at least this version when it was set.
    floor: AtomicU64,
    /// What happened that may not.
    violations: Mutex<BTreeSet<String>>,
    answers: AtomicU64,
}

/// Watches one world until it is dropped.
pub struct Watcher {
    seen: Arc<Seen>,
    tasks: Vec<AbortOnDropHandle<()>>,
}

impl Watcher {
    /// Knows nothing and looks at nothing yet.
    pub fn new() -> Self {
        Self { seen: Arc::default(), tasks: Vec::new() }
    }

    /// Begins to look; what engines start with must be known.
    pub fn start(&mut self, group: &Group, links: &[Link], http: &reqwest::Client) {
        for (number, link) in links.iter().enumerate().skip(1) {
            let eyes = Eyes {
                seen: Arc::clone(&self.seen),
                view: group.view(),
                http: http.clone(),
                number,
                host: format!("http://{}", link.address),
            };
            let watched = async move {
                let mut ledger = Ledger::default();
                loop {
                    eyes.look(&mut ledger).await;
                    sleep(EVERY).await;
                }
            };
            self.tasks.push(AbortOnDropHandle::new(tokio::spawn(watched)));
        }
        self.tasks.push(AbortOnDropHandle::new(tokio::spawn(stages(Arc::clone(&self.seen), group.view()))));
    }

    /// What an engine answers that holds a version, and the digests of its tensors.
    pub fn knows(&self, answer: String, version: u64, digests: Value) {
        self.seen.versions.lock().unwrap().insert(answer, version);
        self.seen.digests.lock().unwrap().insert(version, digests);
    }

    /// What violations are named with.
    pub fn fault(&self, what: String) {
        *self.seen.fault.lock().unwrap() = what;
    }

    /// Whether the test itself keeps an engine that runs from answering: its own word counts then.
    pub fn mute(&self, number: usize, mute: bool) {
        self.seen.mute[number - 1].store(mute, Ordering::Release);
    }

    /// Whether the agent of a pod lies by the test's own doing.
    pub fn lies(&self, number: usize, lies: bool) {
        self.seen.lies[number - 1].store(lies, Ordering::Release);
    }

    /// Whether the engine of a pod is no member by the test's own doing.
    pub fn away(&self, number: usize, away: bool) {
        self.seen.away[number - 1].store(away, Ordering::Release);
    }

    /// What an engine holds, and whether it runs, by its own answers.
    pub async fn truth(&self, http: &reqwest::Client, number: usize, host: &str) -> (Truth, Option<u64>) {
        let (truth, answered) = self.seen.truth(http, number, host).await;
        (truth, answered.and_then(|answer| self.seen.versions.lock().unwrap().get(&answer).copied()))
    }

    /// Everybody serves this version or a newer one from now on, while it says that it is ready.
    pub fn floor(&self, version: u64) {
        self.seen.floor.store(version, Ordering::Release);
    }

    /// What was seen since the last time.
    pub fn violations(&self) -> Vec<String> {
        std::mem::take(&mut *self.seen.violations.lock().unwrap()).into_iter().collect()
    }

    /// Answers of engines that were looked at since the last time.
    pub fn answers(&self) -> u64 {
        self.seen.answers.swap(0, Ordering::Relaxed)
    }
}

/// What an engine computes from its weights now; none while it is paused, or gone.
pub async fn answer(http: &reqwest::Client, url: &str) -> Option<String> {
    // One token: an answer of several may rightly be computed with two versions.
    let request = json!({"prompt": "chaos", "max_tokens": 1, "logprobs": 1});
    let answer: Value = http.post(format!("{url}{COMPLETIONS}")).json(&request).send().await.ok()?.json().await.ok()?;
    let choice = answer.pointer("/choices/0").filter(|choice| choice["finish_reason"] == "length")?;
    Some(format!("{} {}", choice["text"], choice.pointer("/logprobs/token_logprobs")?))
}

/// Whether a pod says that it is ready; false when it says nothing.
pub async fn is_ready(http: &reqwest::Client, host: &str) -> bool {
    let page = http.get(format!("{host}:{PROBES}/readyz")).timeout(Duration::from_millis(500)).send().await;
    page.is_ok_and(|page| page.status() == 200)
}

impl Seen {
    /// The engine's own words, and its answer to a request where it gave one.
    async fn truth(&self, http: &reqwest::Client, number: usize, host: &str) -> (Truth, Option<String>) {
        let engine = format!("{host}:{ENGINE}");
        let digest = async { http.get(format!("{engine}/simulator/digest")).send().await.ok()?.json::<Value>().await.ok() };
        let (digest, answered) = (digest.await, answer(http, &engine).await);
        let digests = self.digests.lock().unwrap();
        let holds = match &digest {
            None => Holds::Silent,
            Some(digest) => {
                let version = digests.iter().find(|(_, tensors)| digest["tensors"] == **tensors);
                version.map_or(Holds::Mixture, |(version, _)| Holds::Version(*version))
            }
        };
        let mute = self.mute[number - 1].load(Ordering::Acquire);
        let by_word = mute && digest.is_some_and(|digest| digest["paused"] == json!(false));
        (Truth { holds, runs: answered.is_some() || by_word }, answered)
    }
}

/// Looks at one engine.
struct Eyes {
    seen: Arc<Seen>,
    view: tokio::sync::watch::Receiver<MembershipView>,
    http: reqwest::Client,
    number: usize,
    host: String,
}

impl Eyes {
    async fn claim(&self) -> Claim {
        let ready = is_ready(&self.http, &self.host).await;
        Claim::new(&self.view.borrow(), self.number, ready)
    }

    /// An engine without an answer is checked as well: one that is reported as ready must answer.
    async fn look(&self, ledger: &mut Ledger) {
        let (seen, name) = (&self.seen, pod(self.number));
        let floor = seen.floor.load(Ordering::Acquire);
        let before = self.claim().await;
        let (truth, answered) = seen.truth(&self.http, self.number, &self.host).await;
        let after = self.claim().await;
        let away = seen.away[self.number - 1].load(Ordering::Acquire);
        if away || seen.lies[self.number - 1].load(Ordering::Acquire) {
            // The agent of a pod is the only one who says anything of its engine, and of an engine that left it says nothing.
            *ledger = Ledger::default();
        }
        for (difference, lasted) in ledger.look(Instant::now(), &before, truth, &after) {
            let row = self.view.borrow().members.iter().find(|row| row.name.0 == crate::fixture::member(self.number)).cloned();
            let row = row.map(|row| format!("{:?}, {}: {}", row.standing, row.reason, row.message));
            let fault = seen.fault.lock().unwrap().clone();
            let text = format!("{difference:?} of {name} for {lasted:?}: the engine is {truth:?}, the roster and /readyz say {after:?}");
            seen.violations.lock().unwrap().insert(format!("{text} ({}); the fault: {fault}", row.unwrap_or_default()));
        }
        let Some(answer) = answered else { return };
        seen.answers.fetch_add(1, Ordering::Relaxed);
        let version = seen.versions.lock().unwrap().get(&answer).copied();
        let violation = match version {
            None => format!("{name} answered with weights that no one published"),
            Some(version) if !away && before.ready && after.ready && version < floor => {
                format!("{name} was ready and answered with version {version}, the group was at {floor} before")
            }
            Some(_) => return,
        };
        seen.violations.lock().unwrap().insert(violation);
    }
}

/// A step of a group's forming ends within its deadline.
async fn stages(seen: Arc<Seen>, mut view: tokio::sync::watch::Receiver<MembershipView>) {
    loop {
        let (epoch, stage) = {
            let view = view.borrow_and_update();
            (view.epoch, view.stage)
        };
        let limit = STEPS.iter().find(|(of, _)| *of == stage).map(|(_, limit)| *limit + BUSY);
        let begun = Instant::now();
        let moved = async { view.wait_for(|view| (view.epoch, view.stage) != (epoch, stage)).await.is_ok() };
        let moved = match limit {
            None => moved.await,
            Some(limit) => tokio::time::timeout(limit, moved).await.unwrap_or_else(|_| {
                seen.violations.lock().unwrap().insert(format!("epoch {epoch} is {stage:?} for {:?}", begun.elapsed()));
                true
            }),
        };
        if !moved {
            return;
        }
    }
}
