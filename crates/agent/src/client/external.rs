//! The connection of a trainer that drives its own data plane: epochs as they come, and the one version that is under way.
//!
//! Decides which epoch was announced and is to be called over, and ends a version that no one else ends. The socket of an epoch's rendezvous is
//! bound here, before its port is asked to anyone, and given away with the word (F21): no copy stays, so when the trainer's process ends the
//! port refuses connections instead of swallowing them.

use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::wire::{Outbox, Outgoing};
use crate::external::{Ask, EpochState, ExternalDesk, ExternalJob, Teller, Word};
use weightsync_core::protocol::{ClientReply, PublishError, PublishErrorCode, ReplicaReport, Topology, Version};

/// How long the leader may take to end a version that was given up or whose time is over; then the connection ends it.
const GRACE: Duration = Duration::from_secs(10);

/// Longest version; a larger number is taken as this.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// What a connection knows of epochs and of its own version.
pub(super) struct ExternalSide {
    desk: Arc<ExternalDesk>,
    outbox: Outbox,
    epochs: Option<watch::Receiver<EpochState>>,
    reported: Option<u64>,
    running: Option<Running>,
}

struct Running {
    version: Version,
    reported: mpsc::UnboundedReceiver<ClientReply>,
    words: mpsc::UnboundedSender<Word>,
    cancel: CancellationToken,
    give_up_at: Instant,
}

impl ExternalSide {
    pub(super) fn new(desk: Arc<ExternalDesk>, outbox: Outbox) -> Self {
        Self { desk, outbox, epochs: None, reported: None, running: None }
    }

    /// Whether the client waits for signs of life.
    pub(super) fn listens(&self) -> bool {
        self.epochs.is_some()
    }

    /// Sends epochs from now on, the present one first.
    pub(super) fn watch(&mut self) {
        let mut epochs = self.desk.epochs();
        epochs.mark_changed();
        self.epochs = Some(epochs);
    }

    /// Waits for something to say, and says it. May be dropped and called again.
    pub(super) async fn next(&mut self) {
        let running = async {
            match &mut self.running {
                Some(running) => running.reported.recv().await,
                None => std::future::pending().await,
            }
        };
        let changed = async {
            let reported = match &mut self.epochs {
                Some(epochs) => epochs.changed().await.is_ok(),
                None => false,
            };
            if !reported {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            // The outcome of a version before the end of its epoch.
            biased;
            reply = running => self.pass_on(reply),
            () = changed => self.bring_up_to_date(),
        }
    }

    fn pass_on(&mut self, reply: Option<ClientReply>) {
        let open = matches!(reply, Some(ClientReply::Open { .. }));
        if !open {
            self.running = None;
        }
        if let Some(reply) = reply {
            self.outbox.say(reply);
        }
    }

    fn bring_up_to_date(&mut self) {
        let Some(epochs) = self.epochs.as_mut().map(|epochs| epochs.borrow_and_update().clone()) else { return };
        let present = epochs.present.as_ref();
        if let Some(epoch) = self.reported.filter(|reported| present.map(|present| present.epoch) != Some(*reported)) {
            self.reported = None;
            let over = epochs.over.as_ref().filter(|(over, _)| *over >= epoch);
            let reason = over.map_or_else(|| "another epoch takes its place".to_owned(), |(_, reason)| reason.clone());
            self.outbox.say(ClientReply::Fenced { epoch, reason });
        }
        if let Some(reason) = epochs.refused.filter(|_| present.is_none()) {
            self.outbox.say(ClientReply::Error { error: error(PublishErrorCode::NotAllowed, reason, false) });
            return;
        }
        let Some(present) = present.filter(|present| self.reported != Some(present.epoch)) else { return };
        match listen(present) {
            Ok((topology, listener)) => {
                self.reported = Some(topology.epoch);
                self.outbox.put(Outgoing::WithListener(ClientReply::Epoch { topology }, listener));
            }
            Err(cause) => {
                tracing::error!(%cause, address = present.address, "no port for the rendezvous of an epoch");
                let message = format!("no port for the rendezvous could be bound on {}: {cause}", present.address);
                self.outbox.say(ClientReply::Error { error: error(PublishErrorCode::Internal, message, true) });
            }
        }
    }

    pub(super) fn begin(
        &mut self,
        epoch: u64,
        version: Version,
        digest: Option<String>,
        engine_version: Option<String>,
        timeout_ms: u64,
    ) -> Result<(), String> {
        if let Some(running) = &self.running {
            return Err(format!("version {version} was begun on a connection whose version {} still runs", running.version));
        }
        if timeout_ms == 0 {
            return Err("a version needs a timeout of at least 1 ms".into());
        }
        let deadline = Instant::now() + Duration::from_millis(timeout_ms).min(LONGEST);
        let (tell, reported) = Teller::new();
        let (to_leader, words) = mpsc::unbounded_channel();
        let cancel = CancellationToken::new();
        self.running = Some(Running { version, reported, words: to_leader, cancel: cancel.clone(), give_up_at: deadline + GRACE });
        let job = ExternalJob { epoch, version, digest, engine_version, deadline, cancel, words, tell };
        self.desk.ask(Ask::Update(Box::new(job)));
        Ok(())
    }

    pub(super) fn report(&self, report: ReplicaReport) {
        let reason = report.reason.chars().take(500).collect();
        self.word(Word::Report(ReplicaReport { reason, ..report }));
    }

    pub(super) fn conclude(&self) {
        self.word(Word::Conclude);
    }

    /// The trainer's group of that epoch does not work; with a version under way, that is given up.
    pub(super) fn broken(&mut self, epoch: u64, reason: &str) {
        let reason: String = reason.chars().take(500).collect();
        if self.running.is_some() {
            self.cancel(&reason);
        } else {
            self.desk.ask(Ask::Broken { epoch, reason });
        }
    }

    pub(super) fn cancel(&mut self, reason: &str) {
        if let Some(running) = &mut self.running {
            tracing::info!(version = running.version, reason, "the trainer gives its version up");
            running.cancel.cancel();
            running.give_up_at = running.give_up_at.min(Instant::now() + GRACE);
        }
    }

    /// The outcome that no one else gave.
    pub(super) fn tick(&mut self, now: Instant) {
        if let Some(running) = self.running.take_if(|running| now >= running.give_up_at) {
            running.cancel.cancel();
            let message = format!("version {} had no outcome in time", running.version);
            self.outbox.say(ClientReply::Error { error: error(PublishErrorCode::Timeout, message, true) });
        }
    }

    /// The client is gone: its data plane with it.
    pub(super) fn leave(&mut self) {
        if let Some(running) = self.running.take() {
            running.cancel.cancel();
        }
    }

    fn word(&self, word: Word) {
        if let Some(running) = &self.running {
            // The leader may be done already: its outcome is on its way.
            let _gone = running.words.send(word);
        }
    }
}

/// A bound socket for an epoch's rendezvous, and the epoch with its port.
fn listen(present: &Topology) -> std::io::Result<(Topology, TcpListener)> {
    let ip: IpAddr = present.address.parse().map_err(std::io::Error::other)?;
    let listener = TcpListener::bind((ip, 0))?;
    let port = listener.local_addr()?.port();
    Ok((Topology { port, ..present.clone() }, listener))
}

fn error(code: PublishErrorCode, message: String, retryable: bool) -> PublishError {
    PublishError { code, message, retryable, phase: None, member: None }
}
