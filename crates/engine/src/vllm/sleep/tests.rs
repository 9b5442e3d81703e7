use super::*;

#[test]
fn metrics_separate_sleep_from_pause_and_count_ended_ones() {
    let state = |awake: u8, offloaded: u8, discarded: u8| {
        let line =
            |state: &str, on: u8| format!("vllm:engine_sleep_state{{engine=\"0\",model_name=\"m\",sleep_state=\"{state}\"}} {on}.0\n");
        [line("awake", awake), line("weights_offloaded", offloaded), line("discard_all", discarded)].concat()
    };
    let count =
        |operation: &str, count: u8| format!("vllm:sleep_mode_operation_duration_seconds_count{{operation=\"{operation}\"}} {count}.0\n");
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
