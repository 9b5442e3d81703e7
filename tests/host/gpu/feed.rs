//! `weightsync-dev feed` on the stand-in: a checkpoint goes through a worker's ring into simulated engines, which read what really lies there.

use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::fixture::{Machine, uuid};
use crate::model::Model;
use crate::world::SOON;
use weightsync_testkit::dev_program;

/// A simulated engine on one or more GPUs of a machine.
struct Engine {
    kind: &'static str,
    url: String,
    model: PathBuf,
    _folder: TempDir,
    _child: Child,
}

impl Engine {
    /// `name` is the first word of its command line: where it is `api_server`, its process is taken for LMDeploy's.
    async fn start(machine: &Machine, kind: &'static str, name: &str, ranks: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = Model::large(1).save(&folder.path().join("1"));
        let config = json!({"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"});
        std::fs::write(model.join("config.json"), config.to_string()).unwrap();
        Model::large(2).save(&folder.path().join("2"));
        Model::large(3).save(&folder.path().join("3"));
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new(dev_program());
        command.as_std_mut().arg0(name);
        command.args([
            "simulate-engine",
            "--engine",
            kind,
            "--server-port",
            &port.to_string(),
            "--world-size",
            &ranks.to_string(),
            "--model",
        ]);
        command.arg(&model).envs(machine.environment()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        for rank in 0..ranks {
            command.args(["--gpu", &uuid(rank)]);
        }
        let engine = Self { kind, url: format!("http://127.0.0.1:{port}"), model, _child: command.spawn().unwrap(), _folder: folder };
        let up = async {
            while reqwest::get(format!("{}/simulator/digest", engine.url)).await.is_err() {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(SOON, up).await.expect("the simulator starts");
        engine
    }

    fn checkpoint(&self, version: u64) -> PathBuf {
        self.model.parent().unwrap().join(version.to_string())
    }

    /// Digests of all tensors that it serves.
    async fn serves(&self) -> Value {
        let answer: Value = reqwest::get(format!("{}/simulator/digest", self.url)).await.unwrap().json().await.unwrap();
        answer["tensors"].clone()
    }

    async fn fault(&self, faults: Value) {
        let reported = reqwest::Client::new().post(format!("{}/simulator/faults", self.url)).json(&faults).send().await.unwrap();
        assert!(reported.status().is_success());
    }

    async fn feed(&self, machine: &Machine, checkpoint: &Path, more: &[&str]) -> Output {
        let mut command = Command::new(dev_program());
        command.arg("feed").arg(checkpoint).args(["--engine", self.kind, "--url", &self.url, "--bucket-mib", "1", "--slots", "2"]);
        command.args(["--output", "json", "--timeout", "30", "--model"]).arg(&self.model).args(more);
        command.envs(machine.environment()).stdin(Stdio::null()).kill_on_drop(true);
        tokio::time::timeout(SOON, command.output()).await.expect("it ends").unwrap()
    }
}

fn lines(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_engine_serves_what_was_handed_over_on_its_gpu() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    for (kind, name, ranks, route) in [
        ("lmdeploy", "api_server", 1, "update_weights"),
        ("lmdeploy", "simulator", 2, "checkpoint-engine"),
        ("vllm", "simulator", 1, "checkpoint-engine"),
        ("sglang", "simulator", 1, "checkpoint-engine"),
    ] {
        let machine = Machine::new();
        let engine = Engine::start(&machine, kind, name, ranks).await;
        // vLLM and SGLang do not name their GPUs.
        let gpu = uuid(0);
        let gpus: &[&str] = if kind == "lmdeploy" { &["--pause", "abort-awake"] } else { &["--gpu", &gpu] };
        for (version, more) in [(2, &["--repeat", "2"][..]), (3, &["--preload", "--version", "8"])] {
            let output = engine.feed(&machine, &engine.checkpoint(version), &[gpus, more].concat()).await;
            let reported = lines(&output);
            assert_eq!(reported[0]["route"], route, "{kind}: {}", reported[0]);
            assert_eq!(reported[0]["buckets"], 8, "{}", reported[0]);
            assert_eq!(engine.serves().await, Model::large(version).digests(), "{kind}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_that_fails_midway_fails_the_command_with_cause() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let machine = Machine::new();
    let engine = Engine::start(&machine, "lmdeploy", "simulator", 1).await;
    engine.fault(json!({"load": "failHalfwayOnce"})).await;
    let output = engine.feed(&machine, &engine.checkpoint(2), &[]).await;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("out of memory"), "{said}");
    lines(&engine.feed(&machine, &engine.checkpoint(3), &[]).await);
    assert_eq!(engine.serves().await, Model::large(3).digests());
}
