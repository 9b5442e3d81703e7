//! What stands between a trainer that drives its own data plane and the source's agent: which epoch works, and what the trainer asks.
//!
//! [`epochs`] decides when an epoch is reported and when it is over. This file only keeps the latest word for anyone who watches, and the line of
//! requests; like the publish queue it outlives the claims of its process.

pub mod epochs;

use std::sync::Arc;

use tokio::sync::{Mutex, mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use weightsync_core::protocol::{ClientReply, PublishError, PublishErrorCode, PublishResult, ReplicaReport, Topology, Version};

/// What a trainer that watches epochs is to know.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EpochState {
    /// The epoch that works, without a port: each watcher gets a socket of its own.
    pub present: Option<Arc<Topology>>,
    /// Number of the last epoch that ended or is of no use any more, and why.
    pub over: Option<(u64, String)>,
    /// Why there will be none, while the object wants it so.
    pub refused: Option<String>,
}

/// A version that the trainer's own data plane brings to an epoch.
#[derive(Debug)]
pub struct ExternalJob {
    pub epoch: u64,
    pub version: Version,
    /// What identifies its weights, by the trainer's word.
    pub digest: Option<String>,
    /// What engines will report as their weight version.
    pub engine_version: Option<String>,
    pub deadline: Instant,
    /// Set when the trainer gave it up, or went away.
    pub cancel: CancellationToken,
    pub words: mpsc::UnboundedReceiver<Word>,
    pub tell: Teller,
}

/// What a trainer says while its data plane works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Word {
    Report(ReplicaReport),
    Conclude,
}

#[derive(Debug)]
pub enum Ask {
    Update(Box<ExternalJob>),
    /// Another epoch, because the trainer's group in this one does not work.
    Broken {
        epoch: u64,
        reason: String,
    },
}

/// The agent's end of an [`ExternalJob`]: anyone who asked hears exactly one outcome, also when the job is dropped.
#[derive(Debug)]
pub struct Teller {
    replies: mpsc::UnboundedSender<ClientReply>,
    over: bool,
}

impl Teller {
    pub fn new() -> (Self, mpsc::UnboundedReceiver<ClientReply>) {
        let (replies, reported) = mpsc::unbounded_channel();
        (Self { replies, over: false }, reported)
    }

    /// Every engine is marked: bytes may move.
    pub fn open(&self, version: Version) {
        // No one listens any more: the cancellation says so.
        let _gone = self.replies.send(ClientReply::Open { version });
    }

    pub fn end(mut self, outcome: Result<PublishResult, PublishError>) {
        self.say(match outcome {
            Ok(result) => ClientReply::Done { result },
            Err(error) => ClientReply::Error { error },
        });
    }

    fn say(&mut self, reply: ClientReply) {
        self.over = true;
        let _gone = self.replies.send(reply);
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        if !self.over {
            let message = "the agent stopped working on this version: bring it again in the next epoch".into();
            let error = PublishError { code: PublishErrorCode::Internal, message, retryable: true, phase: None, member: None };
            self.say(ClientReply::Error { error });
        }
    }
}

/// The meeting place of the trainer's connections and the source.
#[derive(Debug)]
pub struct ExternalDesk {
    epochs: watch::Sender<EpochState>,
    asks: mpsc::UnboundedSender<Ask>,
    asked: Mutex<mpsc::UnboundedReceiver<Ask>>,
}

impl Default for ExternalDesk {
    fn default() -> Self {
        let (asks, asked) = mpsc::unbounded_channel();
        Self { epochs: watch::Sender::default(), asks, asked: Mutex::new(asked) }
    }
}

impl ExternalDesk {
    pub fn epochs(&self) -> watch::Receiver<EpochState> {
        self.epochs.subscribe()
    }

    pub fn ask(&self, ask: Ask) {
        // The receiver is ours: it is there as long as we are.
        let _ = self.asks.send(ask);
    }

    /// The next request. May be dropped and called again.
    pub async fn asked(&self) -> Ask {
        match self.asked.lock().await.recv().await {
            Some(ask) => ask,
            None => std::future::pending().await,
        }
    }

    /// An epoch works.
    fn tell(&self, topology: Topology) {
        self.epochs
            .send_modify(|epochs| *epochs = EpochState { present: Some(Arc::new(topology)), over: epochs.over.take(), refused: None });
    }

    /// The epoch is over, or of no use to the trainer any more. The first reason counts.
    pub fn over(&self, epoch: u64, reason: &str) {
        self.epochs.send_if_modified(|epochs| {
            let known = epochs.over.as_ref().is_some_and(|(over, _)| *over >= epoch);
            if !known {
                epochs.over = Some((epoch, reason.to_owned()));
            }
            let present = epochs.present.take_if(|present| present.epoch <= epoch);
            !known || present.is_some()
        });
    }

    /// There will be no epoch for a trainer's own data plane.
    fn refuse(&self, reason: &str) {
        self.epochs.send_if_modified(|epochs| {
            let changed = epochs.refused.as_deref() != Some(reason);
            epochs.refused = Some(reason.to_owned());
            changed
        });
    }
}
