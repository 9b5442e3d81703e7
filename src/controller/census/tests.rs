use std::collections::BTreeMap;

use serde_json::json;

use super::{slowest_edge, verdicts};
use crate::controller::objects::Seen;
use weightsync_core::membership::{Membership, MembershipConfig, Restored};
use weightsync_core::protocol::UpdatePolicy;

#[test]
fn preflight_edges_are_counted_by_verdict_with_the_slowest() {
    let edge = |to: &str, verdict: &str, rate: Option<i64>| json!({"from": "trainer/t", "to": to, "fromNode": "a", "toNode": "b", "verdict": verdict, "bytesPerSecond": rate, "message": ""});
    let status = json!({"preflight": {
        "state": "Done", "transport": "tcp", "measured": 3, "milliseconds": 5,
        "edges": [edge("a", "Slow", Some(100)), edge("b", "Good", Some(900)), edge("c", "Broken", None), edge("d", "Good", Some(800))],
    }});
    let view = Membership::new(MembershipConfig::new("w", 1, UpdatePolicy::default()), Restored::default()).view();
    let mut seen = Seen {
        namespace: "rl".into(),
        name: "run".into(),
        suspended: false,
        status: Some(serde_json::from_value(status).unwrap()),
        view,
        history: Vec::new(),
        events: Vec::new(),
    };
    assert_eq!(verdicts(&seen), BTreeMap::from([("broken", 1), ("good", 2), ("slow", 1)]));
    assert_eq!(slowest_edge(&seen), Some(100));
    seen.status = None;
    assert!(verdicts(&seen).is_empty() && slowest_edge(&seen).is_none());
}
