//! `weightsync-dev demo` with real servers as rollouts: one is killed in the middle of an update, comes back, and all of them answer alike.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use super::processor;
use super::real::venv;

/// The demo starts four servers, two at a time: minutes each on a machine whose cores build something else.
const WHOLE: Duration = Duration::from_secs(2700);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs vLLM: make engine-test"]
async fn demo_brings_every_version_though_a_server_is_killed() {
    let mut demo = tokio::process::Command::new(weightsync_testkit::dev_program());
    demo.args(["demo", "--output", "json", "--replicas", "2"]);
    match venv() {
        // Its servers inherit its environment.
        Some(venv) => {
            demo.args(["--engine", "vllm", "--python"]).arg(venv.join("bin/python")).envs(processor::environment().iter().copied())
        }
        None => demo.args(["--megabytes", "16"]),
    };
    let demo = demo.stdin(Stdio::null()).kill_on_drop(true).output();
    let done = tokio::time::timeout(WHOLE, demo).await.expect("the demo did not end").unwrap();
    let (reported, complaints) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{reported}\n{complaints}");
    // One object, alone.
    let outcome: Value = serde_json::from_str(&reported).unwrap();
    assert_eq!(outcome["replicas"], 2);
    assert_eq!(outcome["verified"], true);
    let versions = outcome["versions"].as_array().unwrap();
    assert_eq!(versions.iter().map(|version| version["version"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(versions.iter().map(|version| version["installed"].as_array().unwrap().len()).collect::<Vec<_>>(), [2, 1, 2]);
    assert_eq!(outcome["bytes"].as_u64().unwrap(), versions.iter().map(|version| version["bytes"].as_u64().unwrap()).sum::<u64>());
    assert!(outcome["killed"].as_str().unwrap().starts_with("actors/actor-"), "{outcome}");
    // A fence and a group without the victim; another with its successor.
    assert!(outcome["epochs"].as_u64().unwrap() >= versions[0]["epoch"].as_u64().unwrap() + 2, "{outcome}");
    assert!(outcome["detectedMs"].as_u64().unwrap() <= outcome["recoveredMs"].as_u64().unwrap(), "{outcome}");
}
