//! One trace of each update attempt: what the source and every rollout did and when, as their agents report it. Decides the spans and the
//! id of a trace. The id is computed from the attempt, so a trainer can compute it too. This file never sends a trace: [`otlp`] does.

mod otlp;

use std::collections::BTreeMap;

use tokio::sync::mpsc;

use super::metrics::phase_word;
use weightsync_core::protocol::{InstallStep, MemberName, UpdatePhase, UpdateView};

/// Most traces that wait for the collector. Further ones are dropped, so that nothing waits for a collector.
const WAITING: usize = 64;
/// OpenTelemetry's variables for headers of the collector. The first one that is not empty counts.
const HEADERS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"];

/// One span; times in ms since 1970.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) name: &'static str,
    /// Index among the trace's spans; `None` for the first.
    pub(super) parent: Option<usize>,
    pub(super) begun: u64,
    pub(super) ended: u64,
    pub(super) attributes: Vec<(&'static str, String)>,
    pub(super) failure: Option<String>,
}

/// All spans of an attempt, the whole attempt first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trace {
    pub(super) id: [u8; 16],
    pub(super) spans: Vec<Span>,
}

/// The running attempt, as reported by agents.
#[derive(Debug, Default)]
pub(super) struct Trail(Option<Attempt>);

#[derive(Debug)]
struct Attempt {
    latest: UpdateView,
    begun: u64,
    over: bool,
    /// When each member was first seen at each of its steps.
    steps: BTreeMap<MemberName, Vec<(InstallStep, u64)>>,
}

impl Trail {
    /// Records the state of an attempt at `now` (ms since 1970). Returns the traces of ended attempts: of this one, and of the previous one
    /// if its end was not reported.
    pub(super) fn note(&mut self, update: &UpdateView, now: u64) -> Vec<Trace> {
        let mut traces = Vec::new();
        if let Some(before) = self.0.take_if(|known| !known.is(update))
            && !before.over
        {
            traces.push(before.trace(now, Some("its end was not reported: its leader is gone")));
        }
        let attempt = self.0.get_or_insert_with(|| Attempt { latest: update.clone(), begun: now, over: false, steps: BTreeMap::new() });
        attempt.latest = update.clone();
        for member in &update.members {
            let steps = attempt.steps.entry(member.member.clone()).or_default();
            if steps.last().is_none_or(|(step, _)| *step != member.step) {
                steps.push((member.step, now));
            }
        }
        if update.phase.is_over() && !attempt.over {
            attempt.over = true;
            let failed = update.phase == UpdatePhase::Failed;
            let unsaid = failed.then_some("failed");
            traces.push(attempt.trace(now, unsaid));
        }
        traces
    }
}

impl Attempt {
    fn is(&self, update: &UpdateView) -> bool {
        let known = &self.latest;
        (&known.id, known.version, known.attempt, known.feeding) == (&update.id, update.version, update.attempt, update.feeding)
    }

    fn trace(&self, now: u64, failure: Option<&str>) -> Trace {
        let view = &self.latest;
        let failure = failure.map(|unsaid| view.failure.clone().unwrap_or_else(|| unsaid.to_owned()));
        let attributes = vec![
            ("weightsync.uid", view.id.weightsync.clone()),
            ("weightsync.epoch", view.id.epoch.to_string()),
            ("weightsync.version", view.version.to_string()),
            ("weightsync.attempt", view.attempt.to_string()),
            ("weightsync.bytes", view.total_bytes.to_string()),
        ];
        let mut spans = vec![Span { name: view.kind(), parent: None, begun: self.begun, ended: now, attributes, failure }];
        let mut at = self.begun;
        for (phase, took) in &view.phases_ms {
            let Some(name) = phase_word(phase) else { continue };
            let ended = at.saturating_add(*took);
            spans.push(Span { name, parent: Some(0), begun: at, ended, attributes: Vec::new(), failure: None });
            at = ended;
        }
        for member in &view.members {
            let steps = self.steps.get(&member.member).map(Vec::as_slice).unwrap_or_default();
            let begun = steps.first().map_or(self.begun, |(_, at)| *at);
            let ended = steps.last().filter(|(step, _)| step.is_final()).map_or(now, |(_, at)| *at);
            let failed = matches!(member.step, InstallStep::Refused | InstallStep::Failed);
            let why = || member.reason.clone().unwrap_or_else(|| format!("{:?}", member.step).to_lowercase());
            let attributes =
                vec![("weightsync.member", member.member.to_string()), ("weightsync.received_bytes", member.bytes.to_string())];
            let place = spans.len();
            spans.push(Span { name: "rollout", parent: Some(0), begun, ended, attributes, failure: failed.then(why) });
            let ends = steps.iter().skip(1).map(|(_, at)| *at).chain([ended]);
            for ((step, begun), ended) in steps.iter().zip(ends) {
                let Some(name) = step_word(*step) else { continue };
                spans.push(Span { name, parent: Some(place), begun: *begun, ended, attributes: Vec::new(), failure: None });
            }
        }
        Trace { id: trace_id(view), spans }
    }
}

/// The id of an attempt's trace: the first 16 bytes of the BLAKE3 hash of `EPOCH/VERSION/ATTEMPT/KIND`.
fn trace_id(view: &UpdateView) -> [u8; 16] {
    let digest = blake3::hash(format!("{}/{}/{}/{}", view.id, view.version, view.attempt, view.kind()).as_bytes());
    let mut id = [0; 16];
    digest.as_bytes().iter().zip(&mut id).for_each(|(from, to)| *to = *from);
    id
}

/// Name of the span for a step of a rollout.
fn step_word(step: InstallStep) -> Option<&'static str> {
    match step {
        InstallStep::Receiving => Some("receive"),
        InstallStep::Delivered => Some("wait for the switch"),
        InstallStep::Installing => Some("install"),
        InstallStep::Refused | InstallStep::Installed | InstallStep::Failed => None,
    }
}

/// The sender of traces, if a collector is configured.
#[derive(Debug, Clone, Default)]
pub(super) struct Traces(Option<mpsc::Sender<Trace>>);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    #[error("the collector of traces, {endpoint:?}, cannot be used: {source}; name one as http://HOST:4318 (OTLP over HTTP)")]
    Endpoint { endpoint: String, source: BoxError },
    /// A header for the collector cannot be read. The message does not contain it: it may be a secret.
    #[error("header {place} of {} cannot be used: {source}; write NAME=VALUE,NAME=VALUE, with %XX for a comma", HEADERS.join(" or "))]
    Header {
        /// Which one, from 1.
        place: usize,
        source: BoxError,
    },
}

impl Traces {
    /// Sends to a collector (OTLP over HTTP, JSON) until the last clone is gone, with the headers that the environment names. Sends nothing
    /// if `endpoint` is empty.
    pub(super) fn start(endpoint: &str, instance: &str) -> Result<Self, TracesError> {
        let headers = HEADERS.iter().filter_map(|name| std::env::var(name).ok()).find(|headers| !headers.is_empty());
        Self::start_with(endpoint, &headers.unwrap_or_default(), instance)
    }

    /// As [`start`](Self::start), with these headers.
    pub(super) fn start_with(endpoint: &str, headers: &str, instance: &str) -> Result<Self, TracesError> {
        if endpoint.is_empty() {
            return Ok(Self::default());
        }
        let collector = otlp::Collector::new(endpoint, headers, instance)?;
        let (sender, receiver) = mpsc::channel(WAITING);
        tokio::spawn(collector.post_all(receiver));
        Ok(Self(Some(sender)))
    }

    pub(super) fn are_wanted(&self) -> bool {
        self.0.is_some()
    }

    /// Sends a trace, or drops it if too many wait.
    pub(super) fn put(&self, trace: Trace) {
        if let Some(sender) = &self.0
            && sender.try_send(trace).is_err()
        {
            tracing::warn!("a trace is dropped: {WAITING} wait for the collector");
        }
    }
}
