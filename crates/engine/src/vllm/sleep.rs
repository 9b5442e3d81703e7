//! What vLLM's metrics say of its sleep. Decides whether weights are off the GPU, and counts how often it fell asleep; never what follows from it.
//!
//! `/is_sleeping` says true of every pause as well. The metrics of 0.32 tell the two apart (`v1/metrics/loggers.py`: `weights_offloaded` for
//! level 1, `discard_all` for level 2; both stand until every part is awake) and count (`entrypoints/serve/dev/sleep/metrics.py`).

use crate::server::Sleeps;

/// Whatever is missing did not happen: an older server, or one that was never put to sleep.
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
mod tests {
    use super::*;

    #[test]
    fn metrics_tell_a_sleep_from_a_pause_and_count_those_that_are_over() {
        let state = |awake: u8, offloaded: u8, discarded: u8| {
            let line =
                |state: &str, on: u8| format!("vllm:engine_sleep_state{{engine=\"0\",model_name=\"m\",sleep_state=\"{state}\"}} {on}.0\n");
            [line("awake", awake), line("weights_offloaded", offloaded), line("discard_all", discarded)].concat()
        };
        let count = |operation: &str, count: u8| {
            format!("vllm:sleep_mode_operation_duration_seconds_count{{operation=\"{operation}\"}} {count}.0\n")
        };
        let table = [
            (String::new(), false, 0),
            (state(1, 0, 0), false, 0),
            // Level 0 is a pause.
            (state(0, 0, 0) + &count("sleep", 1), false, 1),
            (state(0, 1, 0) + &count("sleep", 2), true, 2),
            (state(0, 0, 1), true, 0),
            (state(1, 0, 0) + &count("sleep", 3) + &count("wake", 7), false, 3),
            ("vllm:engine_sleep_state{sleep_state=\"discard_all\"} nonsense\nno number".to_owned(), false, 0),
        ];
        for (metrics, now, times) in table {
            assert_eq!(of_metrics(&metrics), Sleeps { now, times }, "{metrics}");
        }
    }
}
