//! Sleep in vLLM's metrics. Decides whether weights are off the GPU, and counts how often it fell asleep; the consequences are decided
//! elsewhere.
//!
//! `/is_sleeping` is true for every pause as well. The metrics of 0.32 distinguish the two (`v1/metrics/loggers.py`: `weights_offloaded`
//! for level 1, `discard_all` for level 2; both stay until every part is awake) and count (`entrypoints/serve/dev/sleep/metrics.py`).

use crate::server::Sleeps;

/// A missing metric means that it did not happen: an older server, or one that never slept.
pub(super) fn of_metrics(metrics: &str) -> Sleeps {
    let mut sleeps = Sleeps::default();
    for line in metrics.lines() {
        let Some((what, value)) = line.rsplit_once(' ') else { continue };
        // Both are whole numbers, written as 3.0.
        let Ok(value) = value.strip_suffix(".0").unwrap_or(value).parse::<u64>() else { continue };
        if what.starts_with("vllm:engine_sleep_state{") && (what.contains("\"weights_offloaded\"") || what.contains("\"discard_all\"")) {
            sleeps.now |= value > 0;
        } else if what.starts_with("vllm:sleep_mode_operation_duration_seconds_count{") && what.contains("\"sleep\"") {
            sleeps.times = sleeps.times.saturating_add(value);
        }
    }
    sleeps
}

#[cfg(test)]
mod tests;
