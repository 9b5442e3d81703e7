use axum::http::HeaderMap;

use super::history::KEPT;
use super::{History, RecentEvents, refusal};
use crate::CoordinatorEvent;
use weightsync_core::protocol::{EpochId, Reason, UpdatePhase, UpdateView};

#[test]
fn the_page_is_for_loopback_peers_that_ask_for_localhost() {
    let asked = |from: &str, host: &str| {
        let headers: HeaderMap = [("host".parse().unwrap(), host.parse().unwrap())].into_iter().collect();
        refusal(from.parse().unwrap(), &headers).is_none()
    };
    for host in ["localhost:8080", "localhost", "127.0.0.1:9", "[::1]:8080"] {
        assert!(asked("127.0.0.1:5", host), "{host}");
    }
    for host in ["evil.example:8080", "10.0.0.7:8080", "", "localhost.evil.example"] {
        assert!(!asked("127.0.0.1:5", host), "{host}");
    }
    assert!(!asked("10.0.0.7:5", "localhost:8080"));
    assert!(!asked("127.0.0.6:5", "localhost:8080"), "a mesh passes on what came from elsewhere");
    assert!(refusal("127.0.0.1:5".parse().unwrap(), &HeaderMap::new()).is_some());
}

#[test]
fn history_is_bounded_and_counts_each_attempt_once() {
    let view = |attempt, phase| UpdateView {
        id: EpochId { weightsync: "w".into(), created: 1, term: 0, epoch: 3 },
        version: 1,
        attempt,
        phase,
        total_bytes: 1,
        members: Vec::new(),
        phases_ms: (0..100).map(|phase| (phase.to_string(), 1)).collect(),
        failure: Some("é".repeat(10_000)),
        feeding: false,
    };
    let mut history = History::default();
    assert!(!history.note(&view(1, UpdatePhase::Begin), 5));
    assert!(history.note(&view(1, UpdatePhase::Failed), 9), "it ended by that");
    assert!(!history.note(&view(1, UpdatePhase::Failed), 10), "it had ended before");
    let ended = (2..100).filter(|attempt| history.note(&view(*attempt, UpdatePhase::Done), 11)).count();
    assert_eq!(ended, 98);
    let latest = serde_json::to_value(history.latest()).unwrap();
    assert_eq!((latest.as_array().unwrap().len(), &latest[0]["attempt"]), (KEPT, &99.into()));
    assert!(latest.to_string().len() < KEPT * 2048, "{}", latest.to_string().len());
}

#[test]
fn recent_events_are_bounded_and_the_latest_is_first() {
    let recent = RecentEvents::default();
    for number in 0..100 {
        let message = format!("{number} {}", "é".repeat(10_000));
        recent.note(&CoordinatorEvent { reason: Reason::GroupFormed, message, member: None, warning: false });
    }
    let latest = serde_json::to_value(recent.latest()).unwrap();
    assert_eq!(latest.as_array().unwrap().len(), 50);
    assert!(latest[0]["message"].as_str().unwrap().starts_with("99 ") && latest.to_string().len() < 50 * 1024);
}
