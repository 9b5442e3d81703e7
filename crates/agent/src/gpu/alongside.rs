//! What stands between an endpoint's GPUs and the process that they are for: why the container has none, and why memory of one that it has cannot be
//! shared with the engine. [`plan::sharing`](weightsync_core::plan::sharing) decides; here its facts are gathered.

use super::{Gpus, Open};
use crate::surroundings::Surroundings;
use weightsync_core::plan::{Neighbour, sharing};

impl Gpus {
    /// Why the engine cannot be handed memory of these GPUs (CUDA IPC); empty when nothing speaks against it.
    pub(super) async fn unshared(&self, open: &[Open]) -> String {
        let (child, port) = (self.settings.child, self.core.me().port);
        let gpus = open.iter().map(|entry| entry.gpu.clone()).collect();
        // It reads a file of each process that it can see.
        let read = tokio::task::spawn_blocking(move || {
            let around = Surroundings::of_this_process();
            let engine = match (child, port) {
                (true, _) => around.child(),
                (false, Some(port)) => around.listener(port),
                // A trainer says by itself what it can share.
                (false, None) => Neighbour::Unknown,
            };
            let verdict = sharing(&around.facts(Ok(gpus), engine));
            for note in &verdict.notes {
                tracing::warn!(note, "GPUs");
            }
            verdict.gpus.err().map(|why| why.to_string())
        });
        read.await.ok().flatten().unwrap_or_default()
    }
}

/// Why there is no GPU here, with what can be changed about the container; `cause` is the worker's word.
pub(super) fn missing(cause: String) -> String {
    let facts = Surroundings::of_this_process().facts(Err(cause.clone()), Neighbour::Unknown);
    match sharing(&facts).gpus {
        Err(why) if !why.to_string().contains(&cause) => format!("{why} ({cause})"),
        Err(why) => why.to_string(),
        Ok(_) => cause,
    }
}
