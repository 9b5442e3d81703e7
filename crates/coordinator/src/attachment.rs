//! Listens to one agent. Decides when the agent is lost: its connection closed or fell silent, and one attempt to reopen it failed. It
//! passes events on unchanged, and ignores messages of another incarnation of the agent.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::timing::Timing;
use weightsync_core::protocol::{AgentEvent, EVENTS_PATH, Incarnation};
use weightsync_net::https::{AgentClient, EventStream};

/// A stream that ends within this time after it was reopened is not opened a third time: the agent accepts connections, but does not work.
const STEADY: Duration = Duration::from_secs(1);
/// A stream that was opened less than this ago is not replaced: the announcement may have been sent before the agent saw the stream.
const FRESH: Duration = Duration::from_millis(500);

pub(super) enum Heard {
    Event(Box<AgentEvent>),
    /// No more events follow.
    Lost(String),
}

/// One line of one attachment; `number` distinguishes it from an earlier attachment to the same agent.
pub(super) struct FromAgent {
    pub(super) from: Incarnation,
    pub(super) number: u64,
    pub(super) heard: Heard,
}

/// A running listener; dropping it ends it.
pub(super) struct Attachment {
    pub(super) number: u64,
    /// When it was first opened.
    opened: Arc<OnceLock<Instant>>,
    _task: AbortOnDropHandle<()>,
}

pub(super) struct Listener {
    pub(super) client: AgentClient,
    pub(super) agent: Incarnation,
    pub(super) address: String,
    pub(super) number: u64,
    pub(super) timing: Timing,
    pub(super) silence: Duration,
    pub(super) out: mpsc::Sender<FromAgent>,
}

impl Attachment {
    pub(super) fn start(listener: Listener, cancel: CancellationToken) -> Self {
        let (number, opened) = (listener.number, Arc::<OnceLock<Instant>>::default());
        let of_task = opened.clone();
        let task = tokio::spawn(async move {
            tokio::select! {
                () = cancel.cancelled() => {}
                () = listener.run(&of_task) => {}
            }
        });
        Self { number, opened, _task: AbortOnDropHandle::new(task) }
    }

    /// Whether the stream is being opened, which has a deadline, or was opened a moment ago.
    pub(super) fn is_fresh(&self) -> bool {
        self.opened.get().is_none_or(|opened| opened.elapsed() < FRESH)
    }
}

impl Listener {
    async fn run(self, first_opened: &OnceLock<Instant>) {
        let mut opened_before = false;
        let cause = loop {
            let events = self.client.events(&self.address, &self.agent.pod_uid, EVENTS_PATH, self.timing.attach, self.silence).await;
            let stream = match events {
                Ok(stream) => stream,
                Err(error) => break error.to_string(),
            };
            let opened = Instant::now();
            first_opened.get_or_init(|| opened);
            let Some(cause) = self.listen(stream).await else { return };
            if opened_before && opened.elapsed() < STEADY {
                break cause;
            }
            tracing::debug!(agent = %self.address, cause, "event stream ended, opening it again");
            opened_before = true;
        };
        self.pass(Heard::Lost(cause)).await;
    }

    /// Why the stream ended; `None` if the reader is gone.
    async fn listen(&self, mut stream: EventStream<AgentEvent>) -> Option<String> {
        loop {
            let event = match stream.next().await {
                Ok(event) => event,
                Err(end) => return Some(end.to_string()),
            };
            if let AgentEvent::Snapshot { state } = &event
                && state.incarnation != self.agent
            {
                return Some(format!("another life of the agent answers ({})", state.incarnation.instance));
            }
            if !self.pass(Heard::Event(Box::new(event))).await {
                return None;
            }
        }
    }

    async fn pass(&self, heard: Heard) -> bool {
        self.out.send(FromAgent { from: self.agent.clone(), number: self.number, heard }).await.is_ok()
    }
}
