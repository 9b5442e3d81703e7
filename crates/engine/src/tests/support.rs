//! Checkpoints, simulators and jobs for the tests of this crate.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{ApiKey, Engine, EngineConfig, InstallJob, InstallTerms, connect};
use weightsync_core::protocol::{HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_testkit::simulator::{Faults, Simulator, SimulatorOptions};
pub(crate) use weightsync_testkit::support::{SOON, TENSORS, client, ended_by, get, post, until, write_checkpoint};

/// A deadline that no test reaches: what ends within [`SOON`] did not wait for it.
pub(crate) const HOUR: Duration = Duration::from_secs(3600);

/// The snapshot of a FastDeploy server's only rank.
pub(crate) const SNAPSHOT: &str = "model_state.tp0.0.pdparams";

/// A simulator with the checkpoint of version 1, an adapter for it, and the checkpoints of more versions.
pub(crate) struct Bench {
    pub(crate) folder: TempDir,
    pub(crate) simulator: Simulator,
    pub(crate) engine: Arc<dyn Engine>,
    kind: &'static str,
}

impl Bench {
    pub(crate) async fn start(kind: &'static str) -> Self {
        Self::start_with(kind, Faults::default(), |_| {}).await
    }

    pub(crate) async fn start_with(kind: &'static str, faults: Faults, more: impl FnOnce(&mut SimulatorOptions)) -> Self {
        let folder = TempDir::new().unwrap();
        for seed in 1..=3 {
            write_checkpoint(&folder.path().join(seed.to_string()), &TENSORS, seed);
        }
        if kind == "fastdeploy" {
            std::fs::hard_link(folder.path().join("1/model.safetensors"), folder.path().join("1").join(SNAPSHOT)).unwrap();
        }
        let mut options = SimulatorOptions::new(kind, folder.path().join("1"));
        options.faults = faults;
        more(&mut options);
        let api_key = options.api_key.as_deref().map(|key| ApiKey::new(key).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let simulator = Simulator::start(options, listener).await.unwrap();
        let engine = adapter(kind, &simulator.url(), api_key, Some(folder.path().join("1")));
        Self { folder, simulator, engine, kind }
    }

    /// The same simulator, recreated on the same port, as after a crash.
    pub(crate) async fn restart(&mut self) {
        let address = self.simulator.address();
        let options = SimulatorOptions::new(self.kind, self.directory(1));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let spare = Simulator::start(options.clone(), listener).await.unwrap();
        std::mem::replace(&mut self.simulator, spare).stop().await;
        self.simulator = Simulator::start(options, TcpListener::bind(address).await.unwrap()).await.unwrap();
    }

    pub(crate) fn directory(&self, version: u64) -> PathBuf {
        self.folder.path().join(version.to_string())
    }

    pub(crate) fn kind(&self) -> &'static str {
        self.kind
    }

    pub(crate) fn job_with(&self, version: u64, pause: PausePolicy) -> InstallJob {
        let mut job = self.job(version);
        job.terms.pause = pause;
        job
    }

    pub(crate) fn job(&self, version: u64) -> InstallJob {
        job_of(&self.directory(version), version)
    }

    pub(crate) async fn digest(&self) -> String {
        self.get("/simulator/digest").await["digest"].as_str().unwrap().to_owned()
    }

    /// Digest of a fresh simulator that was started with the checkpoint of that version.
    pub(crate) async fn fresh_digest(&self, version: u64) -> String {
        self.fresh(version).await["digest"].as_str().unwrap().to_owned()
    }

    /// Its whole report about what it serves.
    pub(crate) async fn fresh(&self, version: u64) -> Value {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut options = SimulatorOptions::new(self.kind, self.directory(version));
        // The strategy that starts with a checkpoint.
        "ipc".clone_into(&mut options.fastdeploy.load_strategy);
        let fresh = Simulator::start(options, listener).await.unwrap();
        get(&format!("{}/simulator/digest", fresh.url())).await
    }

    pub(crate) async fn set_faults(&self, faults: Faults) {
        let url = format!("{}/simulator/faults", self.simulator.url());
        let (status, body) = post(&url, &serde_json::to_value(faults).unwrap()).await;
        assert_eq!(status, 200, "{body}");
    }

    /// Calls that the simulator got, without their queries.
    pub(crate) async fn calls(&self) -> Vec<String> {
        let calls = self.get("/simulator/calls").await;
        calls.as_array().unwrap().iter().map(|call| call.as_str().unwrap().split('?').next().unwrap().to_owned()).collect()
    }

    pub(crate) async fn get(&self, path: &str) -> Value {
        get(&format!("{}{path}", self.simulator.url())).await
    }

    pub(crate) async fn is_paused(&self) -> bool {
        if self.kind == "fastdeploy" {
            return self.get("/v1/is_paused").await["result"]["is_paused"] == json!(true);
        }
        let path = if self.kind == "sglang" { "/ready" } else { "/is_sleeping" };
        let url = format!("{}{path}", self.simulator.url());
        let reply = client().get(url).send().await.unwrap();
        if self.kind == "sglang" { reply.status() == 503 } else { reply.json::<Value>().await.unwrap()["is_sleeping"] == json!(true) }
    }

    pub(crate) async fn complete(&self, prompt: &str, tokens: usize) -> Value {
        let url = format!("{}/v1/completions", self.simulator.url());
        let body = json!({"model": "model", "prompt": prompt, "max_tokens": tokens, "logprobs": 1});
        let (status, answer) = post(&url, &body).await;
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0].clone()
    }
}

pub(crate) fn adapter(kind: &str, url: &str, api_key: Option<ApiKey>, served_model: Option<PathBuf>) -> Arc<dyn Engine> {
    connect(EngineConfig { api_key, served_model, ..config(kind, url) }).unwrap()
}

pub(crate) fn recorded(kind: &str, url: &str, record: PathBuf) -> Arc<dyn Engine> {
    connect(EngineConfig { record: Some(record), ..config(kind, url) }).unwrap()
}

fn config(kind: &str, url: &str) -> EngineConfig {
    EngineConfig {
        kind: kind.to_owned(),
        url: url.to_owned(),
        api_key: None,
        served_model: None,
        record: None,
        owner: "test".into(),
        processes: "/proc".into(),
        unproven_routes: false,
    }
}

/// An install of a version that lies in that directory.
pub(crate) fn job_of(directory: &Path, version: u64) -> InstallJob {
    InstallJob {
        terms: InstallTerms {
            version: held(version),
            pause: PausePolicy::Keep,
            kv_cache: KvCachePolicy::Reset,
            canary: None,
            timeout: SOON,
            cancel: CancellationToken::new(),
        },
        directory: directory.to_owned(),
        local_directory: directory.to_owned(),
    }
}

/// A version with a digest that follows from its number.
pub(crate) fn held(version: u64) -> HeldVersion {
    HeldVersion { version, manifest: blake3::hash(&version.to_le_bytes()).to_hex().to_string() }
}
