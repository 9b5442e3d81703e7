use serde_json::json;

use super::*;

fn line(change: impl FnOnce(&mut Value)) -> String {
    let mut line = json!({
        "timestamp": "2026-01-02T03:04:05.678901Z", "level": "WARN", "target": "weightsync_agent::core", "message": "lost a peer",
        "peer": "actors/a", "attempt": 3,
    });
    change(&mut line);
    line.to_string()
}

fn copied(text: &str) -> Value {
    serde_json::from_str(log(text).0.trim()).unwrap_or(Value::Null)
}

#[test]
fn line_of_ours_keeps_its_message_and_named_fields() {
    assert_eq!(copied(&line(|_| {})), serde_json::from_str::<Value>(&line(|_| {})).unwrap());
    let spans = json!([{"name": "planted"}]);
    let more = line(|line| {
        line["prompt"] = json!("planted");
        line["spans"] = spans;
        line["error"] = json!({"nested": "planted"});
    });
    assert_eq!(log(&more), log(&line(|_| {})));
}

#[test]
fn line_of_another_program_is_left_out_and_counted() {
    let foreign = [
        "INFO: Uvicorn running, AWS_SECRET_ACCESS_KEY=planted".to_owned(),
        "{'api_key': ['planted']}".to_owned(),
        json!({"prompt": "planted"}).to_string(),
        line(|line| line["target"] = json!("planted::engine")),
        line(|line| line["target"] = json!("weightsyncer")),
        line(|line| line["level"] = json!("planted")),
        line(|line| line["timestamp"] = json!(1)),
    ];
    assert_eq!(log(&foreign.join("\n")), (String::new(), foreign.len()));
    assert_eq!(log(""), (String::new(), 0));
}

#[test]
fn line_of_a_workers_output_is_left_out() {
    let passed = line(|line| {
        line["target"] = json!("weightsync_gpu::worker::process");
        line["line"] = json!("NCCL INFO planted");
        line["worker"] = json!("GPU 0");
    });
    let copied = copied(&passed);
    assert!(copied["line"].is_null() && copied["worker"] == "GPU 0", "{copied}");
}

#[test]
fn metrics_of_another_program_are_left_out() {
    let text = "# HELP weightsync_leader 1 while it leads.\n# TYPE weightsync_leader gauge\nweightsync_leader 1\n\
                    # HELP vllm_x planted\nvllm_x{key=\"planted\"} 1\n# EOF\n";
    assert_eq!(metrics(text), "# HELP weightsync_leader 1 while it leads.\n# TYPE weightsync_leader gauge\nweightsync_leader 1\n");
}
