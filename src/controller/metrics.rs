//! Numbers of the controller. Label values are closed sets: outcomes, reasons, verbs, status codes, kinds.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Unit;

use crate::runtime::metrics::Metrics;

/// How a reconcile ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Outcome {
    pub(super) outcome: &'static str,
}

/// Why a reconcile failed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Cause {
    pub(super) reason: &'static str,
}

/// One kind of call to the API server and its answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Answered {
    pub(super) method: &'static str,
    pub(super) code: String,
}

/// One kind of call to the API server.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Method {
    pub(super) method: &'static str,
}

/// An event of a watch.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Watched {
    pub(super) kind: &'static str,
    pub(super) op: &'static str,
}

/// What is watched.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Kind {
    pub(super) kind: &'static str,
}

/// Where replicas stand.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct State {
    pub(super) state: &'static str,
}

/// A phase of updates.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Phase {
    pub(super) phase: String,
}

/// How bytes travelled.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Carrier {
    pub(super) transport: &'static str,
}

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

#[derive(Clone)]
pub(super) struct ControllerMetrics {
    pub(super) reconciles: Family<Outcome, Counter>,
    pub(super) reconcile_duration: Histogram,
    pub(super) reconcile_errors: Family<Cause, Counter>,
    pub(super) in_flight: Gauge,
    pub(super) leader: Gauge,
    pub(super) lease_failures: Counter,
    pub(super) watch_events: Family<Watched, Counter>,
    pub(super) watch_errors: Family<Kind, Counter>,
    pub(super) cached: Family<Kind, Gauge>,
    pub(super) requests: Family<Answered, Counter>,
    pub(super) request_duration: Family<Method, Histogram>,
    pub(super) replicas: Family<State, Gauge>,
    pub(super) sync_duration: Family<Phase, Histogram>,
    pub(super) sync_bytes: Family<Carrier, Counter>,
}

impl ControllerMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let by_method = || Family::new_with_constructor(seconds as fn() -> Histogram);
        Self {
            reconciles: metrics.register("reconcile", "Reconciles of objects", Family::default()),
            reconcile_duration: metrics.register_with_unit("reconcile_duration", "Time of a reconcile", Unit::Seconds, seconds()),
            reconcile_errors: metrics.register("reconcile_errors", "Reconciles that failed", Family::default()),
            in_flight: metrics.register("reconciles_in_flight", "Reconciles that run now", Gauge::default()),
            leader: metrics.register("leader", "1 while this controller leads", Gauge::default()),
            lease_failures: metrics.register("lease_renew_failures", "Failed renewals of the lease", Counter::default()),
            watch_events: metrics.register("watch_events", "Events of watches", Family::default()),
            watch_errors: metrics.register("watch_errors", "Errors of watches", Family::default()),
            cached: metrics.register("cache_objects", "Objects that are known from watches", Family::default()),
            requests: metrics.register("api_requests", "Calls to the API server but watches", Family::default()),
            request_duration: metrics.register_with_unit("api_duration", "Time of a call to the API server", Unit::Seconds, by_method()),
            replicas: metrics.register("replicas", "Replicas of all objects by where they stand", Family::default()),
            sync_duration: metrics.register_with_unit(
                "sync_duration",
                "Time of each phase of updates that reached minReady",
                Unit::Seconds,
                Family::new_with_constructor(seconds as fn() -> Histogram),
            ),
            sync_bytes: metrics.register("sync_bytes", "Bytes of versions that reached minReady", Family::default()),
        }
    }
}
