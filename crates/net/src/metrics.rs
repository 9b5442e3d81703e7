//! Numbers for Prometheus. Names, meanings and labels are [`Definition`]s. `docs/metrics.md` is made from them, and tests compare them with
//! what a program exposes. No label of a histogram contains an object's name, and the values of every label are a closed set. So the number
//! of series is bounded.

mod plain;
pub mod process;

pub use plain::plain;

use std::fmt::Write as _;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry, Unit};

const PREFIX: &str = "weightsync";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    /// Only grows; its name ends in `_total`.
    Counter,
    Gauge,
    Histogram,
    /// Its labels carry the information; its value is 1.
    Info,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum In {
    Things,
    Seconds,
    Bytes,
}

/// One metric, as it is documented and exposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Definition {
    /// Its name without prefix, unit and suffix.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Its unit.
    pub unit: In,
    /// Its meaning, without a full stop.
    pub help: &'static str,
    /// Its labels, with the meaning of their values.
    pub labels: &'static [(&'static str, &'static str)],
}

#[allow(missing_docs)]
impl Definition {
    const fn new(name: &'static str, kind: Kind, unit: In, help: &'static str) -> Self {
        Self { name, kind, unit, help, labels: &[] }
    }

    pub const fn counter(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Kind::Counter, In::Things, help)
    }

    /// A counter of bytes.
    pub const fn bytes(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Kind::Counter, In::Bytes, help)
    }

    const fn seconds(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Kind::Counter, In::Seconds, help)
    }

    pub const fn gauge(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Kind::Gauge, In::Things, help)
    }

    pub const fn gauge_in(name: &'static str, unit: In, help: &'static str) -> Self {
        Self::new(name, Kind::Gauge, unit, help)
    }

    /// A histogram of times.
    pub const fn times(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Kind::Histogram, In::Seconds, help)
    }

    const fn info(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Kind::Info, In::Things, help)
    }

    #[must_use]
    pub const fn by(self, labels: &'static [(&'static str, &'static str)]) -> Self {
        Self { labels, ..self }
    }

    /// The name of its family in the exposition, without the suffixes of single series.
    fn family(&self) -> String {
        match self.unit {
            In::Things => format!("{PREFIX}_{}", self.name),
            In::Seconds => format!("{PREFIX}_{}_seconds", self.name),
            In::Bytes => format!("{PREFIX}_{}_bytes", self.name),
        }
    }

    /// The name in queries; a histogram's series have the suffixes `_bucket`, `_sum` and `_count`.
    pub fn series(&self) -> String {
        match self.kind {
            Kind::Counter => format!("{}_total", self.family()),
            Kind::Info => format!("{}_info", self.family()),
            Kind::Gauge | Kind::Histogram => self.family(),
        }
    }

    fn unit(&self) -> Option<Unit> {
        match self.unit {
            In::Things => None,
            In::Seconds => Some(Unit::Seconds),
            In::Bytes => Some(Unit::Bytes),
        }
    }

    /// Begins its family in the output of a collector, which adds the series.
    pub fn encode<'a>(&self, encoder: &'a mut DescriptorEncoder<'_>) -> Result<MetricEncoder<'a>, std::fmt::Error> {
        let kind = match self.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
            Kind::Info => MetricType::Info,
        };
        let unit = match self.unit {
            In::Things => None,
            In::Seconds => Some(&Unit::Seconds),
            In::Bytes => Some(&Unit::Bytes),
        };
        encoder.encode_descriptor(self.name, &self.sentence(), unit, kind)
    }

    /// One gauge series of its family.
    pub fn gauge_series(encoder: &mut MetricEncoder<'_>, labels: &impl EncodeLabelSet, value: i64) -> std::fmt::Result {
        encoder.encode_family(labels)?.encode_gauge(&value)
    }

    /// Its help text in the exposition.
    fn sentence(&self) -> String {
        format!("{}.", self.help)
    }
}

/// Exposed by every program.
pub const BUILD: Definition = Definition::info("build", "Version of the program").by(&[("version", "of the program")]);

/// Buckets of times: 1 ms to 131 s, doubling.
pub fn times() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

/// The registry of a program. Clones share it.
#[derive(Clone)]
pub struct Metrics(Arc<Mutex<Registry>>);

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register(BUILD.name, BUILD.help, Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]));
        registry.register_collector(Box::new(process::Process));
        Self(Arc::new(Mutex::new(registry)))
    }
}

impl Metrics {
    /// Registers `metric` under its definition and returns it.
    pub fn register<M: Metric + Clone>(&self, definition: &Definition, metric: M) -> M {
        let mut registry = self.0.lock();
        match definition.unit() {
            None => registry.register(definition.name, definition.help, metric.clone()),
            Some(unit) => registry.register_with_unit(definition.name, definition.help, unit, metric.clone()),
        }
        metric
    }

    /// Calls `collector` at each scrape: for values that change far more often than they are read.
    pub fn collect(&self, collector: impl Collector) {
        self.0.lock().register_collector(Box::new(collector));
    }

    /// The metrics as OpenMetrics text.
    pub(crate) fn text(&self) -> Result<String, std::fmt::Error> {
        let registry = self.0.lock();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

/// A table of metrics in Markdown.
pub fn table(definitions: &[Definition]) -> String {
    let mut text = "| metric | type | labels | meaning |\n|---|---|---|---|\n".to_owned();
    for definition in definitions {
        let kind = match definition.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
            Kind::Info => "info",
        };
        let labels: Vec<String> = definition.labels.iter().map(|(label, values)| format!("`{label}` ({values})")).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "| `{}` | {kind} | {} | {} |", definition.series(), labels.join(", "), definition.help);
    }
    text
}

/// Compares an exposition with the definitions, for tests: returns families and labels without a definition. A family without series is not
/// exposed at all.
#[cfg(any(test, feature = "testing"))]
pub fn differences(exposition: &str, definitions: &[Definition]) -> Vec<String> {
    let mut wrong = Vec::new();
    let all = || definitions.iter().chain([&BUILD]).chain(process::DEFINITIONS);
    for line in exposition.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split(' ').next()) {
            if !all().any(|definition| definition.family() == family || definition.series() == family) {
                wrong.push(format!("{family} is not defined"));
            }
            continue;
        }
        if line.starts_with('#') {
            continue;
        }
        let (name, labels) = line.split_once('{').map_or((line, ""), |(name, rest)| (name, rest));
        let name = name.split(' ').next().unwrap_or_default();
        let Some(definition) = all().find(|definition| {
            let rest = name.strip_prefix(&definition.family());
            rest.is_some_and(|rest| ["", "_total", "_info", "_bucket", "_sum", "_count"].contains(&rest))
        }) else {
            wrong.push(format!("{name} is not defined"));
            continue;
        };
        for (label, _) in labels.split("\",").filter_map(|pair| pair.split_once("=\"")) {
            if label != "le" && !definition.labels.iter().any(|(known, _)| *known == label) {
                wrong.push(format!("{name} has the label {label}, which is not defined"));
            }
        }
    }
    wrong.dedup();
    wrong
}

#[cfg(test)]
mod tests;
