//! Publishes Events, best effort: if the API server is unavailable, Events are lost and reconciles continue. A full queue drops the oldest
//! Event, because users look for the newest cause.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::metrics::ControllerMetrics;
use weightsync_coordinator::page::RecentEvents;
use weightsync_coordinator::{CoordinatorEvent, EventSink};
use weightsync_core::protocol::cut;

/// Name under which Events are reported.
pub const REPORTER: &str = "weightsync-controller";
/// Queued Events: a controller that starts with hundreds of objects creates Events of all of them at once.
const QUEUE: usize = 4096;
/// Events that are published at once.
const AT_ONCE: usize = 8;
/// Longest note in bytes that the API server accepts.
const NOTE: usize = 1024;
const DEADLINE: Duration = Duration::from_secs(5);
/// For so long a recorder joins an Event to an earlier one (kube 5.0; read).
const JOINED: Duration = Duration::from_secs(6 * 60);
/// Most notes that have a recorder.
const NOTES: usize = 1024;

struct Reported {
    regarding: ObjectReference,
    related: Option<ObjectReference>,
    event: CoordinatorEvent,
}

/// The sender of Events. Clones share the queue.
#[derive(Clone)]
pub(super) struct Events {
    queue: Arc<Queue>,
    /// Notifies the publisher that the last clone is gone.
    _open: Arc<Open>,
    metrics: ControllerMetrics,
}

/// Queued Events, at most [`QUEUE`].
#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Notify,
}

#[derive(Default)]
struct Waiting {
    events: VecDeque<Reported>,
    closed: bool,
}

struct Open(Arc<Queue>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.waiting.lock().closed = true;
        self.0.changed.notify_one();
    }
}

impl Queue {
    /// Adds an Event; false if the oldest one was dropped for it.
    fn push(&self, event: Reported) -> bool {
        let mut waiting = self.waiting.lock();
        let fits = waiting.events.len() < QUEUE;
        if !fits {
            waiting.events.pop_front();
        }
        waiting.events.push_back(event);
        self.changed.notify_one();
        fits
    }

    /// The oldest Event; `None` once the queue is closed and empty.
    async fn next(&self) -> Option<Reported> {
        loop {
            let changed = self.changed.notified();
            {
                let mut waiting = self.waiting.lock();
                if let Some(event) = waiting.events.pop_front() {
                    return Some(event);
                }
                if waiting.closed {
                    return None;
                }
            }
            changed.await;
        }
    }
}

/// One recorder for each note. A recorder joins Events of one reason and one pod to a series with the note of the first (kube 5.0; read): the
/// second cause would not be visible.
struct Recorders {
    client: Client,
    reporter: Reporter,
    by_note: Mutex<HashMap<String, (Recorder, Instant)>>,
}

impl Recorders {
    fn of(&self, note: &str) -> Recorder {
        let mut by_note = self.by_note.lock();
        let now = Instant::now();
        if by_note.len() >= NOTES {
            by_note.retain(|_, (_, used)| now.duration_since(*used) < JOINED);
        }
        if by_note.len() >= NOTES {
            // The cost is an Event where a series would have done.
            by_note.clear();
        }
        let new = || (Recorder::new(self.client.clone(), self.reporter.clone()), now);
        let (recorder, used) = by_note.entry(note.to_owned()).or_insert_with(new);
        *used = now;
        recorder.clone()
    }
}

impl Events {
    /// Starts publishing; ends when the last clone is dropped.
    pub(super) fn start(client: Client, instance: String, metrics: ControllerMetrics) -> Self {
        let queue = Arc::<Queue>::default();
        let lost = metrics.events_lost.clone();
        let reporter = Reporter { controller: REPORTER.to_owned(), instance: Some(instance) };
        let recorders = Arc::new(Recorders { client, reporter, by_note: Mutex::default() });
        let waiting = futures::stream::unfold(queue.clone(), |queue| async move { Some((queue.next().await?, queue)) });
        let publishing = waiting.for_each_concurrent(AT_ONCE, move |reported| {
            let (recorders, lost) = (recorders.clone(), lost.clone());
            async move {
                if !publish(&recorders, reported).await {
                    lost.inc();
                }
            }
        });
        tokio::spawn(publishing);
        Self { _open: Arc::new(Open(queue.clone())), queue, metrics }
    }

    /// The sender of one object, whose last events `recent` keeps.
    pub(super) fn of(&self, regarding: ObjectReference, recent: RecentEvents) -> ObjectEvents {
        ObjectEvents { events: self.clone(), regarding, recent }
    }
}

async fn publish(recorders: &Recorders, reported: Reported) -> bool {
    let Reported { regarding, related, event } = reported;
    let type_ = if event.warning { EventType::Warning } else { EventType::Normal };
    let note = cut(&note(&event), NOTE);
    let recorder = recorders.of(&note);
    let event = Event { type_, reason: event.reason.to_string(), note: Some(note), action: "Coordinate".to_owned(), secondary: related };
    match timeout(DEADLINE, recorder.publish(&event, &regarding)).await {
        Ok(Ok(())) => return true,
        Ok(Err(error)) => tracing::warn!(%error, reason = event.reason, "an Event was lost"),
        Err(_) => tracing::warn!(reason = event.reason, "an Event was lost: no response in time"),
    }
    false
}

fn note(event: &CoordinatorEvent) -> String {
    match &event.member {
        Some(member) if !event.message.contains(&member.0) => format!("{member}: {}", event.message),
        _ => event.message.clone(),
    }
}

pub(super) struct ObjectEvents {
    events: Events,
    regarding: ObjectReference,
    recent: RecentEvents,
}

impl ObjectEvents {
    pub(super) fn publish_about(&self, event: CoordinatorEvent, pod: Option<ObjectReference>) {
        tracing::info!(
            object = self.regarding.name,
            namespace = self.regarding.namespace,
            reason = %event.reason,
            member = event.member.as_ref().map(|member| member.0.as_str()),
            warning = event.warning,
            "{}",
            event.message
        );
        self.events.metrics.count_event(event.reason, event.warning);
        self.recent.note(&event);
        let reported = Reported { regarding: self.regarding.clone(), related: pod, event };
        if !self.events.queue.push(reported) {
            self.events.metrics.events_lost.inc();
            tracing::warn!("too many Events wait; the oldest was dropped");
        }
    }
}

impl EventSink for ObjectEvents {
    fn publish(&self, event: CoordinatorEvent) {
        // The head pod's name is the part of the member's name after the pool; groups of pods have their own names.
        let pod = event.member.as_ref().and_then(|member| member.0.split_once('/')).map(|(_, rest)| rest.split(':').next().unwrap_or(rest));
        let pod = pod.map(|name| ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(name.to_owned()),
            namespace: self.regarding.namespace.clone(),
            ..ObjectReference::default()
        });
        self.publish_about(event, pod);
    }
}
