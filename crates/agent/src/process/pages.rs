//! The status pages of an agent, over plain HTTP: `/readyz`, `/healthz`, `/metrics`, `/loglevel`, and the roster. The first two are also
//! answered by a listener of their own, for the kubelet.
//!
//! `/readyz` of a rollout says whether every engine next to it may serve: it is the pod's readiness, with or without a controller. A source is
//! always ready: nothing of a trainer depends on it. Decides nothing: rollouts say it.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{ConnectInfo, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures::StreamExt;
use serde::Deserialize;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;

use super::numbers::Numbers;
use super::progress::Progress;
use super::shown::Shown;
use super::watchers::{WATCHERS, WATCHERS_OF_ONE, Watchers};
use crate::core::Core;
use crate::locks::lock;
use crate::rollout::Rollout;
use weightsync_core::protocol::{Role, RosterView};
use weightsync_net::health::{self, Health};
use weightsync_net::https::ndjson;
use weightsync_net::metrics::Metrics;

/// A watch of the roster ends after this long; the client asks again. So one that is forgotten does not stay for ever.
const LONGEST_WATCH: Duration = Duration::from_secs(15 * 60);

pub(super) struct Pages {
    health: Health,
    metrics: Metrics,
    roster: watch::Receiver<RosterView>,
    shown: Arc<Mutex<Shown>>,
    numbers: Numbers,
}

impl Pages {
    pub(super) fn new(role: Role, roster: watch::Receiver<RosterView>, serve_unclaimed_after: Option<Duration>) -> Self {
        let (health, metrics) = (Health::default(), Metrics::default());
        let numbers = Numbers::new(&metrics);
        let serves_unclaimed = serve_unclaimed_after.and_then(|after| Instant::now().checked_add(after));
        let shown = Arc::new(Mutex::new(Shown { serves_unclaimed, ..Shown::default() }));
        metrics.collect(Progress(shown.clone()));
        if role == Role::Rollout {
            let shown = shown.clone();
            health.ready_while("engine", move || lock(&shown).answer());
        }
        Self { health, metrics, roster, shown, numbers }
    }

    pub(super) fn router(&self) -> Router {
        let roster = Router::new().route("/v1/roster", get(show_roster)).with_state((self.roster.clone(), Watchers::default()));
        health::router(self.health.clone(), self.metrics.clone()).merge(roster)
    }

    pub(super) fn probes(&self) -> Router {
        health::probes(self.health.clone())
    }

    pub(super) fn add(&self, rollout: Arc<Rollout>) {
        let mut shown = lock(&self.shown);
        shown.failed = None;
        shown.rollouts.push(rollout);
    }

    /// The registration of an engine ended.
    pub(super) fn leaves(&self, rollout: &Arc<Rollout>) {
        let mut shown = lock(&self.shown);
        shown.rollouts.retain(|shown| !Arc::ptr_eq(shown, rollout));
        shown.leaving.push(rollout.clone());
    }

    /// An engine is gone, and its endpoint with it.
    pub(super) fn remove(&self, rollout: &Arc<Rollout>) {
        {
            let mut shown = lock(&self.shown);
            shown.rollouts.retain(|shown| !Arc::ptr_eq(shown, rollout));
            shown.leaving.retain(|shown| !Arc::ptr_eq(shown, rollout));
        }
        self.numbers.forget(rollout);
    }

    /// The engines of the pod register: none may be there yet.
    pub(super) fn engines_register(&self) {
        lock(&self.shown).registered = true;
    }

    /// The endpoint of the engine at `port` cannot start, for this reason.
    pub(super) fn cannot_start(&self, port: u16, reason: String) {
        lock(&self.shown).not_started.insert(port, reason);
    }

    /// It started, or is not wanted any more.
    pub(super) fn started(&self, port: u16) {
        lock(&self.shown).not_started.remove(&port);
    }

    /// No object claims the pod any more. It serves what it has.
    pub(super) fn unclaimed(&self) {
        lock(&self.shown).released = true;
    }

    pub(super) fn forget_endpoints(&self) {
        lock(&self.shown).claimed(None);
    }

    /// What the object wants cannot be done.
    pub(super) fn failed(&self, reason: String) {
        lock(&self.shown).claimed(Some(reason));
    }

    /// Where the roster of a pod's further engines goes: only the first engine's is shown.
    pub(super) fn more_roster(&self) -> watch::Sender<RosterView> {
        watch::Sender::new(self.roster.borrow().clone())
    }

    /// Keeps the numbers of an endpoint up to date; `rollout` is the endpoint's, unless it is a source's.
    pub(super) fn count(&self, core: &Arc<Core>, rollout: Option<&Arc<Rollout>>, tasks: &mut JoinSet<()>, cancel: &CancellationToken) {
        self.numbers.keep(core, rollout, tasks, cancel);
    }
}

#[derive(Deserialize)]
struct Watch {
    #[serde(default)]
    watch: bool,
}

async fn show_roster(
    State((roster, watchers)): State<(watch::Receiver<RosterView>, Watchers)>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    Query(Watch { watch }): Query<Watch>,
) -> Response {
    if !watch {
        let now = roster.borrow().clone();
        return Json(now).into_response();
    }
    let Some(watching) = watchers.enter(from.ip()) else {
        let message = format!("at most {WATCHERS} watch the roster at once, and {WATCHERS_OF_ONE} of one address: ask again later\n");
        return (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "5")], message).into_response();
    };
    ndjson(WatchStream::new(roster).take_until(sleep(LONGEST_WATCH)).inspect(move |_| _ = &watching))
}

#[cfg(test)]
mod tests;
