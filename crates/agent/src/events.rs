//! The event stream of an agent: facts first, then every change, and a heartbeat each second.
//!
//! Everything is kept as the latest value, so who attaches late reads what it missed; nothing is only pushed. It decides nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::Stream;
use tokio::sync::{Notify, watch};
use tokio::time::{Interval, MissedTickBehavior, interval};

use weightsync_core::protocol::{AgentEvent, EpochId, MemberName, MemberState, UpdateView};

const HEARTBEAT: Duration = Duration::from_secs(1);

/// A peer counts as silent after this long without a line: three heartbeats, and what a busy machine may add.
pub(crate) const SILENT_AFTER: Duration = Duration::from_millis(3_500);

/// Losses that are kept for who attaches late.
const KEPT_LOSSES: usize = 64;

/// Ended updates that are kept for a reader that is slow.
const KEPT_ENDS: usize = 16;

/// What readers see, as it is now.
pub struct Events {
    state: watch::Sender<Arc<MemberState>>,
    update: watch::Sender<Updates>,
    losses: watch::Sender<Losses>,
    coordinators: Arc<AtomicUsize>,
    refresh: Arc<Notify>,
}

/// The update that runs or ended last, and how those before it ended: a reader counts each end, so a new update must not overwrite it.
#[derive(Debug, Clone, Default)]
pub struct Updates {
    latest: Option<Arc<UpdateView>>,
    /// Grows with each end, so that a reader knows which it has sent.
    ended: usize,
    /// The last ends, without `latest`.
    earlier: VecDeque<Arc<UpdateView>>,
}

impl Updates {
    fn set(&mut self, view: UpdateView) {
        let attempt = |view: &UpdateView| (view.id.clone(), view.version, view.attempt, view.feeding);
        let view = Arc::new(view);
        let before = self.latest.replace(view.clone());
        let Some(ended) = before.filter(|before| before.phase.is_over() && attempt(before) != attempt(&view)) else { return };
        self.earlier.push_back(ended);
        self.ended += 1;
        if self.earlier.len() > KEPT_ENDS {
            self.earlier.pop_front();
        }
    }

    /// The ends that a reader has not seen, then the latest view. `seen` counts what it has seen.
    pub fn since(&self, seen: &mut usize) -> impl Iterator<Item = &Arc<UpdateView>> {
        let new = self.ended.saturating_sub(*seen).min(self.earlier.len());
        *seen = self.ended;
        self.earlier.iter().skip(self.earlier.len() - new).chain(&self.latest)
    }
}

/// Losses of peers in the latest epoch in which there were some.
#[derive(Debug, Clone, Default)]
struct Losses {
    id: Option<EpochId>,
    /// Grows with each loss, so that a reader knows which it has reported.
    count: usize,
    latest: VecDeque<(MemberName, String)>,
}

#[allow(missing_docs)]
impl Events {
    pub fn new(state: MemberState) -> Self {
        Self {
            state: watch::Sender::new(Arc::new(state)),
            update: watch::Sender::default(),
            losses: watch::Sender::default(),
            coordinators: Arc::default(),
            refresh: Arc::default(),
        }
    }

    pub fn state(&self) -> Arc<MemberState> {
        self.state.borrow().clone()
    }

    pub fn states(&self) -> watch::Receiver<Arc<MemberState>> {
        self.state.subscribe()
    }

    pub fn set_state(&self, state: MemberState) {
        self.state.send_if_modified(|known| {
            let changed = **known != state;
            if changed {
                *known = Arc::new(state);
            }
            changed
        });
    }

    pub fn set_update(&self, mut view: UpdateView) {
        view.shorten();
        self.update.send_modify(|updates| updates.set(view));
    }

    pub fn updates(&self) -> watch::Receiver<Updates> {
        self.update.subscribe()
    }

    #[cfg(test)]
    pub(crate) fn update(&self) -> Option<Arc<UpdateView>> {
        self.update.borrow().latest.clone()
    }

    /// A peer of an epoch was lost. Reported once for each peer and cause.
    pub fn peer_lost(&self, id: &EpochId, peer: &MemberName, cause: &str) {
        self.losses.send_if_modified(|losses| {
            if losses.id.as_ref() != Some(id) {
                losses.latest.clear();
                losses.id = Some(id.clone());
            }
            if losses.latest.iter().any(|(known, why)| known == peer && why == cause) {
                return false;
            }
            losses.latest.push_back((peer.clone(), cause.to_owned()));
            if losses.latest.len() > KEPT_LOSSES {
                losses.latest.pop_front();
            }
            losses.count += 1;
            true
        });
    }

    /// Wakes anyone who announces this agent: what its object wants of it has changed.
    pub fn refresh(&self) -> &Arc<Notify> {
        &self.refresh
    }

    /// Whether a coordinator reads the stream: without one, the agent announces itself.
    pub fn has_coordinator(&self) -> bool {
        self.coordinators.load(Ordering::Acquire) > 0
    }

    pub fn stream(&self, coordinator: bool) -> impl Stream<Item = AgentEvent> + Send + use<> {
        let mut heartbeat = interval(HEARTBEAT);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut reader = Reader {
            state: self.state.subscribe(),
            update: self.update.subscribe(),
            // Ends from before it attached are not its business, but for the latest.
            ends: self.update.borrow().ended,
            losses: self.losses.subscribe(),
            reported: 0,
            heartbeat,
            waiting: VecDeque::new(),
            _attached: coordinator.then(|| Attached::new(&self.coordinators)),
        };
        reader.state.mark_changed();
        if reader.update.borrow().latest.is_some() {
            reader.update.mark_changed();
        }
        reader.losses.mark_changed();
        futures::stream::unfold(reader, |mut reader| async move {
            let event = reader.next().await;
            Some((event, reader))
        })
    }
}

/// Counts a coordinator for as long as its stream lives.
struct Attached(Arc<AtomicUsize>);

impl Attached {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count.clone())
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

struct Reader {
    state: watch::Receiver<Arc<MemberState>>,
    update: watch::Receiver<Updates>,
    ends: usize,
    losses: watch::Receiver<Losses>,
    reported: usize,
    heartbeat: Interval,
    waiting: VecDeque<AgentEvent>,
    _attached: Option<Attached>,
}

impl Reader {
    async fn next(&mut self) -> AgentEvent {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                return event;
            }
            // In this order: a reader knows the epoch of a loss or an update before it hears of it.
            tokio::select! {
                biased;
                Ok(()) = self.state.changed() => {
                    let state = Box::new(MemberState::clone(&self.state.borrow_and_update()));
                    return AgentEvent::Snapshot { state };
                }
                Ok(()) = self.losses.changed() => self.take_losses(),
                Ok(()) = self.update.changed() => {
                    let updates = self.update.borrow_and_update();
                    let views = updates.since(&mut self.ends);
                    self.waiting.extend(views.map(|view| AgentEvent::Update { update: UpdateView::clone(view) }));
                }
                _ = self.heartbeat.tick() => return AgentEvent::Heartbeat,
            }
        }
    }

    fn take_losses(&mut self) {
        let losses = self.losses.borrow_and_update().clone();
        let Some(id) = losses.id else { return };
        let new = losses.count.saturating_sub(self.reported).min(losses.latest.len());
        self.reported = losses.count;
        let skip = losses.latest.len() - new;
        let new = losses.latest.into_iter().skip(skip);
        self.waiting.extend(new.map(|(peer, cause)| AgentEvent::PeerLost { id: id.clone(), peer, cause }));
    }
}
