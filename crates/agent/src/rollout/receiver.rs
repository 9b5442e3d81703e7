//! The life of receiving one attempt into the engine while its bytes travel: opened, receiving, settled, finished or given up.
//!
//! A task owns the engine's install, so that no connection that breaks leaves the engine half fed and running. Decides from when on the engine
//! counts as being changed, and what each end means for the machine. How bytes come, and how the engine is handed them, each [`Way`] decides.
//! Nothing is kept: a version that was installed so lies in no directory, and others are fed by members that have one.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use super::receive::Listener;
use super::state::{Ended, Outcome, State, Switch};
use super::switch::GRACE;
use super::{Rollout, Version};
use crate::group::refusal;
use crate::locks::lock;
use weightsync_core::protocol::{BeginRequest, FinishRequest, HeldVersion, ProvenBy, Refusal, RefusalCode, UpdateId};
use weightsync_core::weights::{DigestAlgorithm, Layout, Manifest};
use weightsync_engine::{InstallError, InstallReport, Left};

/// One way of bringing an attempt into the engine: the install itself. After an error of the engine it is over.
#[async_trait]
pub(super) trait Way: Send + Sized + 'static {
    /// What is known of the bytes that came, until the attempt is over.
    type Arrived: Send + 'static;
    /// One thing to do with the engine.
    type Order: Send + 'static;
    /// What a failure of the engine is called.
    const FAILED: &'static str;
    /// What shows that the engine holds the bytes.
    const PROVEN_BY: ProvenBy = ProvenBy::Digests;
    /// What it is called that orders are left when the stream ended.
    const UNSETTLED: &'static str;

    /// Whether the engine is being changed from this order on.
    fn changes(_order: &Self::Order) -> bool {
        true
    }

    async fn carry_out(&mut self, receiver: &EngineReceiver<Self>, order: Self::Order) -> Result<(), Undone>;

    /// The manifest of what arrived, if it is what the leader says; else why not.
    fn compare(receiver: &EngineReceiver<Self>, arrived: Self::Arrived, request: &FinishRequest) -> Result<Manifest, String>;

    /// Nothing is taken any more.
    fn close(_arrived: Self::Arrived) {}

    /// What is remembered of a failure.
    fn note(_state: &mut State<Version>, _error: &InstallError, _reason: &str) {}

    async fn finish(self, version: HeldVersion) -> Result<InstallReport, InstallError>;

    async fn abandon(self, reason: &str) -> Left;
}

/// Why an order was not carried out.
pub(super) enum Undone {
    /// It makes no sense; the install goes on.
    Refused(Refusal),
    /// The install is over.
    Failed(InstallError),
}

impl From<InstallError> for Undone {
    fn from(error: InstallError) -> Self {
        Self::Failed(error)
    }
}

type Answer = oneshot::Sender<Result<(), Refusal>>;

/// What the task does, in this order.
enum Order<W: Way> {
    Do(W::Order, Option<Answer>),
    /// Answer when all before this was done.
    Settle(oneshot::Sender<()>),
    /// The version is what its manifest says: the engine takes its last step. And whether the engine's own checksums are those of others.
    Finish(HeldVersion, bool),
    GiveUp(String),
}

/// Receives one attempt into the engine.
pub(super) struct EngineReceiver<W: Way> {
    pub(super) update: UpdateId,
    pub(super) layout: Arc<Layout>,
    pub(super) algorithm: DigestAlgorithm,
    pub(super) listener: Box<dyn Listener>,
    pub(super) arrived: Mutex<Option<W::Arrived>>,
    begun: Instant,
    limits: Limits,
    /// Why the engine took no more.
    failed: Mutex<Option<String>>,
    orders: mpsc::UnboundedSender<Order<W>>,
}

/// Longest times of an install, and of one bucket in it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) timeout: Duration,
    pub(super) silence: Duration,
}

impl<W: Way> EngineReceiver<W> {
    /// Nothing is taken any more, and the engine's install is given up.
    pub(super) fn discard(&self, reason: &str) {
        self.close();
        // The task is gone when the engine failed before, or finished.
        let _gone = self.orders.send(Order::GiveUp(reason.to_owned()));
    }

    /// Has the engine take its last step; `agreed` where its own checksums are those of others. False when the install is over.
    pub(super) fn finish(&self, held: HeldVersion, agreed: bool) -> bool {
        self.orders.send(Order::Finish(held, agreed)).is_ok()
    }

    /// Waits until all orders are carried out, and compares what arrived with what the leader sent.
    pub(super) async fn conclude(&self, request: &FinishRequest) -> Result<HeldVersion, String> {
        let (done, settled) = oneshot::channel();
        let sent = self.orders.send(Order::Settle(done)).is_ok();
        let settled = sent && timeout(self.limits.silence, settled).await.is_ok_and(|settled| settled.is_ok());
        if let Some(reason) = self.failed() {
            return Err(reason);
        }
        if !settled {
            return Err(format!("{} within {:?}", W::UNSETTLED, self.limits.silence));
        }
        let Some(arrived) = lock(&self.arrived).take() else { return Err("nothing was received".into()) };
        let manifest = W::compare(self, arrived, request)?;
        Ok(HeldVersion { version: self.update.version, manifest: manifest.digest() })
    }

    /// Why the engine took no more, where it failed.
    pub(super) fn failed(&self) -> Option<String> {
        lock(&self.failed).clone()
    }

    /// Has this done after all that was ordered before.
    pub(super) fn order(&self, what: W::Order) {
        // The task is gone when the engine failed; whatever comes next finds that nothing is taken any more.
        let _gone = self.orders.send(Order::Do(what, None));
    }

    /// The same, and waits until it is done.
    pub(super) async fn ask(&self, what: W::Order) -> Result<(), Refusal> {
        let (answer, answered) = oneshot::channel();
        let refused = |why: String| Err(refusal(RefusalCode::EngineRefused, why));
        // What an ended task does not take is dropped here, and its answer with it.
        drop(self.orders.send(Order::Do(what, Some(answer))));
        let limit = self.limits.timeout.saturating_add(GRACE);
        match timeout(limit, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => refused("the engine's install ended before".into()),
            Err(_) => refused(format!("the engine did not answer within {limit:?}")),
        }
    }

    /// All bytes came.
    pub(super) fn streamed(&self) -> Result<(), Refusal> {
        let took_ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.listener.streamed(&self.update, took_ms)
    }

    fn close(&self) {
        let arrived = lock(&self.arrived).take();
        if let Some(arrived) = arrived {
            W::close(arrived);
        }
    }
}

impl Rollout {
    /// Starts the task of an install that was opened for an attempt.
    pub(super) fn receive_by<W: Way>(
        self: &Arc<Self>,
        request: &BeginRequest,
        layout: &Arc<Layout>,
        limits: Limits,
        arrived: W::Arrived,
        way: W,
    ) -> Arc<EngineReceiver<W>> {
        let (orders, inbox) = mpsc::unbounded_channel();
        let receiver = Arc::new(EngineReceiver {
            update: request.update.clone(),
            layout: layout.clone(),
            algorithm: request.algorithm,
            listener: Box::new(Arc::downgrade(self)),
            arrived: Mutex::new(Some(arrived)),
            begun: Instant::now(),
            limits,
            failed: Mutex::new(None),
            orders,
        });
        tokio::spawn(self.clone().feed_engine(Arc::downgrade(&receiver), way, inbox, (layout.clone(), limits.timeout)));
        receiver
    }

    /// Carries out orders until the end of the attempt.
    async fn feed_engine<W: Way>(
        self: Arc<Self>,
        receiver: Weak<EngineReceiver<W>>,
        mut way: W,
        mut orders: mpsc::UnboundedReceiver<Order<W>>,
        (layout, limit): (Arc<Layout>, Duration),
    ) {
        // Held from the first order on that changes the engine: no one else changes it, and it is not judged by its health. All who hold it have
        // deadlines of their own.
        let mut turn = None;
        let mut begun = None;
        let reason = loop {
            let dropped = || "the attempt was dropped".to_owned();
            let order = orders.recv().await.unwrap_or_else(|| Order::GiveUp(dropped()));
            if turn.is_none() && order.changes() {
                turn = Some(self.switching.lock().await);
                begun = Some(self.begin_switch(limit, layout.clone()));
            }
            match order {
                Order::Do(what, answer) => {
                    let Some(receiver) = receiver.upgrade() else { break dropped() };
                    let undone = way.carry_out(&receiver, what).await.err();
                    let (answered, over) = match undone {
                        None => (Ok(()), false),
                        Some(Undone::Refused(refusal)) => (Err(refusal), false),
                        Some(Undone::Failed(error)) => {
                            self.install_ended(&receiver, &error, begun.take());
                            (Err(refusal(RefusalCode::EngineRefused, error.to_string())), true)
                        }
                    };
                    // Anyone who asked may wait no more.
                    let _gone = answer.map(|answer| answer.send(answered));
                    if over {
                        return;
                    }
                }
                Order::Settle(done) => drop(done.send(())),
                Order::Finish(held, agreed) => {
                    let proven_by = if agreed && W::PROVEN_BY == ProvenBy::Nothing { ProvenBy::Engine } else { W::PROVEN_BY };
                    let outcome = Outcome::of(timeout(limit.saturating_add(GRACE), way.finish(held.clone())).await, proven_by);
                    self.end_switch(Ended { held: &held, files: None, outcome, switch: begun.unwrap_or_default(), limit });
                    self.probe_now.notify_one();
                    return;
                }
                Order::GiveUp(reason) => break reason,
            }
        };
        let left = timeout(limit.saturating_add(GRACE), way.abandon(&reason)).await.unwrap_or(Left::Mixture);
        // One that was never begun changed nothing: the engine is as dirty as it was.
        let Some(switch) = begun else { return };
        self.with(|state| state.install_given_up(format!("an install was given up: {reason}"), left, switch));
        self.probe_now.notify_one();
    }

    /// The engine refused an order, or failed with it.
    fn install_ended<W: Way>(&self, receiver: &EngineReceiver<W>, error: &InstallError, begun: Option<Switch>) {
        let reason = format!("{}: {error}", W::FAILED);
        tracing::warn!(left = ?error.left, %error, "{}", W::FAILED);
        *lock(&receiver.failed) = Some(reason.clone());
        receiver.close();
        self.with(|state| {
            W::note(state, error, &reason);
            state.machine.abort(&receiver.update, &reason);
            // One that was never begun changed nothing.
            if let Some(switch) = begun {
                state.install_given_up(reason, error.left, switch);
            }
        });
        self.probe_now.notify_one();
    }
}

impl<W: Way> Order<W> {
    /// Whether the engine is being changed from here on.
    fn changes(&self) -> bool {
        match self {
            Self::Do(what, _) => W::changes(what),
            Self::Finish(..) => true,
            Self::Settle(_) | Self::GiveUp(_) => false,
        }
    }
}

#[cfg(test)]
mod tests;
