//! What a report copies of logs and metrics: lines that our own programs wrote, and of each log line the fields that this file names.
//!
//! Decides line by line, also in a log that an engine or trainer shares with its agent (`Wrap`). It copies no line that it cannot read, and
//! never looks for secrets in a text. Pure.

use serde::Serialize;
use serde_json::{Map, Value};

/// Fields of our log lines that are copied: numbers, names, addresses, words of closed lists, and our own texts of why.
const FIELDS: [&str; 62] = [
    "address",
    "agent",
    "attempt",
    "attempts",
    "bytes",
    "cause",
    "code",
    "control",
    "data",
    "dirty",
    "engine",
    "epoch",
    "error",
    "failure",
    "failures",
    "from",
    "given_back",
    "gpu",
    "groups",
    "how",
    "id",
    "init",
    "init_ms",
    "installed",
    "joined.cleared_ms",
    "joined.joined_ms",
    "kind",
    "lease",
    "limit",
    "member",
    "members",
    "name",
    "namespace",
    "nccl",
    "object",
    "part",
    "path",
    "peer",
    "pid",
    "pod",
    "pod_uid",
    "rank",
    "reason",
    "restarts",
    "route",
    "sequence",
    "status",
    "steps",
    "swept",
    "term",
    "took",
    "touched",
    "version",
    "wait",
    "warm_up",
    "warm_up_ms",
    "warning",
    "weightsync",
    "why",
    "why_not",
    "worker",
    "world",
];

const LEVELS: [&str; 5] = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"];

#[derive(Serialize)]
struct Line {
    timestamp: String,
    level: String,
    target: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

/// A log's lines that are ours, and how many are not.
pub(super) fn log(text: &str) -> (String, usize) {
    let (mut kept, mut left_out) = (String::new(), 0);
    for line in text.lines() {
        match ours(line).and_then(|line| serde_json::to_string(&line).ok()) {
            Some(line) => {
                kept.push_str(&line);
                kept.push('\n');
            }
            None => left_out += 1,
        }
    }
    (kept, left_out)
}

/// Series of ours in a page of metrics.
pub(super) fn metrics(text: &str) -> String {
    let is_ours = |line: &&str| {
        let described = line.strip_prefix("# ").and_then(|line| line.split_once(' ')).map(|(_, series)| series);
        described.unwrap_or(line).starts_with("weightsync_")
    };
    text.lines().filter(is_ours).flat_map(|line| [line, "\n"]).collect()
}

fn ours(line: &str) -> Option<Line> {
    let mut fields: Map<String, Value> = serde_json::from_str(line).ok()?;
    let mut take = |name: &str| match fields.remove(name) {
        Some(Value::String(text)) => Some(text),
        _ => None,
    };
    let (timestamp, level, target, message) = (take("timestamp")?, take("level")?, take("target")?, take("message"));
    if !LEVELS.contains(&level.as_str()) || !is_our_target(&target) {
        return None;
    }
    fields.retain(|name, value| FIELDS.contains(&name.as_str()) && !value.is_object() && !value.is_array());
    Some(Line { timestamp, level, target, message, fields })
}

/// Whether a line's target is a module of one of our crates.
fn is_our_target(target: &str) -> bool {
    let name = target.split("::").next().unwrap_or_default();
    name == "weightsync" || name.starts_with("weightsync_")
}

#[cfg(test)]
mod tests {
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
}
