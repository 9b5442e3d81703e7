//! `weightsync conformance` as its users run it: the table, the JSON object, and the exit code.

use std::process::Stdio;

use serde_json::Value;
use tokio::process::Command;

use crate::world::{PROGRAM, SOON};

/// Exit code and standard output.
async fn conformance(words: &[&str]) -> (i32, String) {
    let mut command = Command::new(PROGRAM);
    command.arg("conformance").args(words).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(4 * SOON, command.output()).await.expect("the suite ends").unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
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
async fn a_suite_that_fails_shows_what_was_expected_and_what_came_and_exits_with_1() {
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
