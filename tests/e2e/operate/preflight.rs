//! `kubectl weightsync preflight` through the real API server.

use std::time::Instant;

use serde_json::Value;

use super::run;
use crate::cluster::{Cluster, START};

/// What the verb prints once it ends well. On cores that other tests use, an edge may be slow once: it is measured again.
async fn measured(cluster: &Cluster, more: &[&str]) -> String {
    let begun = Instant::now();
    loop {
        let (code, text, error) = run(cluster, &[&["preflight", "run"], more].concat()).await;
        if code == Some(0) {
            return text;
        }
        assert!(begun.elapsed() < START, "not all edges are good: {text}{error}");
    }
}

/// Measures the edges of a group of two rollouts that runs: the verb shows what then stands in status.
pub async fn edges_of_a_running_group_are_measured(cluster: &Cluster) {
    let epoch = cluster.status("run").await["epoch"].as_u64().unwrap();
    let found: Value = serde_json::from_str(&measured(cluster, &["--output", "json"]).await).unwrap();
    let status = cluster.status("run").await;
    assert_eq!(found, status["preflight"]);
    assert_eq!((&found["state"], &found["transport"]), (&"Done".into(), &"tcp".into()), "{found}");
    assert!(found["request"].as_str().is_some_and(|request| !request.is_empty()) && status["epoch"].as_u64().unwrap() > epoch, "{status}");
    let edges = found["edges"].as_array().unwrap();
    let ends: Vec<&str> = edges.iter().flat_map(|edge| [edge["from"].as_str().unwrap(), edge["to"].as_str().unwrap()]).collect();
    for member in ["trainer/trainer-0", "actors/sim-0", "actors/sim-1"] {
        assert!(ends.contains(&member), "{member} is at no edge: {found}");
    }
    for edge in edges {
        let figures = ["bytesPerSecond", "roundTripMicroseconds", "mtu"].map(|figure| edge[figure].as_i64().unwrap_or(0));
        assert!(edge["verdict"] == "Good" && figures.iter().all(|figure| *figure > 0), "{edge}");
    }

    let text = measured(cluster, &[]).await;
    let head: Vec<_> = text.lines().next().unwrap_or_default().split_whitespace().collect();
    assert_eq!(head[..5], ["FROM", "TO", "NODES", "TRANSPORT", "RATE"], "{text}");
    let rows: Vec<_> = text.lines().filter(|line| line.starts_with("trainer/trainer-0") && line.contains("/s")).collect();
    assert!(!rows.is_empty() && rows.iter().all(|row| row.contains("Good")), "{text}");
    assert!(text.contains("edges measured in"), "{text}");
}
