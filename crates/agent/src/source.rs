//! The source's agent: brings what the trainer publishes to the group, one version at a time, and feeds who lacks the current one.
//!
//! [`history`] decides which numbers may be published. It never repeats an attempt within an epoch, never reports success before
//! `minReady` engines confirmed, and keeps a copy of a version only where there is room.

mod external;
pub mod history;
mod outcome;
mod pinning;
mod publish;
pub mod reach;
pub mod retain;
mod tracked;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use self::history::History;
use self::pinning::Pinning;
use self::retain::Retained;
use super::archive::Archive;
use super::attempts::Attempts;
use super::client::PublishQueue;
use super::core::Core;
use super::group::Epoch;
use super::lead::Leader;
use super::lead::feed::{Copy, Feeder, Holder};
use super::locks::lock;
use super::roster::tells;
use super::space::Cgroups;
use weightsync_core::protocol::{HeldVersion, PublishResult, RosterView};

/// Longest wait for the roster to say what a publish is about to say: replicas speak to it on connections of their own.
const IN_ROSTER: Duration = Duration::from_secs(1);

pub struct Source {
    core: Arc<Core>,
    leader: Arc<Leader>,
    attempts: Arc<Attempts>,
    cgroups: Cgroups,
    history: Mutex<History>,
    retained: Mutex<Archive<Retained>>,
    roster: watch::Receiver<RosterView>,
    pinning: Pinning,
}

impl Source {
    /// Nothing published yet. The roster is what a trainer may read of it.
    pub fn new(leader: Arc<Leader>, cgroups: Cgroups, roster: watch::Receiver<RosterView>) -> Arc<Self> {
        let core = leader.core().clone();
        core.set_facts(|facts| facts.healthy = true);
        let (attempts, history, retained, pinning) = (Arc::default(), Mutex::default(), Mutex::default(), Pinning::default());
        Arc::new(Self { core, leader, attempts, cgroups, history, retained, roster, pinning })
    }

    /// Publishes what comes, and feeds in between, until `cancel`.
    pub async fn run(self: Arc<Self>, queue: Arc<PublishQueue>, cancel: CancellationToken) {
        let feeder = Feeder::new(self.leader.clone(), self.clone(), self.attempts.clone());
        loop {
            let job = tokio::select! {
                biased;
                () = cancel.cancelled() => return,
                job = queue.take() => job,
                // A feeding that is under way is given up for a publish: its members get the new version instead.
                () = feeder.run() => return,
                // So is a measurement.
                () = self.leader.preflights() => return,
                () = self.pin_between_updates() => return,
            };
            self.pinning.stop();
            tokio::select! {
                () = cancel.cancelled() => return,
                () = self.publish(job, &feeder) => {}
            }
        }
    }

    /// The version that every rollout should hold: the group's, or one that was published since.
    fn current(&self, epoch: Option<&Epoch>) -> Option<HeldVersion> {
        let reported = epoch.map_or_else(|| self.core.current(), |epoch| epoch.current().cloned());
        let mut history = lock(&self.history);
        epoch.into_iter().flat_map(|epoch| &epoch.commit.refused).for_each(|version| history.refused(*version));
        if let (Some(returned), Some(to)) = (epoch.and_then(Epoch::returned), &reported) {
            history.went_back(to, returned.from);
        }
        let done = history.done().cloned();
        match (done, reported) {
            (Some(done), Some(reported)) => Some(if done.version >= reported.version { done } else { reported }),
            (done, reported) => done.or(reported),
        }
    }

    /// Waits until the roster says what the publish is about to say: a trainer that read it right after its publish got the version
    /// before. The publish succeeded either way, so this ends soon, and with its deadline.
    async fn in_roster(&self, result: &PublishResult, deadline: Instant) {
        let mut roster = self.roster.clone();
        let reported = roster.wait_for(|shown| tells(shown, result.version, &result.installed));
        if timeout_at(deadline.min(Instant::now() + IN_ROSTER), reported).await.is_err() {
            tracing::warn!(version = result.version, "the roster does not show yet who serves the version that was published");
        }
    }

    fn retained(&self, wanted: &HeldVersion) -> Option<Arc<Retained>> {
        lock(&self.retained).find(wanted).cloned()
    }

    /// Changes what is kept, and says so.
    fn change_archive<T>(&self, change: impl FnOnce(&mut Archive<Retained>) -> T) -> T {
        let mut archive = lock(&self.retained);
        let outcome = change(&mut archive);
        let mut kept = archive.all().map(|retained| retained.held.clone());
        let newest = kept.next();
        let earlier: Vec<HeldVersion> = kept.collect();
        drop(archive);
        self.core.set_facts(|facts| (facts.retained, facts.earlier) = (newest, earlier));
        outcome
    }
}

#[async_trait]
impl Holder for Source {
    fn to_feed(&self, epoch: &Epoch) -> Option<Copy> {
        let target = self.current(Some(epoch))?;
        let ours = epoch.current().is_none_or(|current| target.version > current.version);
        let retained = self.retained(&target)?;
        // Of the group's version, the coordinator chose who feeds; of one that came since, only the source can know.
        if !ours && !epoch.feeds() {
            return None;
        }
        Some(Copy { held: retained.held.clone(), algorithm: retained.algorithm, source: retained.source()? })
    }
}
