//! The quick start as the documentation has it: the `WeightSync` of a cluster, run by `weightsync local`.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::model::Model;
use crate::world::{PROGRAM, SOON};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/examples/quickstart");

/// Copies the example's files unchanged. Logs of the group go next to them.
fn copied(to: &Path) -> [PathBuf; 2] {
    let folders = [to.join("quickstart"), to.join("quickstart/local")];
    for (name, folder) in ["", "local"].iter().zip(&folders) {
        std::fs::create_dir_all(folder).unwrap();
        for entry in std::fs::read_dir(Path::new(EXAMPLE).join(name)).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_file() {
                std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
            }
        }
    }
    folders
}

/// A program called `vllm` that simulates the server with the options of `vllm serve`.
fn simulated_vllm(folder: &Path) {
    Model::small(0).save(&folder.join("start"));
    let (dev, start) = (weightsync_testkit::dev_program().display().to_string(), folder.join("start").display().to_string());
    let script = format!("#!/bin/sh\nexec {dev} simulate-engine --engine vllm --model {start} \"$3\" \"$4\"\n");
    std::fs::write(folder.join("vllm"), script).unwrap();
    std::fs::set_permissions(folder.join("vllm"), PermissionsExt::from_mode(0o755)).unwrap();
}

/// Ports 8000 and 8001 of the example are those of a network namespace that the test makes.
#[tokio::test(flavor = "multi_thread")]
async fn quickstart_runs_unchanged_on_one_host() {
    let folder = tempfile::tempdir().unwrap();
    simulated_vllm(folder.path());
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", "ip link set lo up && exec \"$0\" \"$@\"", PROGRAM, "local", "--output", "json"]);
    for files in copied(folder.path()) {
        command.arg("--filename").arg(files);
    }
    let mut local = command.env("PATH", path).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut lines = BufReader::new(local.stdout.take().unwrap()).lines();
    let mut event = async |what: &str, is: &dyn Fn(&Value) -> bool| loop {
        let line = tokio::time::timeout(SOON, lines.next_line()).await.unwrap_or_else(|_| panic!("waited for {what}")).unwrap();
        let event: Value = serde_json::from_str(&line.unwrap_or_else(|| panic!("ended before {what}"))).unwrap();
        if is(&event) {
            return event;
        }
    };
    let started = event("the start", &|event| event["event"] == "started").await;
    assert_eq!(started["socket"], "@weightsync/grpo-trainer");
    event("a group of both", &|event| {
        event["reason"] == "GroupFormed" && event["message"].as_str().is_some_and(|text| text.contains("world size 3"))
    })
    .await;
    let checkpoint = Model::small(1).save(&folder.path().join("one"));
    let mut publish = Command::new("nsenter");
    publish.args(["--net", "--target", &local.id().unwrap().to_string(), PROGRAM, "publish"]).arg(checkpoint);
    publish.args(["--version", "1", "--output", "json", "--socket", "@weightsync/grpo-trainer"]).kill_on_drop(true);
    let output = tokio::time::timeout(SOON, publish.output()).await.expect("a publish ends").unwrap();
    let result: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(result["installed"], serde_json::json!(["actors/actor-0", "actors/actor-1"]), "{result}");
    let pid = rustix::process::Pid::from_raw(i32::try_from(local.id().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let ended = tokio::time::timeout(SOON, local.wait()).await.expect("it ends").unwrap();
    assert!(ended.success(), "{ended}");
}
