//! `weightsync-dev conformance` as its users run it: the table, the JSON object, and the exit code.

use std::collections::BTreeMap;
use std::process::Stdio;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::gpu::fixture::{Machine, uuid};
use crate::model::Model;
use crate::world::SOON;
use weightsync_testkit::dev_program;

/// Exit code and standard output.
async fn conformance(words: &[&str]) -> (i32, String) {
    conformance_on(None, words).await
}

async fn conformance_on(machine: Option<&Machine>, words: &[&str]) -> (i32, String) {
    let mut command = Command::new(dev_program());
    command.arg("conformance").args(words).stdin(Stdio::null()).kill_on_drop(true);
    command.envs(machine.map(Machine::environment).unwrap_or_default());
    let output = tokio::time::timeout(15 * SOON, command.output()).await.expect("the suite ends").unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

/// How many rows of a part passed, none of which failed; the steps of those of its `negative` part.
fn passed(code: i32, printed: &str) -> (BTreeMap<String, usize>, Vec<String>) {
    let report: Value = serde_json::from_str(printed).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let failed: Vec<_> = rows.iter().filter(|row| row["outcome"] == "failed").collect();
    assert!(code == 0 && failed.is_empty(), "{failed:#?}");
    assert_eq!(report["passed"].as_u64().unwrap() + report["skipped"].as_u64().unwrap(), rows.len() as u64);
    let mut counts = BTreeMap::new();
    for row in rows.iter().filter(|row| row["outcome"] == "passed") {
        *counts.entry(row["part"].as_str().unwrap().to_owned()).or_insert(0) += 1;
    }
    let negative = rows.iter().filter(|row| row["part"] == "negative, group");
    (counts, negative.map(|row| row["step"].as_str().unwrap().to_owned()).collect())
}

/// The steps of an update by a group, each spoiled in every way.
async fn joins_in_every_way(engine: &str, calls: &[&str]) {
    let machine = Machine::new();
    let words = ["--engine", engine, "--simulator", "--only", "group", "--silence", "3", "--output", "json"];
    let (code, printed) = conformance_on(Some(&machine), &words).await;
    let (counts, spoiled) = passed(code, &printed);
    assert!(counts["update, group"] >= 10 && counts["negative, group"] >= 50, "{counts:?}");
    let ways = ["the server is killed", "503 instead of", "200 with an error inside", "nothing done for", "but done for"];
    let of_source = (engine != "lmdeploy").then_some("rank 0 is killed");
    for call in calls {
        for way in ways.into_iter().chain(of_source) {
            assert!(spoiled.iter().any(|step| step.contains(call) && step.contains(way)), "{way} {call}: {spoiled:#?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_sglang_groups_survive_every_spoiled_call() {
    let update = ["/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"];
    joins_in_every_way("sglang", &[&["/init_weights_update_group", "/destroy_weights_update_group"], &update[..]].concat()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_lmdeploy_groups_survive_every_spoiled_call() {
    let calls = ["/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"];
    joins_in_every_way("lmdeploy", &calls).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_vllm_groups_survive_every_spoiled_call() {
    let group = ["/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"];
    let update = ["/start_weight_update", "/update_weights", "/finish_weight_update"];
    joins_in_every_way("vllm", &[&group[..], &update[..]].concat()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn live_server_passes_group_rows_with_a_local_gpu() {
    let (machine, folder) = (Machine::new(), tempfile::tempdir().unwrap());
    let [one, two] = [1, 2].map(|version| Model::small(version).save(&folder.path().join(version.to_string())));
    let mut server = Command::new(dev_program());
    server.args(["simulate-engine", "--engine", "sglang", "--world-size", "2", "--gpu", &uuid(1), "--gpu", &uuid(2), "--model"]);
    server.arg(&one).envs(machine.environment()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut server = server.spawn().unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    let url = tokio::time::timeout(SOON, lines.next_line()).await.unwrap().unwrap().unwrap();
    let (one, two, gpu) = (one.to_str().unwrap(), two.to_str().unwrap(), uuid(0));
    let live = ["--engine", "sglang", "--url", &url, "--destructive", "--model", one, "--other", two, "--source-gpu", &gpu];
    let more = ["--only", "group", "--silence", "2", "--output", "json"];
    let (code, printed) = conformance_on(Some(&machine), &[&live[..], &more[..]].concat()).await;
    let (counts, _) = passed(code, &printed);
    assert!(counts["update, group"] >= 10 && counts["negative, group"] >= 30, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_without_a_gpu_are_skipped_with_the_reason() {
    let (code, printed) = conformance(&["--engine", "sglang", "--simulator", "--only", "group", "--output", "json"]).await;
    assert_eq!(code, 1, "nothing was tried");
    assert!(printed.contains("FAKEGPU_DIR"), "{printed}");
    let machine = Machine::new();
    let wrong = ["--engine", "sglang", "--url", "http://127.0.0.1:9", "--source-gpu", "GPU-of-another-machine"];
    assert_eq!(conformance_on(Some(&machine), &wrong).await.0, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suite_that_passes_prints_every_step_and_exits_with_0() {
    let (code, printed) = conformance(&["--engine", "fastdeploy", "--simulator", "--silence", "1", "--output", "json"]).await;
    let report: Value = serde_json::from_str(&printed).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let failed: Vec<_> = rows.iter().filter(|row| row["outcome"] == "failed").collect();
    assert!(code == 0 && failed.is_empty(), "{failed:#?}");
    assert_eq!(report["passed"].as_u64().unwrap() + report["skipped"].as_u64().unwrap(), rows.len() as u64);
    for part in ["script", "update, directory", "update, ipc_async", "negative, directory", "negative, ipc_async"] {
        assert!(rows.iter().any(|row| row["part"] == part && row["outcome"] == "passed"), "{part}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_suite_shows_expected_and_actual_and_exits_1() {
    let (code, printed) = conformance(&["--engine", "sglang", "--url", "http://127.0.0.1:9", "--timeout", "5"]).await;
    assert_eq!(code, 1, "{printed}");
    assert!(printed.lines().any(|line| line.starts_with("FAILED") && line.contains("script")), "{printed}");
    assert!(printed.lines().next().unwrap().contains("EXPECTED") && printed.contains("sglang: 0 passed"), "{printed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_words_are_wrong_usage() {
    for words in [&["--engine", "trt", "--simulator"][..], &["--engine", "vllm"], &["--engine", "vllm", "--simulator", "--destructive"]] {
        assert_eq!(conformance(words).await.0, 2, "{words:?}");
    }
}
