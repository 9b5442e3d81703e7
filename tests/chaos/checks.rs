//! What may never happen, watched all the time: answers computed from weights that nobody published, a pod that says it is ready and
//! answers with weights older than the group's, and a group that stays in a step of its forming beyond that step's deadline.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;
use weightsync_coordinator::local::Group;
use weightsync_core::membership::GroupStage;

use crate::bed::pod;
use crate::net::{ENGINE, Link, STATUS};

/// Between two requests to one engine.
const EVERY: Duration = Duration::from_millis(250);
/// Deadlines of a prepare and of a commit (`MembershipConfig`), and what a busy machine adds.
const STEPS: [(GroupStage, Duration); 2] =
    [(GroupStage::Preparing, Duration::from_secs(5)), (GroupStage::Committing, Duration::from_secs(10))];
const BUSY: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Seen {
    /// Versions by what an engine answers that holds them.
    versions: Mutex<HashMap<String, u64>>,
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
            let (seen, http, address) = (Arc::clone(&self.seen), http.clone(), link.address);
            let watched = async move {
                loop {
                    ask(&seen, &http, number, &format!("http://{address}")).await;
                    sleep(EVERY).await;
                }
            };
            self.tasks.push(AbortOnDropHandle::new(tokio::spawn(watched)));
        }
        self.tasks.push(AbortOnDropHandle::new(tokio::spawn(stages(Arc::clone(&self.seen), group.view()))));
    }

    /// What an engine answers that holds a version.
    pub fn knows(&self, answer: String, version: u64) {
        self.seen.versions.lock().unwrap().insert(answer, version);
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
    let answer: Value = http.post(format!("{url}/v1/completions")).json(&request).send().await.ok()?.json().await.ok()?;
    let choice = answer.pointer("/choices/0").filter(|choice| choice["finish_reason"] == "length")?;
    Some(format!("{} {}", choice["text"], choice.pointer("/logprobs/token_logprobs")?))
}

async fn ask(seen: &Seen, http: &reqwest::Client, number: usize, host: &str) {
    let ready = || async {
        let page = http.get(format!("{host}:{STATUS}/readyz")).timeout(Duration::from_millis(500)).send().await;
        page.is_ok_and(|page| page.status() == 200)
    };
    let floor = seen.floor.load(Ordering::Acquire);
    let before = ready().await;
    let Some(answer) = answer(http, &format!("{host}:{ENGINE}")).await else { return };
    let after = ready().await;
    seen.answers.fetch_add(1, Ordering::Relaxed);
    let version = seen.versions.lock().unwrap().get(&answer).copied();
    let violation = match version {
        None => format!("{} answered with weights that nobody published", pod(number)),
        Some(version) if before && after && version < floor => {
            format!("{} was ready and answered with version {version}, the group was at {floor} before", pod(number))
        }
        Some(_) => return,
    };
    seen.violations.lock().unwrap().insert(violation);
}

/// A step of a group's forming ends within its deadline.
async fn stages(seen: Arc<Seen>, mut view: tokio::sync::watch::Receiver<weightsync_core::membership::MembershipView>) {
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
