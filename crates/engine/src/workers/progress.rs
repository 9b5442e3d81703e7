//! The progress of one server's workers.
//!
//! Decides for all of them together: the slowest rank counts, and a step of the draft model's session differs from the same step of the
//! model's session.

use std::collections::BTreeMap;

use serde::Deserialize;
use tokio::sync::watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Step {
    /// An earlier open session has ended.
    Ended,
    /// Layers are disassembled.
    Started,
    /// Everything was loaded.
    Updated,
    /// Every layer is complete and new.
    Finished,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Rank {
    pub(super) verified: u32,
    pub(super) taken: u32,
    pub(super) did: Option<Step>,
    /// Sessions that were started: the second one is the draft model's.
    pub(super) sessions: u32,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Progress {
    pub(super) ranks: BTreeMap<u32, Rank>,
    pub(super) failure: Option<String>,
}

impl Progress {
    pub(super) fn verified(&self) -> u32 {
        self.ranks.values().map(|rank| rank.verified).min().unwrap_or(0)
    }

    pub(super) fn taken(&self) -> u32 {
        self.ranks.values().map(|rank| rank.taken).min().unwrap_or(0)
    }

    /// Whether every rank took that step of a session, counted from 1 (0: one that another client left open).
    pub(super) fn did(&self, session: u32, step: Step) -> bool {
        self.ranks.values().all(|rank| rank.sessions >= session && rank.did >= Some(step))
    }
}

/// Waits for progress; pending without end if it can never come.
pub(super) async fn reached(mut progress: watch::Receiver<Progress>, far: impl FnMut(&Progress) -> bool) {
    if progress.wait_for(far).await.is_err() {
        std::future::pending::<()>().await;
    }
}
