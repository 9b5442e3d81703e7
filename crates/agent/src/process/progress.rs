//! How far the update of each engine is, in numbers that are taken when somebody reads them: bytes change thousands of times a second.

use std::fmt::{Debug, Error, Formatter};
use std::sync::{Arc, Mutex};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::labels::{OfEngine, PORT};
use super::shown::Shown;
use crate::locks::lock;
use weightsync_net::metrics::{Definition, In};

pub(super) const RECEIVED: Definition =
    Definition::gauge_in("agent_update_received", In::Bytes, "Bytes of the last update that arrived and were checked").by(PORT);
pub(super) const TOTAL: Definition =
    Definition::gauge_in("agent_update_total", In::Bytes, "Bytes that the last update has in all").by(PORT);

/// Reads the rollouts that the pages show.
pub(super) struct Progress(pub(super) Arc<Mutex<Shown>>);

impl Debug for Progress {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result<(), Error> {
        formatter.write_str("Progress")
    }
}

impl Collector for Progress {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let of_engines: Vec<_> = lock(&self.0).rollouts.iter().map(|rollout| (rollout.port(), rollout.progress())).collect();
        let mut all = |definition: Definition, number: fn(&(u64, u64)) -> u64| {
            let mut family = definition.encode(&mut encoder)?;
            for (port, progress) in &of_engines {
                let bytes = i64::try_from(number(progress)).unwrap_or(i64::MAX);
                Definition::gauge_series(&mut family, &OfEngine { port: *port }, bytes)?;
            }
            Ok(())
        };
        all(RECEIVED, |(received, _)| *received)?;
        all(TOTAL, |(_, total)| *total)
    }
}
