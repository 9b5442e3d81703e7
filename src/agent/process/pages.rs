//! The status pages of an agent, over plain HTTP: `/readyz`, `/healthz`, `/metrics`, and the roster.
//!
//! `/readyz` of a rollout says whether every engine beside it may serve: it is the pod's readiness, with or without a controller. A source is
//! always ready: nothing of a trainer depends on it. Decides nothing: rollouts say it.

use std::sync::atomic::{AtomicI64, AtomicU64};
use std::sync::{Arc, Mutex};

use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use serde::Deserialize;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;

use super::progress::Progress;
use crate::agent::core::{Core, lock};
use crate::agent::rollout::Rollout;
use crate::protocol::{Role, RosterView};
use crate::runtime::health::{self, Health};
use crate::runtime::https::ndjson;
use crate::runtime::metrics::Metrics;

/// Everything that the pages show.
pub(super) struct Pages {
    health: Health,
    metrics: Metrics,
    roster: watch::Receiver<RosterView>,
    shown: Arc<Mutex<Shown>>,
    numbers: Numbers,
}

/// What readiness is made of.
#[derive(Default)]
pub(super) struct Shown {
    pub(super) rollouts: Vec<Arc<Rollout>>,
    failed: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct OfEngine {
    pub(super) port: u16,
}

/// Gauges by engine port; 0 is a source.
#[derive(Clone, Default)]
struct Numbers {
    epoch: Family<OfEngine, Gauge<i64, AtomicI64>>,
    version: Family<OfEngine, Gauge<i64, AtomicI64>>,
    healthy: Family<OfEngine, Gauge<i64, AtomicI64>>,
    changes: Family<OfEngine, Counter<u64, AtomicU64>>,
}

impl Pages {
    pub(super) fn new(role: Role, roster: watch::Receiver<RosterView>) -> Self {
        let (health, metrics, numbers) = (Health::default(), Metrics::default(), Numbers::default());
        metrics.register("agent_epoch", "Number of the epoch that the endpoint prepared or committed, 0 for none", numbers.epoch.clone());
        metrics.register("agent_installed_version", "Version that the engine confirmed, 0 for none", numbers.version.clone());
        metrics.register("agent_engine_healthy", "1 when the engine passes its probes", numbers.healthy.clone());
        metrics.register("agent_state_changes", "Changes of the endpoint's state", numbers.changes.clone());
        let shown: Arc<Mutex<Shown>> = Arc::default();
        metrics.collect(Progress(shown.clone()));
        if role == Role::Rollout {
            let shown = shown.clone();
            health.ready_while("engine", move || lock(&shown).ready());
        }
        Self { health, metrics, roster, shown, numbers }
    }

    /// The routes.
    pub(super) fn router(&self) -> Router {
        let roster = Router::new().route("/v1/roster", get(show_roster)).with_state(self.roster.clone());
        health::router(self.health.clone(), self.metrics.clone()).merge(roster)
    }

    /// Counts another engine's rollout in.
    pub(super) fn add(&self, rollout: Arc<Rollout>) {
        let mut shown = lock(&self.shown);
        shown.failed = None;
        shown.rollouts.push(rollout);
    }

    /// Rollouts of the claim before count no more.
    pub(super) fn forget_endpoints(&self) {
        *lock(&self.shown) = Shown::default();
    }

    /// What the object wants cannot be done.
    pub(super) fn failed(&self, reason: String) {
        *lock(&self.shown) = Shown { rollouts: Vec::new(), failed: Some(reason) };
    }

    /// Where the roster of a pod's further engines goes: only the first engine's is shown.
    pub(super) fn more_roster(&self) -> watch::Sender<RosterView> {
        watch::Sender::new(self.roster.borrow().clone())
    }

    /// Keeps the numbers of an endpoint up to date.
    pub(super) fn count(&self, core: &Arc<Core>, tasks: &mut JoinSet<()>, cancel: &CancellationToken) {
        let (numbers, mut states, cancel) = (self.numbers.clone(), core.events().states(), cancel.clone());
        let labels = OfEngine { port: core.me().port.unwrap_or(0) };
        tasks.spawn(async move {
            loop {
                let state = states.borrow_and_update().clone();
                let number = |number: Option<u64>| i64::try_from(number.unwrap_or(0)).unwrap_or(i64::MAX);
                numbers.epoch.get_or_create(&labels).set(number(state.epoch.as_ref().map(|id| id.epoch)));
                numbers.version.get_or_create(&labels).set(number(state.installed.as_ref().map(|held| held.version)));
                numbers.healthy.get_or_create(&labels).set(i64::from(state.healthy));
                numbers.changes.get_or_create(&labels).inc();
                tokio::select! {
                    () = cancel.cancelled() => return,
                    changed = states.changed() => if changed.is_err() { return },
                }
            }
        });
    }
}

impl Shown {
    fn ready(&self) -> Result<(), String> {
        if let Some(reason) = &self.failed {
            return Err(reason.clone());
        }
        if self.rollouts.is_empty() {
            return Err("not enrolled yet".into());
        }
        self.rollouts.iter().try_for_each(|rollout| rollout.ready())
    }
}

#[derive(Deserialize)]
struct Watch {
    #[serde(default)]
    watch: bool,
}

async fn show_roster(State(roster): State<watch::Receiver<RosterView>>, Query(Watch { watch }): Query<Watch>) -> Response {
    if watch {
        return ndjson(WatchStream::new(roster));
    }
    let now = roster.borrow().clone();
    Json(now).into_response()
}
