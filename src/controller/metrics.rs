//! Metrics of the controller. Label values are closed sets: outcomes, reasons, methods, status codes, kinds, phases, transports.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use weightsync_core::protocol::{Reason, TransportChoice, UpdatePhase, UpdateView};
use weightsync_net::metrics::{Definition, Metrics, times};

const RECONCILES: Definition = Definition::counter("reconcile", "Reconciles of objects").by(&[("outcome", "`success` or `error`")]);
const RECONCILE_DURATION: Definition = Definition::times("reconcile_duration", "Time of one reconcile of an object");
const RECONCILE_ERRORS: Definition = Definition::counter("reconcile_errors", "Reconciles that failed")
    .by(&[("reason", "`conflict`, `refused` by the API server, `unreachable`")]);
const IN_FLIGHT: Definition = Definition::gauge("reconciles_in_flight", "Reconciles that run now");
const LEADER: Definition = Definition::gauge("leader", "1 while this controller leads");
const WEBHOOK_TRUSTED: Definition = Definition::gauge(
    "webhook_trusted",
    "1 while the API server trusts the webhook's certificate for 30 days more (injection by the webhook only, else 0)",
);
const LEASE_FAILURES: Definition = Definition::counter("lease_renew_failures", "Renewals of the lease that failed");
const WATCH_EVENTS: Definition = Definition::counter("watch_events", "Events received from watches")
    .by(&[("kind", "`WeightSync` or `Pod`"), ("op", "`apply`, `delete`, `init`, `list`, `listed`")]);
const WATCH_ERRORS: Definition = Definition::counter("watch_errors", "Errors of watches")
    .by(&[("kind", "`WeightSync` or `Pod`"), ("error", "`list`, `start`, `status` sent by the API server, `stream`, `version` missing")]);
const CACHED: Definition = Definition::gauge("cache_objects", "Objects in the watch caches").by(&[("kind", "`WeightSync` or `Pod`")]);
const REQUESTS: Definition = Definition::counter("api_requests", "Requests to the API server, including watches and leases").by(&[
    ("method", "`get`, `watch`, `post`, `put`, `patch`, `delete`"),
    ("code", "HTTP status; `error` without a response, `timeout` if the caller gave up"),
]);
const REQUEST_DURATION: Definition = Definition::times("api_duration", "Time until the API server responded, including retries")
    .by(&[("method", "`get`, `watch`, `post`, `put`, `patch`, `delete`")]);
const SYNC_DURATION: Definition = Definition::times("sync_duration", "Time of each phase of updates that reached minReady")
    .by(&[("phase", "`begin`, `transfer`, `verify`, `activate`")]);
const SYNC_BYTES: Definition = Definition::bytes("sync", "Bytes of versions that reached minReady, counted once for each update")
    .by(&[("transport", "as `status.transport.name`: `tcp` or `nccl`")]);
const UPDATES: Definition = Definition::counter("updates", "Update attempts that ended")
    .by(&[("kind", "`publish`, or `feed` for members that lacked the current version"), ("outcome", "`done` or `failed`")]);
const EVENTS: Definition = Definition::counter("events", "Events published about objects")
    .by(&[("reason", "a reason of the [closed list](reference/api.md#reasons)"), ("type", "`Normal` or `Warning`")]);
const EVENTS_LOST: Definition = Definition::counter("events_lost", "Events that could not be published");

/// State and reason of replicas; filled by [`census`](super::census).
pub(super) const REPLICAS: Definition = Definition::gauge("replicas", "Replicas of all objects by state and reason").by(&[
    ("state", "`ready`, `updating`, `behind`, `dirty`, `unknown`, `forming`, `waiting`, `out`"),
    ("reason", "a reason of the [closed list](reference/api.md#reasons)"),
]);
pub(super) const PLAN_DEPTH: Definition =
    Definition::gauge("plan_depth", "Members of the longest chain of all groups over TCP: how often a bucket is forwarded");
pub(super) const EDGES: Definition =
    Definition::gauge("preflight_edges", "Edges that the last pre-flight of an object decided its chain by").by(&[
        ("object_namespace", "its namespace"),
        ("object", "its name"),
        ("verdict", "`good`, `slow`, `broken`, `unmeasured`"),
    ]);
pub(super) const SLOWEST_EDGE: Definition =
    Definition::gauge("preflight_slowest_edge_bytes_per_second", "Rate of the slowest edge that the last pre-flight of an object verified")
        .by(&[("object_namespace", "its namespace"), ("object", "its name")]);
pub(super) const OBJECT: Definition = Definition::gauge("object_info", "1 for each object; the labels have its conditions as in status")
    .by(&[
        ("object_namespace", "its namespace"),
        ("object", "its name"),
        ("ready", "`True` or `False`"),
        ("reason", "reason of the condition Ready, of the [closed list](reference/api.md#reasons)"),
        ("degraded", "`True` or `False`"),
        ("suspended", "`true` or `false`"),
        ("transport", "as `status.transport.name`, or `none`"),
    ]);

/// All metrics of a controller.
pub const DEFINITIONS: &[Definition] = &[
    RECONCILES,
    RECONCILE_DURATION,
    RECONCILE_ERRORS,
    IN_FLIGHT,
    LEADER,
    WEBHOOK_TRUSTED,
    LEASE_FAILURES,
    WATCH_EVENTS,
    WATCH_ERRORS,
    CACHED,
    REQUESTS,
    REQUEST_DURATION,
    SYNC_DURATION,
    SYNC_BYTES,
    UPDATES,
    EVENTS,
    EVENTS_LOST,
    REPLICAS,
    PLAN_DEPTH,
    EDGES,
    SLOWEST_EDGE,
    OBJECT,
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Outcome {
    pub(super) outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Cause {
    pub(super) reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Answered {
    pub(super) method: &'static str,
    pub(super) code: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Method {
    pub(super) method: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Watched {
    pub(super) kind: &'static str,
    pub(super) op: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Broken {
    pub(super) kind: &'static str,
    pub(super) error: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Kind {
    pub(super) kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    phase: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Carrier {
    transport: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    kind: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reported {
    reason: &'static str,
    r#type: &'static str,
}

#[derive(Clone)]
pub(super) struct ControllerMetrics {
    pub(super) reconciles: Family<Outcome, Counter>,
    pub(super) reconcile_duration: Histogram,
    pub(super) reconcile_errors: Family<Cause, Counter>,
    pub(super) in_flight: Gauge,
    pub(super) leader: Gauge,
    pub(super) webhook_trusted: Gauge,
    pub(super) lease_failures: Counter,
    pub(super) watch_events: Family<Watched, Counter>,
    pub(super) watch_errors: Family<Broken, Counter>,
    pub(super) cached: Family<Kind, Gauge>,
    pub(super) requests: Family<Answered, Counter>,
    pub(super) request_duration: Family<Method, Histogram>,
    pub(super) events_lost: Counter,
    sync_duration: Family<Phase, Histogram>,
    sync_bytes: Family<Carrier, Counter>,
    updates: Family<Ended, Counter>,
    events: Family<Reported, Counter>,
}

impl ControllerMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let histograms = || times as fn() -> Histogram;
        Self {
            reconciles: metrics.register(&RECONCILES, Family::default()),
            reconcile_duration: metrics.register(&RECONCILE_DURATION, times()),
            reconcile_errors: metrics.register(&RECONCILE_ERRORS, Family::default()),
            in_flight: metrics.register(&IN_FLIGHT, Gauge::default()),
            leader: metrics.register(&LEADER, Gauge::default()),
            webhook_trusted: metrics.register(&WEBHOOK_TRUSTED, Gauge::default()),
            lease_failures: metrics.register(&LEASE_FAILURES, Counter::default()),
            watch_events: metrics.register(&WATCH_EVENTS, Family::default()),
            watch_errors: metrics.register(&WATCH_ERRORS, Family::default()),
            cached: metrics.register(&CACHED, Family::default()),
            requests: metrics.register(&REQUESTS, Family::default()),
            request_duration: metrics.register(&REQUEST_DURATION, Family::new_with_constructor(histograms())),
            events_lost: metrics.register(&EVENTS_LOST, Counter::default()),
            sync_duration: metrics.register(&SYNC_DURATION, Family::new_with_constructor(histograms())),
            sync_bytes: metrics.register(&SYNC_BYTES, Family::default()),
            updates: metrics.register(&UPDATES, Family::default()),
            events: metrics.register(&EVENTS, Family::default()),
        }
    }

    pub(super) fn count_update(&self, update: &UpdateView, transport: Option<&TransportChoice>) {
        let done = update.phase == UpdatePhase::Done;
        self.updates.get_or_create(&Ended { kind: update.kind(), outcome: if done { "done" } else { "failed" } }).inc();
        if !done {
            return;
        }
        let transport = transport.map_or("tcp", TransportChoice::name);
        self.sync_bytes.get_or_create(&Carrier { transport }).inc_by(update.total_bytes);
        for (phase, milliseconds) in &update.phases_ms {
            let Some(phase) = phase_word(phase) else { continue };
            let seconds = std::time::Duration::from_millis(*milliseconds).as_secs_f64();
            self.sync_duration.get_or_create(&Phase { phase }).observe(seconds);
        }
    }

    pub(super) fn count_event(&self, reason: Reason, warning: bool) {
        let reported = Reported { reason: reason.as_str(), r#type: if warning { "Warning" } else { "Normal" } };
        self.events.get_or_create(&reported).inc();
    }
}

/// Phases come from agents as text: unknown ones make no series and no span.
pub(super) fn phase_word(phase: &str) -> Option<&'static str> {
    ["begin", "transfer", "verify", "activate"].into_iter().find(|known| *known == phase)
}
