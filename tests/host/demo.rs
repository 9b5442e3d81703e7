//! `weightsync-dev demo` with many seeds: who is killed, and when, differs each time; what comes out does not.

use std::collections::BTreeSet;
use std::process::{Output, Stdio};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::world::SOON;
use weightsync_testkit::dev_program;

async fn demo(seed: u64, more: &[&str]) -> Output {
    let mut command = Command::new(dev_program());
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

/// The seeds of a short run, which kill each rollout at least once; more with `WEIGHTSYNC_DEMO_SEEDS`.
const FEWEST_SEEDS: u64 = 5;

#[tokio::test(flavor = "multi_thread")]
async fn demo_ends_well_with_every_seed() {
    let most = std::env::var("WEIGHTSYNC_DEMO_SEEDS").map_or(FEWEST_SEEDS, |seeds| seeds.parse().unwrap());
    assert!(most >= FEWEST_SEEDS, "{most} seeds need not kill each rollout");
    let mut killed = BTreeSet::new();
    let seeds: Vec<u64> = (1..=most).collect();
    for two in seeds.chunks(2) {
        let outputs = futures::future::join_all(two.iter().map(|seed| demo(*seed, &[]))).await;
        killed.extend(two.iter().zip(&outputs).map(|(seed, output)| assert_good(*seed, output)));
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

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_runs_with_simulated_fastdeploy_servers() {
    let output = demo(5, &["--engine", "simulated-fastdeploy"]).await;
    assert_good(5, &output);
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_lmdeploy_without_gpus_is_refused_with_lack() {
    let output = demo(6, &["--engine", "simulated-lmdeploy"]).await;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("--gpu"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn interrupted_demo_leaves_no_process_and_no_folder() {
    let mut command = Command::new(dev_program());
    command.args(["demo", "--megabytes", "8"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut demo = command.spawn().unwrap();
    let pid = demo.id().unwrap();
    let mut lines = BufReader::new(demo.stdout.take().unwrap()).lines();
    let started = async { while !lines.next_line().await.unwrap().expect("the demo goes on").starts_with("epoch") {} };
    tokio::time::timeout(SOON, started).await.expect("a group is formed");
    assert!(!processes_of(pid).is_empty(), "agents and engines are known by the demo's name");

    let demo_pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(demo_pid, rustix::process::Signal::INT).unwrap();
    let status = tokio::time::timeout(SOON, demo.wait()).await.expect("the demo ends").unwrap();
    assert_eq!(status.code(), Some(1), "it was not asked to its end");
    assert_eq!(processes_of(pid), Vec::<String>::new());
    for folder in [std::env::temp_dir(), "/dev/shm".into()] {
        assert!(!folder.join(format!("weightsync-demo-{pid}")).exists(), "{}", folder.display());
    }
}

/// Processes other than the demo itself whose command or environment names it.
fn processes_of(demo: u32) -> Vec<String> {
    // An agent's socket, or an engine's checkpoint.
    let marks = [format!("demo-{demo}-"), format!("demo-{demo}/")];
    let names = |text: Vec<u8>| marks.iter().any(|mark| String::from_utf8_lossy(&text).contains(mark));
    let pids = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let named = pids
        .filter(|pid| pid.bytes().all(|byte| byte.is_ascii_digit()) && *pid != demo.to_string())
        .filter(|pid| ["cmdline", "environ"].into_iter().any(|file| std::fs::read(format!("/proc/{pid}/{file}")).is_ok_and(names)));
    named.collect()
}
