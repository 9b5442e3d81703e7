//! An update whose bytes the user's own data plane moves (`delivery: External`): the engine is marked before, watched meanwhile, and proven
//! after it.
//!
//! Decides when such an engine counts as half updated: from the mark on, until the proof, whatever ends it; but not when the trainer says that
//! it never began. It never pauses, resumes or loads: the data plane does. Nothing is kept, so no one is fed from here.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout};

use super::machine::Opening;
use super::state::{Ended, Outcome, State, Switch};
use super::update::busy;
use super::{Arriving, Rollout, Version};
use crate::group::{Epoch, refusal};
use weightsync_core::protocol::{
    Delivery, ExternalBegin, ExternalEnd, ExternalOutcome, HealthPolicy, ProvenBy, Refusal, RefusalCode, UpdateId, UpdateStatus,
};
use weightsync_engine::{EngineError, External, ExternalMark, ExternalProof};

/// Longest call that marks an engine, or takes a mark back.
const SHORT: Duration = Duration::from_secs(10);

/// What a proof may take beyond the time that it was given.
const GRACE: Duration = Duration::from_secs(10);

/// What the task that watches the engine is reported.
pub(super) enum Order {
    /// The data plane finished: prove it. With what the engine must report.
    Prove(Option<String>),
    /// It is over; `touched` unless the data plane never began.
    GiveUp { reason: String, touched: bool },
}

/// One update, as far as others end it.
#[derive(Clone)]
pub(super) struct Watched(mpsc::UnboundedSender<Order>);

impl Watched {
    /// Over, and the engine may hold half of it.
    pub(super) fn discard(&self, reason: &str) {
        self.tell(Order::GiveUp { reason: reason.to_owned(), touched: true });
    }

    fn tell(&self, order: Order) {
        // If the task has ended by itself, it has reported that.
        let _gone = self.0.send(order);
    }
}

struct Watch {
    engine: Arc<dyn External>,
    request: ExternalBegin,
    health: HealthPolicy,
    limit: Duration,
}

impl Rollout {
    /// Opens an update by the user's data plane: when this returns, the engine is marked and bytes may move.
    pub async fn begin_external(self: &Arc<Self>, epoch: &Arc<Epoch>, request: ExternalBegin) -> Result<UpdateStatus, Refusal> {
        let policy = &epoch.prepared.policy;
        if policy.delivery != Delivery::External {
            return Err(refusal(RefusalCode::Invalid, "the group's delivery is not External: its agents move the bytes"));
        }
        let update = request.update.clone();
        let health = policy.health;
        let silence = Duration::from_millis(policy.silence_ms);
        self.with(|state| state.make_way_external(&update));
        // What is being proven or given up comes to its end first.
        let Ok(switched) = timeout(silence, self.switching.lock()).await else { return Err(busy()) };
        drop(switched);
        match self.with(|state| state.machine.begin_external(&request))? {
            Opening::Busy => return Err(busy()),
            Opening::Known => {}
            Opening::Check => {
                let limit = Duration::from_millis(request.timeout_ms.min(policy.update_timeout_ms));
                if let Err(refusal) = self.open_external(epoch, request, health, limit).await {
                    self.with(|state| state.machine.refused(&update, &refusal));
                    return Err(refusal);
                }
            }
        }
        self.answer(&update)
    }

    pub fn end_external(&self, request: ExternalEnd) -> Result<UpdateStatus, Refusal> {
        let ExternalEnd { update, outcome } = request;
        self.heard_leader(&update);
        // An update that ended by itself has reported how.
        let Some(Arriving::External(watched, held)) = self.receiver_of(&update) else { return self.answer(&update) };
        match outcome {
            ExternalOutcome::Delivered { engine_version } => {
                if self.with(|state| state.machine.delivered_external(&update, held))? {
                    watched.tell(Order::Prove(engine_version));
                }
            }
            ExternalOutcome::Failed { reason } => {
                self.end_attempt(&update, &format!("the trainer's data plane failed: {reason}"));
            }
            ExternalOutcome::Untouched { reason } => {
                watched.tell(Order::GiveUp { reason: reason.clone(), touched: false });
                self.end_attempt(&update, &reason);
            }
        }
        self.answer(&update)
    }

    async fn open_external(
        self: &Arc<Self>,
        epoch: &Arc<Epoch>,
        request: ExternalBegin,
        health: HealthPolicy,
        limit: Duration,
    ) -> Result<(), Refusal> {
        let deadline = Duration::from_millis(health.timeout_ms);
        self.ask_engine(deadline, deadline).await?;
        let engine = self.engine.external().map_err(|error| refusal(RefusalCode::EngineRefused, error.to_string()))?;
        let (update, held) = (request.update.clone(), request.held.clone());
        let (orders, inbox) = mpsc::unbounded_channel();
        let (tell, marked) = oneshot::channel();
        let watch = Watch { engine, request, health, limit };
        tokio::spawn(self.clone().watch_external(watch, tell, inbox));
        let marked = marked.await.unwrap_or_else(|_| Err(EngineError::Cancelled));
        marked.map_err(|error| refusal(RefusalCode::EngineRefused, format!("the engine cannot be marked: {error}")))?;
        let watched = Watched(orders);
        if let Err(refusal) = self.with(|state| state.machine.opened(&update, true)) {
            watched.tell(Order::GiveUp { reason: "another attempt took its place".into(), touched: false });
            return Err(refusal);
        }
        self.watch_attempt(epoch, &update, Some(Arriving::External(watched, held)));
        Ok(())
    }

    /// From the mark to the proof, or to whatever else ends it.
    async fn watch_external(
        self: Arc<Self>,
        watch: Watch,
        tell: oneshot::Sender<Result<(), EngineError>>,
        mut orders: mpsc::UnboundedReceiver<Order>,
    ) {
        let Watch { engine, request, health, limit } = watch;
        let _switching = self.switching.lock().await;
        // Not judged by its probes from here on: the data plane may pause it, and a collective keeps it busy.
        let switch = self.with(State::external_begins);
        let mark = match engine.mark(&request.held, SHORT).await {
            Ok(mark) => mark,
            Err(error) => {
                self.with(State::external_not_begun);
                let _asker_gone = tell.send(Err(error));
                return;
            }
        };
        tracing::info!(version = request.held.version, "the engine is marked: the trainer's own data plane feeds it");
        let _asker_gone = tell.send(Ok(()));
        match self.until_reported(engine.as_ref(), &mark, &health, limit, &mut orders).await {
            Ok(Order::Prove(engine_version)) => self.prove(engine.as_ref(), mark, engine_version, switch, limit).await,
            Ok(Order::GiveUp { reason, touched: false }) => {
                let taken_back = engine.take_back(&mark, SHORT).await;
                if let Err(error) = &taken_back {
                    tracing::warn!(%error, "the mark cannot be taken back");
                }
                // An engine that still carries the mark must not pass for a whole one.
                self.external_over(&request.update, &reason, taken_back.is_err(), switch);
            }
            Ok(Order::GiveUp { reason, touched: true }) => self.external_over(&request.update, &reason, true, switch),
            Err(error) => {
                let touched = !matches!(error, EngineError::Restarted);
                self.external_over(&request.update, &format!("the engine failed while it was fed: {error}"), touched, switch);
            }
        }
        self.probe_now.notify_one();
    }

    /// Waits for an order, and looks after the engine meanwhile.
    async fn until_reported(
        &self,
        engine: &dyn External,
        mark: &ExternalMark,
        health: &HealthPolicy,
        limit: Duration,
        orders: &mut mpsc::UnboundedReceiver<Order>,
    ) -> Result<Order, EngineError> {
        let end = Instant::now() + limit;
        let mut failures = 0;
        loop {
            tokio::select! {
                biased;
                order = orders.recv() => {
                    return Ok(order.unwrap_or(Order::GiveUp { reason: "the update was dropped".into(), touched: true }));
                }
                () = tokio::time::sleep_until(end) => {
                    return Ok(Order::GiveUp { reason: format!("it did not end within {limit:?}"), touched: true });
                }
                () = sleep(Duration::from_millis(health.period_ms.max(10))) => {}
            }
            let ended = |state: &State<Version>| state.engine.gone().then(|| state.engine.reason().unwrap_or_default().to_owned());
            if let Some(reason) = self.read(ended) {
                return Ok(Order::GiveUp { reason, touched: true });
            }
            match engine.alive(mark, Duration::from_millis(health.timeout_ms)).await {
                Ok(()) => failures = 0,
                Err(error @ (EngineError::Unreachable { .. } | EngineError::Restarted)) => return Err(error),
                // In a collective it may be too busy to answer: only the update's own limit ends that.
                Err(EngineError::Timeout { .. }) => {}
                Err(error) => {
                    failures += 1;
                    if failures >= health.failure_threshold {
                        return Err(error);
                    }
                }
            }
        }
    }

    async fn prove(
        self: &Arc<Self>,
        engine: &dyn External,
        mark: ExternalMark,
        engine_version: Option<String>,
        switch: Switch,
        limit: Duration,
    ) {
        let held = mark.version.clone();
        let proof = ExternalProof { mark, engine_version, timeout: limit };
        let outcome = Outcome::of(timeout(limit.saturating_add(GRACE), engine.prove(&proof)).await, ProvenBy::Nothing);
        self.end_switch(Ended { held: &held, files: None, outcome, switch, limit });
        self.with(State::pause_is_not_ours);
    }

    fn external_over(&self, update: &UpdateId, reason: &str, touched: bool, switch: Switch) {
        tracing::warn!(version = update.version, reason, touched, "an update by the trainer's data plane ended without a proof");
        self.with(|state| state.external_over(update, reason, touched, switch));
    }
}
