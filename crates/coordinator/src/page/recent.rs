//! The last events of one object, for the web page. Bounded; nothing is stored.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

use super::now;
use crate::{CoordinatorEvent, EventSink};
use weightsync_core::protocol::{MemberName, Reason, cut};

/// Events that are kept for one object.
const KEPT: usize = 50;
/// Longest message in bytes.
const MESSAGE: usize = 512;

/// An event with its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct RecentEvent {
    /// In ms since 1970.
    at: u64,
    reason: &'static str,
    member: Option<MemberName>,
    message: String,
    warning: bool,
}

/// The last events of one object. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct RecentEvents(Arc<Mutex<VecDeque<RecentEvent>>>);

impl RecentEvents {
    /// Keeps an event.
    pub fn note(&self, event: &CoordinatorEvent) {
        let reason: Reason = event.reason;
        let message = cut(&event.message, MESSAGE);
        let mut kept = self.0.lock();
        kept.push_back(RecentEvent { at: now(), reason: reason.as_str(), member: event.member.clone(), message, warning: event.warning });
        while kept.len() > KEPT {
            kept.pop_front();
        }
    }

    /// The events, the latest first.
    pub fn latest(&self) -> Vec<RecentEvent> {
        self.0.lock().iter().rev().cloned().collect()
    }

    /// A sink that keeps each event, and passes it on.
    pub fn keep_from(&self, sink: impl EventSink + 'static) -> impl EventSink + 'static {
        Keep { recent: self.clone(), sink }
    }
}

struct Keep<S> {
    recent: RecentEvents,
    sink: S,
}

impl<S: EventSink> EventSink for Keep<S> {
    fn publish(&self, event: CoordinatorEvent) {
        self.recent.note(&event);
        self.sink.publish(event);
    }
}
