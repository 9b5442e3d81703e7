//! The progress of one server's workers.
//!
//! Decides for all of them together: the slowest rank counts, and a step of the draft model's session differs from the same step of the
//! model's session.

use std::collections::BTreeMap;

use serde::Deserialize;
use tokio::sync::watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Step {
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
pub(crate) struct Rank {
    pub(crate) verified: u32,
    pub(crate) taken: u32,
    pub(crate) did: Option<Step>,
    /// Sessions that were started: the second one is the draft model's.
    pub(crate) sessions: u32,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Progress {
    pub(crate) ranks: BTreeMap<u32, Rank>,
    pub(crate) failure: Option<String>,
}

impl Progress {
    pub(crate) fn verified(&self) -> u32 {
        self.ranks.values().map(|rank| rank.verified).min().unwrap_or(0)
    }

    pub(crate) fn taken(&self) -> u32 {
        self.ranks.values().map(|rank| rank.taken).min().unwrap_or(0)
    }

    /// Whether every rank took that step of a session, counted from 1 (0: one that another client left open).
    pub(crate) fn did(&self, session: u32, step: Step) -> bool {
        self.ranks.values().all(|rank| rank.sessions >= session && rank.did >= Some(step))
    }
}

/// Waits for progress; pending without end if it can never come.
pub(crate) async fn reached(mut progress: watch::Receiver<Progress>, far: impl FnMut(&Progress) -> bool) {
    if progress.wait_for(far).await.is_err() {
        std::future::pending::<()>().await;
    }
}
