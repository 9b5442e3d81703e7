//! Numbers for Prometheus. Names and labels are fixed here; no label holds an object's name in a histogram, and every label's values are
//! a closed set, so that the number of series is bounded.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry, Unit};

/// The registry of a program. Clones share it.
#[derive(Clone)]
pub struct Metrics(Arc<Mutex<Registry>>);

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("weightsync");
        let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of the program", build);
        Self(Arc::new(Mutex::new(registry)))
    }
}

impl Metrics {
    /// Registers `metric` as `weightsync_NAME` and returns it. Counters get `_total` by themselves.
    pub fn register<M: Metric + Clone>(&self, name: &str, help: &str, metric: M) -> M {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).register(name, help, metric.clone());
        metric
    }

    /// Registers `metric` as `weightsync_NAME_UNIT` and returns it.
    pub fn register_with_unit<M: Metric + Clone>(&self, name: &str, help: &str, unit: Unit, metric: M) -> M {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).register_with_unit(name, help, unit, metric.clone());
        metric
    }

    /// Has `collector` asked for its numbers whenever somebody reads: for what changes far more often than it is read.
    pub fn collect(&self, collector: impl Collector) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).register_collector(Box::new(collector));
    }

    /// The OpenMetrics text.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        let registry = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::metrics::counter::Counter;

    #[test]
    fn a_registered_counter_appears_with_prefix_and_suffix() {
        let metrics = Metrics::default();
        let counter: Counter = metrics.register("reconcile", "Reconciles", Counter::default());
        counter.inc();
        let text = metrics.text().unwrap();
        assert!(text.contains("weightsync_reconcile_total 1\n"), "{text}");
        assert!(text.contains(concat!("weightsync_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1")), "{text}");
    }
}
