//! Checkpoints, simulators and jobs for the tests of this room.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::engine::simulator::{Faults, Simulator, SimulatorOptions};
use crate::engine::{ApiKey, Engine, EngineConfig, InstallJob, connect};
use crate::protocol::{HeldVersion, KvCachePolicy, PausePolicy};

/// Long enough for any call that works.
pub(in crate::engine) const SOON: Duration = Duration::from_secs(10);

/// Names and shapes of the model that the tests serve.
pub(in crate::engine) const TENSORS: [(&str, &[u64]); 4] =
    [("embed.weight", &[8, 4]), ("layer.q.weight", &[4, 4]), ("layer.k.weight", &[4, 4]), ("norm.weight", &[4])];

/// The snapshot of a FastDeploy server's only rank.
pub(in crate::engine) const SNAPSHOT: &str = "model_state.tp0.0.pdparams";

/// Writes a checkpoint of F32 tensors whose values follow from the seed.
pub(in crate::engine) fn write_checkpoint(directory: &Path, tensors: &[(&str, &[u64])], seed: u8) {
    std::fs::create_dir_all(directory).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (index, (name, shape)) in tensors.iter().enumerate() {
        let begin = data.len();
        let elements = shape.iter().product::<u64>();
        let value = f32::from(seed) + f32::from(u8::try_from(index).unwrap());
        data.extend((0..elements).flat_map(|_| value.to_le_bytes()));
        header.insert((*name).to_owned(), json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    std::fs::write(directory.join("model.safetensors"), file).unwrap();
}

/// A simulator with the checkpoint of version 1, an adapter for it, and the checkpoints of more versions.
pub(in crate::engine) struct Bench {
    pub(in crate::engine) folder: TempDir,
    pub(in crate::engine) simulator: Simulator,
    pub(in crate::engine) engine: Arc<dyn Engine>,
    kind: &'static str,
}

impl Bench {
    pub(in crate::engine) async fn start(kind: &'static str) -> Self {
        Self::start_with(kind, Faults::default(), |_| {}).await
    }

    pub(in crate::engine) async fn start_with(kind: &'static str, faults: Faults, more: impl FnOnce(&mut SimulatorOptions)) -> Self {
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
        let api_key = options.api_key.clone();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let simulator = Simulator::start(options, listener).await.unwrap();
        let engine = adapter(kind, &simulator.url(), api_key, Some(folder.path().join("1")));
        Self { folder, simulator, engine, kind }
    }

    /// The same simulator made anew on the same port, as after a crash.
    pub(in crate::engine) async fn restart(&mut self) {
        let address = self.simulator.address();
        let options = SimulatorOptions::new(self.kind, self.directory(1));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let spare = Simulator::start(options.clone(), listener).await.unwrap();
        std::mem::replace(&mut self.simulator, spare).stop().await;
        self.simulator = Simulator::start(options, TcpListener::bind(address).await.unwrap()).await.unwrap();
    }

    /// Where the checkpoint of a version lies.
    pub(in crate::engine) fn directory(&self, version: u64) -> PathBuf {
        self.folder.path().join(version.to_string())
    }

    /// `vllm` and the like.
    pub(in crate::engine) fn kind(&self) -> &'static str {
        self.kind
    }

    /// A job for one of the versions under another policy.
    pub(in crate::engine) fn job_with(&self, version: u64, pause: PausePolicy) -> InstallJob {
        InstallJob { pause, ..self.job(version) }
    }

    /// A job for one of the versions.
    pub(in crate::engine) fn job(&self, version: u64) -> InstallJob {
        InstallJob {
            version: held(version),
            directory: self.directory(version),
            local_directory: self.directory(version),
            pause: PausePolicy::Keep,
            kv_cache: KvCachePolicy::Reset,
            canary: None,
            timeout: SOON,
            cancel: CancellationToken::new(),
        }
    }

    /// Digest of what the simulator serves.
    pub(in crate::engine) async fn digest(&self) -> String {
        self.get("/simulator/digest").await["digest"].as_str().unwrap().to_owned()
    }

    /// Digest of what a fresh simulator serves that was started with the checkpoint of that version.
    pub(in crate::engine) async fn fresh_digest(&self, version: u64) -> String {
        self.fresh(version).await["digest"].as_str().unwrap().to_owned()
    }

    /// All that it tells of what it serves.
    pub(in crate::engine) async fn fresh(&self, version: u64) -> Value {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut options = SimulatorOptions::new(self.kind, self.directory(version));
        // The one that starts with a checkpoint.
        "ipc".clone_into(&mut options.fastdeploy.load_strategy);
        let fresh = Simulator::start(options, listener).await.unwrap();
        get(&format!("{}/simulator/digest", fresh.url())).await
    }

    pub(in crate::engine) async fn set_faults(&self, faults: Faults) {
        let url = format!("{}/simulator/faults", self.simulator.url());
        let (status, body) = post(&url, &serde_json::to_value(faults).unwrap()).await;
        assert_eq!(status, 200, "{body}");
    }

    /// Calls that the simulator got, without their queries.
    pub(in crate::engine) async fn calls(&self) -> Vec<String> {
        let calls = self.get("/simulator/calls").await;
        calls.as_array().unwrap().iter().map(|call| call.as_str().unwrap().split('?').next().unwrap().to_owned()).collect()
    }

    pub(in crate::engine) async fn get(&self, path: &str) -> Value {
        get(&format!("{}{path}", self.simulator.url())).await
    }

    pub(in crate::engine) async fn is_paused(&self) -> bool {
        if self.kind == "fastdeploy" {
            return self.get("/v1/is_paused").await["result"]["is_paused"] == json!(true);
        }
        let path = if self.kind == "sglang" { "/ready" } else { "/is_sleeping" };
        let url = format!("{}{path}", self.simulator.url());
        let reply = client().get(url).send().await.unwrap();
        if self.kind == "sglang" { reply.status() == 503 } else { reply.json::<Value>().await.unwrap()["is_sleeping"] == json!(true) }
    }

    /// Text and log-probs for a prompt.
    pub(in crate::engine) async fn complete(&self, prompt: &str, tokens: usize) -> Value {
        let url = format!("{}/v1/completions", self.simulator.url());
        let body = json!({"model": "model", "prompt": prompt, "max_tokens": tokens, "logprobs": 1});
        let (status, answer) = post(&url, &body).await;
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0].clone()
    }
}

/// The adapter of a kind.
pub(in crate::engine) fn adapter(kind: &str, url: &str, api_key: Option<ApiKey>, served_model: Option<PathBuf>) -> Arc<dyn Engine> {
    connect(EngineConfig { api_key, served_model, ..config(kind, url) }).unwrap()
}

/// The adapter of a kind, with a record in this file.
pub(in crate::engine) fn recorded(kind: &str, url: &str, record: PathBuf) -> Arc<dyn Engine> {
    connect(EngineConfig { record: Some(record), ..config(kind, url) }).unwrap()
}

fn config(kind: &str, url: &str) -> EngineConfig {
    EngineConfig {
        kind: kind.to_owned(),
        url: url.to_owned(),
        api_key: None,
        served_model: None,
        record: None,
        processes: "/proc".into(),
        unproven_routes: false,
    }
}

/// A version with a digest that follows from its number.
pub(in crate::engine) fn held(version: u64) -> HeldVersion {
    HeldVersion { version, manifest: blake3::hash(&version.to_le_bytes()).to_hex().to_string() }
}

/// A plain client of its own: what tests look at must not go through the code under test.
pub(in crate::engine) fn client() -> reqwest::Client {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let tls = tls.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth();
    reqwest::Client::builder().no_proxy().use_preconfigured_tls(tls).timeout(SOON).build().unwrap()
}

async fn get(url: &str) -> Value {
    client().get(url).send().await.unwrap().json().await.unwrap()
}

/// Status and JSON of a POST.
pub(in crate::engine) async fn post(url: &str, body: &Value) -> (u16, Value) {
    let reply = client().post(url).json(body).send().await.unwrap();
    (reply.status().as_u16(), reply.json().await.unwrap_or_default())
}

/// Waits for a condition; tests never sleep for a guess.
pub(in crate::engine) async fn until<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let waiting = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, waiting).await.unwrap_or_else(|_| panic!("{what} did not happen"));
}
