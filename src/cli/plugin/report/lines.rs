//! What a report copies of logs and metrics: lines of WeightSync's own programs, and the fields of them that are listed here.
//!
//! Decides line by line, also in a log that an engine or trainer shares with its agent (`Wrap`). It copies no line that it cannot parse,
//! and never searches a text for secrets. Pure.

use serde::Serialize;
use serde_json::{Map, Value};
use weightsync_net::logs::is_ours;

/// Fields of WeightSync's log lines that are copied: numbers, names, addresses, values of closed lists, and WeightSync's own messages.
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

/// WeightSync's lines of a log, and the number of other lines.
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

/// WeightSync's series in a page of metrics.
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
    if !LEVELS.contains(&level.as_str()) || !is_ours(&target) {
        return None;
    }
    fields.retain(|name, value| FIELDS.contains(&name.as_str()) && !value.is_object() && !value.is_array());
    Some(Line { timestamp, level, target, message, fields })
}

#[cfg(test)]
mod tests;
