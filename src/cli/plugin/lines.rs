//! Log lines of our programs for a person: JSON in, one readable line out. What is no JSON of ours is shown as it is.
//!
//! Pure: a line never fails, and nothing of it is dropped.

use std::fmt::Write as _;

use serde_json::{Map, Value};

/// One line, with the time by which lines of several pods are sorted; none for a line that carries none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) at: Option<String>,
    pub(super) text: String,
    /// Whether one of our programs wrote it.
    pub(super) ours: bool,
}

/// Reads a line.
pub(super) fn read(line: &str) -> Line {
    let parsed = serde_json::from_str::<Map<String, Value>>(line).ok();
    let Some(mut fields) = parsed.filter(|fields| fields.contains_key("timestamp") && fields.contains_key("level")) else {
        return Line { at: None, text: line.to_owned(), ours: false };
    };
    let mut take = |name: &str| fields.remove(name).and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default();
    let (at, level, message, target) = (take("timestamp"), take("level"), take("message"), take("target"));
    let clock = at.get(11..23).unwrap_or(&at);
    let mut text = format!("{clock} {level:5} {message}");
    for (name, value) in &fields {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        // Nothing is wrong with a String that is written to.
        let _ = write!(text, " {name}={value}");
    }
    if level == "DEBUG" || level == "TRACE" {
        let _ = write!(text, " ({target})");
    }
    Line { at: Some(at), text, ours: true }
}

#[cfg(test)]
mod tests {
    use super::read;

    #[test]
    fn a_line_of_ours_reads_as_time_level_message_and_fields() {
        let line = r#"{"timestamp":"2026-01-02T03:04:05.678901Z","level":"WARN","message":"lost a peer","peer":"actors/a","n":3,"target":"weightsync::agent"}"#;
        let read = read(line);
        assert_eq!(read.text, "03:04:05.678 WARN  lost a peer n=3 peer=actors/a");
        assert_eq!((read.at.as_deref(), read.ours), (Some("2026-01-02T03:04:05.678901Z"), true));
    }

    #[test]
    fn what_is_not_ours_stays_as_it_is() {
        for line in ["INFO: Uvicorn running", "{\"a\":1}", "", "{broken", "\u{fffd}"] {
            assert_eq!((read(line).text.as_str(), read(line).ours), (line, false));
        }
    }
}
