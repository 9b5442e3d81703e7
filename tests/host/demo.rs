//! `weightsync demo` with many seeds: who is killed, and when, differs each time; what comes out does not.

use std::collections::BTreeSet;
use std::process::{Output, Stdio};

use serde_json::Value;
use tokio::process::Command;

use crate::world::{PROGRAM, SOON};

async fn demo(seed: u64, more: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.args(["demo", "--output", "json", "--megabytes", "8", "--seed", &seed.to_string()]).args(more);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    tokio::time::timeout(2 * SOON, output).await.expect("the demo ends").unwrap()
}

fn assert_good(seed: u64, output: &Output) -> String {
    let said = || format!("seed {seed}: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", said());
    let outcome: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said()));
    assert_eq!((&outcome["replicas"], &outcome["verified"]), (&3.into(), &true.into()), "{}", said());
    assert_eq!(outcome["disagreements"], serde_json::json!([]), "{}", said());
    let versions = outcome["versions"].as_array().unwrap();
    let rows = versions.iter().map(|row| (row["version"].as_u64().unwrap(), row["installed"].as_array().unwrap().len()));
    assert_eq!(rows.collect::<Vec<_>>(), [(1, 3), (2, 2), (3, 3)], "{}", said());
    // The group, the one without the killed rollout, the one with its successor: at least three.
    assert!(outcome["epochs"].as_u64().unwrap() >= 3, "{}", said());
    assert_eq!(outcome["bytes"], versions.iter().map(|row| row["bytes"].as_u64().unwrap()).sum::<u64>());
    assert!((20..=80).contains(&outcome["killedAtPercent"].as_u64().unwrap()), "{}", said());
    // What a signal is promised to cost, with much for a debug build on a busy machine.
    let (detected, recovered) = (outcome["detectedMs"].as_u64().unwrap(), outcome["recoveredMs"].as_u64().unwrap());
    assert!(detected <= recovered && recovered < 10_000, "{}", said());
    assert!(outcome["rejoinedMs"].is_u64(), "{}", said());
    outcome["killed"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_ends_well_with_twenty_seeds_and_kills_each_rollout_at_least_once() {
    let mut killed = BTreeSet::new();
    for seed in (1..=20).step_by(2) {
        let (first, second) = tokio::join!(demo(seed, &[]), demo(seed + 1, &[]));
        killed.insert(assert_good(seed, &first));
        killed.insert(assert_good(seed + 1, &second));
    }
    assert_eq!(killed.len(), 3, "{killed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_tells_a_flipped_byte_and_fails() {
    let output = demo(3, &["--corrupt"]).await;
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let outcome: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(outcome["verified"], false);
    let disagreements = outcome["disagreements"].as_array().unwrap();
    let [only] = disagreements.as_slice() else { panic!("{disagreements:?}") };
    let only = only.as_str().unwrap();
    assert!(only.starts_with("version 3, actor-0: tensor ") && only.contains("published was"), "{only}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_runs_with_simulated_sglang_servers() {
    let output = demo(4, &["--engine", "simulated-sglang"]).await;
    assert_good(4, &output);
}
