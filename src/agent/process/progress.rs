//! How far the update of each engine is, in numbers that are taken when somebody reads them: bytes change thousands of times a second.

use std::fmt::{Debug, Error, Formatter};
use std::sync::{Arc, Mutex};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;

use super::pages::{OfEngine, Shown};
use crate::agent::core::lock;

/// Reads the rollouts that the pages show.
pub(super) struct Progress(pub(super) Arc<Mutex<Shown>>);

impl Debug for Progress {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result<(), Error> {
        formatter.write_str("Progress")
    }
}

impl Collector for Progress {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), Error> {
        let of_engines: Vec<_> = lock(&self.0).rollouts.iter().map(|rollout| (rollout.port(), rollout.progress())).collect();
        let kind = ConstGauge::new(0_u64);
        let mut all = |name: &str, help: &str, number: fn(&(u64, u64)) -> u64| {
            let mut encoder = encoder.encode_descriptor(name, help, None, kind.metric_type())?;
            for (port, progress) in &of_engines {
                ConstGauge::new(number(progress)).encode(encoder.encode_family(&OfEngine { port: *port })?)?;
            }
            Ok(())
        };
        all("agent_update_received_bytes", "Bytes of the last update that arrived and were checked", |(received, _)| *received)?;
        all("agent_update_total_bytes", "Bytes that the last update has in all", |(_, total)| *total)
    }
}
