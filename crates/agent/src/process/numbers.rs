//! Numbers of an agent: where each endpoint stands, and how long updates, their phases and pauses of the engine took.
//!
//! They are read from what endpoints say of themselves anyway, so that nothing of an update waits for them. Label values are closed sets:
//! ports of the pod's engines, kinds of engines, phases, steps, transports, roles, outcomes.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::labels::{OfEngine, PORT};
use super::progress;
use crate::core::Core;
use crate::rollout::Rollout;
use weightsync_core::protocol::{InstallStep, MemberState, Received, TransportChoice, UpdateId, UpdatePhase, UpdateStatus, UpdateView};
use weightsync_net::metrics::{Definition, Metrics, times};

const EPOCH: Definition =
    Definition::gauge("agent_epoch", "Number of the epoch that the endpoint prepared or committed, 0 for none").by(PORT);
const VERSION: Definition = Definition::gauge("agent_installed_version", "Version that the engine confirmed, 0 for none").by(PORT);
const HEALTHY: Definition = Definition::gauge("agent_engine_healthy", "1 when the engine passes its probes").by(PORT);
const PAUSED: Definition = Definition::gauge("agent_engine_paused", "1 while the engine may be paused by this agent").by(PORT);
const DIRTY: Definition =
    Definition::gauge("agent_engine_dirty", "1 while the engine may hold half an update, and does not serve").by(PORT);
const MIXED_BEGIN: Definition = Definition::gauge(
    "agent_mixed_begin_milliseconds",
    "Unix time at which the engine last began to answer requests while a version was loaded, 0 for never",
)
.by(PORT);
const MIXED_END: Definition =
    Definition::gauge("agent_mixed_end_milliseconds", "Unix time at which that load was over, 0 for never or while it goes on").by(PORT);
const CHANGES: Definition = Definition::counter("agent_state_changes", "Changes of the endpoint's state").by(PORT);
const TRANSFERS: Definition = Definition::times("agent_transfer_duration", "Time in which a version's bytes travelled")
    .by(&[("transport", "as `status.transport.name`"), ("role", "`source` (or anyone who feeds) or `rollout`")]);
const BYTES: Definition = Definition::bytes("agent_transferred", "Bytes of versions that were sent, or arrived and were checked")
    .by(&[("transport", "as `status.transport.name`"), ("role", "`source` (or anyone who feeds) or `rollout`")]);
const RATE: Definition = Definition::gauge(
    "agent_last_transfer_bytes_per_second",
    "Speed at which the last version came to the endpoint, from its first byte to its last, 0 for none",
)
.by(PORT);
const PAUSES: Definition = Definition::times(
    "agent_engine_pause_duration",
    "Time from the call that pauses an engine until it runs again, of installs that went well",
)
.by(&[("engine", "`vllm`, `sglang`, `lmdeploy`, `fastdeploy`")]);
const STEPS: Definition = Definition::times("agent_step_duration", "Time of each step of an install")
    .by(&[("step", "`receive`, `verify`, `pause`, `load`, `check`, `resume`")]);
const PHASES: Definition = Definition::times("agent_phase_duration", "Time of each phase of updates that this agent led")
    .by(&[("phase", "`begin`, `transfer`, `verify`, `activate`")]);
const UPDATES: Definition = Definition::counter("agent_updates", "Attempts in which the endpoint had a part, by how they ended")
    .by(&[("role", "`source`, `feeder` or `rollout`"), ("outcome", "`done`, `failed`, or `refused` before a byte moved")]);

/// Everything that an agent exposes of its own.
pub const DEFINITIONS: &[Definition] = &[
    EPOCH,
    VERSION,
    HEALTHY,
    PAUSED,
    DIRTY,
    MIXED_BEGIN,
    MIXED_END,
    CHANGES,
    TRANSFERS,
    BYTES,
    RATE,
    PAUSES,
    STEPS,
    PHASES,
    UPDATES,
    progress::RECEIVED,
    progress::TOTAL,
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Carried {
    transport: &'static str,
    role: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    engine: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Step {
    step: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    phase: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    role: &'static str,
    outcome: &'static str,
}

type Gauges = Family<OfEngine, Gauge<i64, AtomicI64>>;
type Times<L> = Family<L, Histogram>;

/// All of them. Clones share them.
#[derive(Clone)]
pub(super) struct Numbers {
    epoch: Gauges,
    version: Gauges,
    healthy: Gauges,
    paused: Gauges,
    dirty: Gauges,
    mixed_begin: Gauges,
    mixed_end: Gauges,
    changes: Family<OfEngine, Counter<u64, AtomicU64>>,
    transfers: Times<Carried>,
    bytes: Family<Carried, Counter>,
    rate: Gauges,
    pauses: Times<Kind>,
    steps: Times<Step>,
    phases: Times<Phase>,
    updates: Family<Ended, Counter>,
}

impl Numbers {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let histogram = times as fn() -> Histogram;
        Self {
            epoch: metrics.register(&EPOCH, Family::default()),
            version: metrics.register(&VERSION, Family::default()),
            healthy: metrics.register(&HEALTHY, Family::default()),
            paused: metrics.register(&PAUSED, Family::default()),
            dirty: metrics.register(&DIRTY, Family::default()),
            mixed_begin: metrics.register(&MIXED_BEGIN, Family::default()),
            mixed_end: metrics.register(&MIXED_END, Family::default()),
            changes: metrics.register(&CHANGES, Family::default()),
            transfers: metrics.register(&TRANSFERS, Family::new_with_constructor(histogram)),
            bytes: metrics.register(&BYTES, Family::default()),
            rate: metrics.register(&RATE, Family::default()),
            pauses: metrics.register(&PAUSES, Family::new_with_constructor(histogram)),
            steps: metrics.register(&STEPS, Family::new_with_constructor(histogram)),
            phases: metrics.register(&PHASES, Family::new_with_constructor(histogram)),
            updates: metrics.register(&UPDATES, Family::default()),
        }
    }

    pub(super) fn keep(&self, core: &Arc<Core>, rollout: Option<&Arc<Rollout>>, tasks: &mut JoinSet<()>, cancel: &CancellationToken) {
        let labels = OfEngine { port: core.me().port.unwrap_or(0) };
        let numbers = self.clone();
        follow(tasks, cancel, core.events().states(), move |state| numbers.stands(&labels, state));

        let (numbers, states, mut counted, mut seen) = (self.clone(), core.events().states(), None, 0);
        let leads = if rollout.is_some() { "feeder" } else { "source" };
        follow(tasks, cancel, core.events().updates(), move |updates| {
            for update in updates.since(&mut seen).filter(|update| ended_first(&mut counted, update)) {
                numbers.led(leads, transport(&states.borrow()), update);
            }
        });

        if let Some(rollout) = rollout {
            let (numbers, states, rollout, mut counted) = (self.clone(), core.events().states(), Arc::downgrade(rollout), None);
            let changes = rollout.upgrade().map(|rollout| rollout.attempt_changes());
            let Some(changes) = changes else { return };
            follow(tasks, cancel, changes, move |_| {
                let Some(rollout) = rollout.upgrade() else { return };
                let Some(status) = rollout.last_attempt().filter(|status| status.step.is_final()) else { return };
                if counted.replace(status.update.clone()).as_ref() != Some(&status.update) {
                    numbers.took(rollout.engine_kind(), transport(&states.borrow()), &status);
                }
            });
        }
    }

    /// Removes the series of an engine that is gone.
    pub(super) fn forget(&self, rollout: &Rollout) {
        let labels = OfEngine { port: rollout.port() };
        for gauges in [&self.epoch, &self.version, &self.healthy, &self.paused, &self.dirty, &self.mixed_begin, &self.mixed_end, &self.rate]
        {
            gauges.remove(&labels);
        }
        self.changes.remove(&labels);
    }

    fn stands(&self, labels: &OfEngine, state: &MemberState) {
        let number = |number: Option<u64>| i64::try_from(number.unwrap_or(0)).unwrap_or(i64::MAX);
        self.epoch.get_or_create(labels).set(number(state.epoch.as_ref().map(|id| id.epoch)));
        self.version.get_or_create(labels).set(number(state.installed.as_ref().map(|held| held.version)));
        self.healthy.get_or_create(labels).set(i64::from(state.healthy));
        self.paused.get_or_create(labels).set(i64::from(state.paused_until.is_some()));
        self.dirty.get_or_create(labels).set(i64::from(state.phase == weightsync_core::protocol::MemberPhase::Dirty));
        let mixed = state.mixed.last();
        self.mixed_begin.get_or_create(labels).set(number(mixed.map(|window| window.begin_ms)));
        self.mixed_end.get_or_create(labels).set(number(mixed.and_then(|window| window.end_ms)));
        self.rate.get_or_create(labels).set(number(state.received.as_ref().map(Received::rate)));
        self.changes.get_or_create(labels).inc();
    }

    /// Counts an attempt that this agent led.
    fn led(&self, role: &'static str, transport: &'static str, update: &UpdateView) {
        let done = update.phase == UpdatePhase::Done;
        self.updates.get_or_create(&Ended { role, outcome: if done { "done" } else { "failed" } }).inc();
        for (name, milliseconds) in &update.phases_ms {
            let Some(phase) = word(name, &["begin", "transfer", "verify", "activate"]) else { continue };
            self.phases.get_or_create(&Phase { phase }).observe(seconds(*milliseconds));
            if phase == "transfer" && done {
                let carried = Carried { transport, role: "source" };
                self.transfers.get_or_create(&carried).observe(seconds(*milliseconds));
                self.bytes.get_or_create(&carried).inc_by(update.total_bytes);
            }
        }
    }

    /// Counts an attempt that reached this engine.
    fn took(&self, engine: &'static str, transport: &'static str, status: &UpdateStatus) {
        let outcome = match status.step {
            InstallStep::Installed => "done",
            InstallStep::Refused => "refused",
            _ => "failed",
        };
        self.updates.get_or_create(&Ended { role: "rollout", outcome }).inc();
        let carried = Carried { transport, role: "rollout" };
        self.bytes.get_or_create(&carried).inc_by(status.bytes);
        let mut paused = Duration::ZERO;
        let mut resumed = false;
        for (name, milliseconds) in &status.steps_ms {
            let Some(step) = word(name, &["receive", "verify", "pause", "load", "check", "resume"]) else { continue };
            self.steps.get_or_create(&Step { step }).observe(seconds(*milliseconds));
            match step {
                "receive" => self.transfers.get_or_create(&carried).observe(seconds(*milliseconds)),
                "verify" => {}
                _ => paused += Duration::from_millis(*milliseconds),
            }
            resumed |= step == "resume";
        }
        if resumed {
            self.pauses.get_or_create(&Kind { engine }).observe(paused.as_secs_f64());
        }
    }
}

/// Calls `seen` with what is known, now and whenever it changes.
fn follow<T: Clone + Send + Sync + 'static>(
    tasks: &mut JoinSet<()>,
    cancel: &CancellationToken,
    mut of: watch::Receiver<T>,
    mut seen: impl FnMut(&T) + Send + 'static,
) {
    let cancel = cancel.clone();
    tasks.spawn(async move {
        loop {
            let now = of.borrow_and_update().clone();
            seen(&now);
            tokio::select! {
                () = cancel.cancelled() => return,
                changed = of.changed() => if changed.is_err() { return },
            }
        }
    });
}

/// Whether an attempt is over, and is seen so for the first time.
fn ended_first(counted: &mut Option<UpdateId>, update: &UpdateView) -> bool {
    if !update.phase.is_over() {
        return false;
    }
    let id = UpdateId { epoch: update.id.clone(), version: update.version, attempt: update.attempt };
    counted.replace(id.clone()).as_ref() != Some(&id)
}

fn transport(state: &MemberState) -> &'static str {
    state.transport.as_ref().map_or("tcp", TransportChoice::name)
}

/// What is not of the list makes no series.
fn word(name: &str, known: &[&'static str]) -> Option<&'static str> {
    known.iter().copied().find(|known| *known == name)
}

fn seconds(milliseconds: u64) -> f64 {
    Duration::from_millis(milliseconds).as_secs_f64()
}
