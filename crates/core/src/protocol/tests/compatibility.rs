//! This build reads messages of every protocol that it speaks, with their old meaning.

use serde_json::{Map, Value};

use super::fuzz::{Message, messages};
use crate::protocol::{NEWEST, OLDEST};

/// Messages from the time when that protocol was the newest: name and content.
const KEPT: [&str; 1] = [include_str!("protocol-1.json")];

fn kept(protocol: u32) -> Vec<(String, Value)> {
    let text = KEPT.get(usize::try_from(protocol).unwrap() - 1).unwrap_or_else(|| panic!("protocol {protocol} has no messages"));
    let lines: Vec<Map<String, Value>> = serde_json::from_str(text).unwrap();
    lines.into_iter().flatten().collect()
}

/// Whether `new` contains everything in `old`.
fn keeps(new: &Value, old: &Value) -> bool {
    match (new, old) {
        (Value::Object(new), Value::Object(old)) => old.iter().all(|(name, old)| new.get(name).is_some_and(|new| keeps(new, old))),
        (Value::Array(new), Value::Array(old)) => new.len() == old.len() && new.iter().zip(old).all(|(new, old)| keeps(new, old)),
        _ => new == old,
    }
}

/// If older builds send a message that this build no longer reads, or reads otherwise, `compatibility.rs` needs a new number.
#[test]
fn messages_of_every_spoken_protocol_keep_their_meaning() {
    let known = messages();
    for protocol in OLDEST..=NEWEST {
        let kept = kept(protocol);
        assert!(kept.len() > 30, "{} messages", kept.len());
        for (name, old) in kept {
            let kind = known.iter().find(|kind| kind.name == name).unwrap_or_else(|| panic!("{name} of protocol {protocol} is gone"));
            let written = (kind.again)(old.to_string().as_bytes()).unwrap_or_else(|error| panic!("{name} of protocol {protocol}: {error}"));
            let new: Value = serde_json::from_slice(&written).unwrap();
            assert!(keeps(&new, &old), "{name} of protocol {protocol} lost something: {new}, was {old}");
        }
    }
}

/// Each new message needs an example among those of the newest protocol. `WEIGHTSYNC_PRINT_MESSAGES=1 cargo test --lib -- --nocapture`
/// prints them.
#[test]
fn the_newest_protocol_has_a_message_of_every_kind() {
    let known = messages();
    if std::env::var_os("WEIGHTSYNC_PRINT_MESSAGES").is_some() {
        let lines: Vec<String> = known.iter().map(|Message { name, example, .. }| format!("{{\"{name}\": {example}}}")).collect();
        println!("[\n{}\n]", lines.join(",\n"));
    }
    let kept = kept(NEWEST);
    for Message { name, .. } in &known {
        assert!(kept.iter().any(|(kept, _)| kept == name), "{name} has no message in protocol-{NEWEST}.json");
    }
}
