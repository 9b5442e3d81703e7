//! One trace of each attempt to bring a version: what the source and every rollout did when, as their agents told this controller. Decides
//! which spans there are, and their ids, which follow from the attempt, so that who knows the attempt finds its trace. It never sends one:
//! that is [`otlp`]'s.

#[cfg(feature = "otel")]
mod otlp;

use std::collections::BTreeMap;

use tokio::sync::mpsc;

use super::metrics::phase_word;
use crate::protocol::{InstallStep, MemberName, UpdatePhase, UpdateView};

/// Traces that wait for the collector; what comes on top of them is lost, because nothing may wait for a collector.
const WAITING: usize = 64;

/// One span; times in ms since 1970.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) name: &'static str,
    /// Its place among the trace's spans; none for the first.
    pub(super) parent: Option<usize>,
    pub(super) begun: u64,
    pub(super) ended: u64,
    pub(super) attributes: Vec<(&'static str, String)>,
    /// Why it failed.
    pub(super) failure: Option<String>,
}

/// All spans of an attempt, the whole attempt first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trace {
    pub(super) id: [u8; 16],
    pub(super) spans: Vec<Span>,
}

/// The attempt that is under way, as far as it was told.
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
    /// Takes in how an attempt stands at `now` (ms since 1970); answers the traces of those that are over: of this one, and of the one
    /// before where nobody said how it ended.
    pub(super) fn note(&mut self, update: &UpdateView, now: u64) -> Vec<Trace> {
        let mut traces = Vec::new();
        if let Some(before) = self.0.take_if(|known| !known.is(update))
            && !before.over
        {
            traces.push(before.trace(now, Some("its end was not told: whoever led it is gone")));
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

/// What a rollout does while it is at a step.
fn step_word(step: InstallStep) -> Option<&'static str> {
    match step {
        InstallStep::Receiving => Some("receive"),
        InstallStep::Delivered => Some("wait for the switch"),
        InstallStep::Installing => Some("install"),
        InstallStep::Refused | InstallStep::Installed | InstallStep::Failed => None,
    }
}

/// Where traces go; nowhere where no collector was named.
#[derive(Debug, Clone, Default)]
pub(super) struct Traces(Option<mpsc::Sender<Trace>>);

/// Why no traces can be sent.
#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    /// The endpoint is no address of a collector.
    #[error("the collector of traces, {endpoint:?}, cannot be used: {cause}; name one as http://HOST:4318 (OTLP over HTTP)")]
    Endpoint {
        /// As it was given.
        endpoint: String,
        /// Why.
        cause: String,
    },
    /// The program was built without its feature `otel`.
    #[cfg(not(feature = "otel"))]
    #[error("this program was built without the feature `otel`: it cannot send traces to {0:?}")]
    NotBuilt(String),
}

impl Traces {
    /// Sends to a collector (OTLP over HTTP, JSON) until the last clone is gone; to nobody if `endpoint` is empty.
    pub(super) fn start(endpoint: &str, instance: &str) -> Result<Self, TracesError> {
        if endpoint.is_empty() {
            return Ok(Self::default());
        }
        let (sender, receiver) = mpsc::channel(WAITING);
        Self::send_to(endpoint, instance, receiver)?;
        Ok(Self(Some(sender)))
    }

    #[cfg(feature = "otel")]
    fn send_to(endpoint: &str, instance: &str, traces: mpsc::Receiver<Trace>) -> Result<(), TracesError> {
        let exporter = otlp::exporter(endpoint, instance)?;
        tokio::spawn(otlp::send(exporter, traces));
        Ok(())
    }

    #[cfg(not(feature = "otel"))]
    fn send_to(endpoint: &str, _: &str, _: mpsc::Receiver<Trace>) -> Result<(), TracesError> {
        Err(TracesError::NotBuilt(endpoint.to_owned()))
    }

    /// Whether anybody wants traces.
    pub(super) fn are_wanted(&self) -> bool {
        self.0.is_some()
    }

    /// Sends one, or drops it where too many wait.
    pub(super) fn put(&self, trace: Trace) {
        if let Some(sender) = &self.0
            && sender.try_send(trace).is_err()
        {
            tracing::warn!("a trace is dropped: {WAITING} wait for the collector");
        }
    }
}
