//! The server under test and what belongs to it: two checkpoints, its memory, its process as an adapter sees it, and its restarts.
//!
//! Decides how a simulated server is started for each way, and how to find out which version a server serves: a simulated one by the digest
//! of what it holds, a live one by a completion with log-probs.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;

use super::client::Client;
use super::folder::Folder;
use super::memory::Memory;
use super::model::Model;
use super::{ConformanceError, Live, Options, Sources, Way};
use weightsync_core::protocol::{HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_core::weights::safetensors::{Checkpoint, SINGLE_FILE};
use weightsync_core::weights::{DigestAlgorithm, Layout, Manifest};
use weightsync_engine::{
    ApiKey, DeviceJob, DeviceRoute, Engine, EngineConfig, EngineError, InstallError, InstallJob, InstallReport, InstallTerms, connect,
};
use weightsync_testkit::simulator::{Simulator, SimulatorOptions};

/// Bucket of a simulated server's small model, in bytes: several buckets, none of which holds half of it.
const SMALL_BUCKET: u64 = 256;
/// The same for groups, where each call is spoiled in one way more.
const GROUP_BUCKET: u64 = 512;
const LIVE_BUCKET: u64 = 64 << 20;
const KEY: &str = "conformance-key";
/// Connections that wait to be accepted.
const BACKLOG: u32 = 64;

/// Ends the server that runs, if one does.
fn kill(running: &Mutex<Option<Simulator>>) {
    if let Some(simulator) = running.lock().as_ref() {
        simulator.kill();
    }
}

/// A socket at an address that it shares with others that allow it: two of one test harness.
fn bind(address: SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// What is simulated, and where it runs now.
struct Simulated {
    options: SimulatorOptions,
    address: SocketAddr,
    /// Keeps the port between two starts: no other server of this machine is taken for this one.
    _port: TcpSocket,
    running: Arc<Mutex<Option<Simulator>>>,
    /// Time of its start, as its process shows it.
    started: AtomicU64,
    memory: Memory,
}

pub(super) struct Fixture {
    pub(super) engine: String,
    pub(super) patience: Duration,
    pub(super) silence: Duration,
    pub(super) client: Client,
    /// Name of its model in completions; asked for by [`model_name`](Self::model_name) where none was given.
    name: Option<String>,
    pub(super) url: String,
    key: Option<ApiKey>,
    /// The checkpoint that it was started with, and another one.
    versions: Option<(PathBuf, PathBuf)>,
    model: Option<PathBuf>,
    pub(super) destructive: bool,
    gpus: Vec<String>,
    processes: PathBuf,
    record: PathBuf,
    simulated: Option<Simulated>,
    /// Rank 0 of its groups.
    sources: Option<Arc<Sources>>,
    way: Way,
    folder: Folder,
}

impl Fixture {
    pub(super) fn live(options: &Options, live: &Live, way: Way) -> Result<Self, ConformanceError> {
        let folder = Folder::make()?;
        Ok(Self {
            engine: options.engine.clone(),
            patience: options.patience,
            silence: options.silence,
            client: Client::new(&live.url, live.api_key.clone(), options.patience)?,
            name: live.model_name.clone(),
            url: live.url.clone(),
            key: live.api_key.clone(),
            model: live.checkpoints.as_ref().map(|(started, _)| started.clone()),
            versions: live.checkpoints.clone(),
            destructive: live.destructive,
            gpus: live.gpus.clone(),
            processes: "/proc".into(),
            record: folder.0.join("record.json"),
            simulated: None,
            sources: options.sources.as_ref().map(|sources| sources.share()),
            way,
            folder,
        })
    }

    /// A simulator of its own, with a small model.
    pub(super) async fn simulated(of: &Options, way: Way) -> Result<Self, ConformanceError> {
        Self::simulated_with(of, way, &Model::small()).await
    }

    /// A simulator of its own, with this model.
    pub(super) async fn simulated_with(of: &Options, way: Way, model: &Model) -> Result<Self, ConformanceError> {
        let folder = Folder::make()?;
        let at = |name: &str| folder.0.join(name);
        for (seed, name) in [(1, "1"), (2, "2")] {
            model.write(&at(name), seed)?;
        }
        std::fs::create_dir_all(at("model"))?;
        std::fs::create_dir_all(at("memory"))?;
        std::fs::create_dir_all(at("proc/77"))?;
        std::fs::copy(at("1").join("config.json"), at("model").join("config.json"))?;
        let snapshot = of.engine == "fastdeploy" && way == Way::Directory;
        let file = if snapshot { "model_state.tp0.0.pdparams" } else { SINGLE_FILE };
        std::fs::copy(at("1").join(SINGLE_FILE), at("model").join(file))?;
        let gpu = "GPU-fa4e0000-0000-4000-8000-000000000000".to_owned();
        let key = ApiKey::new(KEY)?;
        let mut options = SimulatorOptions::new(&of.engine, at("model"));
        options.api_key = Some(key.text().to_owned());
        options.gpus = vec![gpu.clone()];
        options.gpu_memory = Some(at("memory"));
        if let (Way::Group, Some(sources)) = (way, &of.sources) {
            sources.lend_gpus(&mut options);
        }
        if way == Way::Device("ipc_async") {
            "ipc".clone_into(&mut options.fastdeploy.load_strategy);
            options.fastdeploy.async_ipc = Some(format!("ipc://{}", at("fd").display()));
        }
        let port = bind(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0))?;
        let simulator = Simulator::start(options.clone(), bind(port.local_addr()?)?.listen(BACKLOG)?).await?;
        let (address, url) = (simulator.address(), simulator.url());
        let fixture = Self {
            engine: of.engine.clone(),
            patience: of.patience,
            silence: of.silence,
            client: Client::new(&url, Some(key.clone()), of.patience)?,
            name: Some(options.served_model_name.clone()),
            url,
            key: Some(key),
            versions: Some((at("1"), at("2"))),
            model: Some(at("model")),
            destructive: true,
            gpus: vec![gpu.clone()],
            processes: at("proc"),
            record: at("record.json"),
            simulated: Some(Simulated {
                options,
                address,
                _port: port,
                running: Arc::new(Mutex::new(Some(simulator))),
                started: AtomicU64::new(1000),
                memory: Memory::new(at("memory"), vec![gpu]),
            }),
            sources: of.sources.as_ref().map(|sources| sources.share()),
            way,
            folder,
        };
        fixture.write_process(address.port())?;
        Ok(fixture)
    }

    /// How the simulated server's process looks to an adapter, where the way wants to see it.
    fn write_process(&self, shown: u16) -> Result<(), ConformanceError> {
        let Some(simulated) = &self.simulated else { return Ok(()) };
        let port = shown.to_string();
        let config = simulated
            .options
            .fastdeploy
            .async_ipc
            .as_ref()
            .map(|address| json!({"transfer_mode": "ipc_async", "ipc_address": address}).to_string());
        let words: Vec<&str> = match (self.engine.as_str(), self.way) {
            ("lmdeploy", Way::Device("update_weights")) => vec!["lmdeploy", "serve", "api_server", "model", "--server-port", &port],
            ("fastdeploy", way) => {
                let strategy = if way == Way::Directory { "ipc_snapshot" } else { "ipc" };
                let mut words = vec!["python", "-m", "fastdeploy.entrypoints.openai.api_server", "--port", &port];
                words.extend(["--dynamic-load-weight", "--load_strategy", strategy]);
                words.extend(config.iter().flat_map(|config| ["--rsync_config", config.as_str()]));
                words
            }
            _ => return Ok(()),
        };
        let process = self.processes.join("77");
        std::fs::write(process.join("cmdline"), words.join("\0"))?;
        let started = simulated.started.load(Ordering::Acquire);
        let nothing = ["0"; 18].join(" ");
        std::fs::write(process.join("stat"), format!("77 (engine) S {nothing} {started} 0"))?;
        Ok(())
    }

    /// An adapter for the server at `url`, as a new incarnation of an agent has it.
    pub(super) fn adapter(&self, url: &str) -> Result<Arc<dyn Engine>, ConformanceError> {
        if let Some(port) = url.rsplit(':').next().and_then(|port| port.parse().ok()) {
            self.write_process(port)?;
        }
        Ok(connect(EngineConfig {
            kind: self.engine.clone(),
            url: url.to_owned(),
            api_key: self.key.clone(),
            served_model: self.model.clone(),
            record: Some(self.record.clone()),
            owner: "test".into(),
            processes: self.processes.clone(),
            unproven_routes: false,
        })?)
    }

    /// The name of a part of the suite on the way that this is for.
    pub(super) fn part(&self, part: &str) -> String {
        self.way.part(part)
    }

    pub(super) fn has_versions(&self) -> bool {
        self.versions.is_some()
    }

    #[cfg(test)]
    /// Directories of the version that the server started with, and of another one.
    pub(super) fn checkpoints(&self) -> Option<(PathBuf, PathBuf)> {
        self.versions.clone()
    }

    pub(super) fn is_simulated(&self) -> bool {
        self.simulated.is_some()
    }

    /// What ends the server at once; does nothing to a live one.
    pub(super) fn killer(&self) -> Box<dyn Fn() + Send + Sync> {
        let running = self.simulated.as_ref().map(|simulated| simulated.running.clone());
        Box::new(move || {
            if let Some(running) = &running {
                kill(running);
            }
        })
    }

    /// What ends rank 0 of an update that is under way.
    pub(super) fn source_killer(&self) -> Box<dyn Fn() + Send + Sync> {
        let sources = self.sources.clone();
        Box::new(move || sources.iter().for_each(|sources| sources.kill()))
    }

    /// Ends a simulated server whatever it is at, and starts another in its place; says whether it could.
    pub(super) async fn restart(&self) -> Result<bool, ConformanceError> {
        if let Some(simulated) = &self.simulated {
            kill(&simulated.running);
        }
        self.revive().await
    }

    /// Whether it receives in a group of its own workers, in which it can get stuck.
    pub(super) fn joins(&self) -> bool {
        self.way == Way::Group
    }

    /// Starts a server that was killed or ended by itself; says whether it was gone.
    pub(super) async fn revive(&self) -> Result<bool, ConformanceError> {
        let Some(simulated) = &self.simulated else { return Ok(false) };
        let over = simulated.running.lock().take_if(|running| running.is_over());
        let Some(over) = over else { return Ok(false) };
        over.stop().await;
        let listener = bind(simulated.address)?.listen(BACKLOG)?;
        let started = Simulator::start(simulated.options.clone(), listener).await?;
        *simulated.running.lock() = Some(started);
        simulated.started.fetch_add(1, Ordering::AcqRel);
        Ok(true)
    }

    /// Identifies the weights: equal texts are equal weights.
    pub(super) async fn serves(&self) -> Result<String, String> {
        if self.simulated.is_some() {
            let digest = self.client.call("GET /simulator/digest", None, false).await?;
            return Ok(digest.json().get("digest").and_then(Value::as_str).unwrap_or_default().to_owned());
        }
        let body =
            json!({"model": self.model_name().await?, "prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0, "logprobs": 1});
        let reply = self.client.call("POST /v1/completions", Some(&body), true).await?;
        let answer = reply.json();
        let choice = answer.pointer("/choices/0").cloned().unwrap_or_default();
        let probabilities = choice.pointer("/logprobs/token_logprobs").cloned().unwrap_or_default();
        match choice.get("text") {
            Some(text) if reply.status == 200 => Ok(json!([text, probabilities]).to_string()),
            _ => Err(format!("a completion was answered with {}: {}", reply.status, reply.shown())),
        }
    }

    /// What a server serves that never held anything but this version; only simulators are started for that.
    pub(super) async fn reference(&self, version: u64) -> Result<Option<String>, ConformanceError> {
        let (Some(simulated), Some(directory)) = (&self.simulated, self.directory(version)) else { return Ok(None) };
        let mut options = simulated.options.clone();
        options.model = directory;
        // The strategy of a server that starts with the checkpoint that it is given.
        "ipc".clone_into(&mut options.fastdeploy.load_strategy);
        let fresh = Simulator::start(options, TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?).await?;
        let client = Client::new(&fresh.url(), None, self.patience)?;
        let digest = client.call("GET /simulator/digest", None, false).await.map_err(ConformanceError::Client)?;
        Ok(digest.json().get("digest").and_then(Value::as_str).map(str::to_owned))
    }

    pub(super) async fn model_name(&self) -> Result<String, String> {
        if let Some(name) = &self.name {
            return Ok(name.clone());
        }
        let path = if self.engine == "sglang" { "GET /model_info" } else { "GET /v1/models" };
        let answer = self.client.call(path, None, true).await?.json();
        let name = answer.pointer("/data/0/id").or_else(|| answer.get("served_model_name")).and_then(Value::as_str);
        name.map(str::to_owned).ok_or_else(|| "the server names no model".to_owned())
    }

    fn directory(&self, version: u64) -> Option<PathBuf> {
        let (first, second) = self.versions.as_ref()?;
        Some(if version == 1 { first.clone() } else { second.clone() })
    }

    /// A policy that the engine accepts.
    fn policy(engine: &dyn Engine) -> (PausePolicy, KvCachePolicy) {
        let pauses = [PausePolicy::Keep, PausePolicy::AbortAwake];
        let pause = pauses.into_iter().find(|pause| engine.accepts(*pause, KvCachePolicy::Reset).is_ok());
        (pause.unwrap_or(PausePolicy::Abort), KvCachePolicy::Reset)
    }

    /// The way from GPU memory that the server has now.
    pub(super) async fn route(&self, engine: &dyn Engine) -> Result<DeviceRoute, EngineError> {
        let (pause, kv_cache) = Self::policy(engine);
        engine.device_route(pause, kv_cache, self.patience).await
    }

    /// Installs a version: 1 is what it was started with.
    pub(super) async fn install(&self, engine: &dyn Engine, version: u64, within: Duration) -> Result<InstallReport, InstallError> {
        let refuse = |what: String| {
            let next_step = "give the suite two checkpoints of one model".into();
            InstallError::before_start(EngineError::Unsupported { what, next_step })
        };
        let directory = self.directory(version).ok_or_else(|| refuse("there is no checkpoint to install".into()))?;
        let checkpoint = Checkpoint::open(&directory).map_err(|error| refuse(error.to_string()))?;
        let bucket = match (&self.simulated, self.way) {
            (None, _) => LIVE_BUCKET,
            (Some(_), Way::Group) => GROUP_BUCKET,
            (Some(_), _) => SMALL_BUCKET,
        };
        let layout = Layout::new("model", checkpoint.specs(), bucket).map_err(|error| refuse(error.to_string()))?.cut_between_tensors();
        let held = held(version, &layout);
        let (pause, kv_cache) = Self::policy(engine);
        let directory_way = match self.way {
            Way::Directory => true,
            Way::Device(_) | Way::Group => false,
            Way::Any => engine.takes_directories().is_ok(),
        };
        let cancel = CancellationToken::new();
        if directory_way {
            let local_directory = directory.clone();
            let terms = InstallTerms { version: held, pause, kv_cache, canary: None, timeout: within, cancel };
            let job = InstallJob { terms, directory, local_directory };
            return engine.install(&job).await;
        }
        let sockets = self.folder.0.join("s");
        let job = DeviceJob {
            terms: InstallTerms { version: InstallTerms::mark(version, None), pause, kv_cache, canary: None, timeout: within, cancel },
            layout: Arc::new(layout),
            silence: within,
            sockets_in_engine: sockets.clone(),
            sockets,
        };
        if let (Way::Group, Some(sources)) = (self.way, &self.sources) {
            let address = super::source::toward(&self.url).await.map_err(|error| refuse(error.to_string()))?;
            return sources.update(engine, &job, held, &checkpoint, address).await;
        }
        let Some(simulated) = &self.simulated else {
            return super::install::from_gpus(engine, job, held, checkpoint, &self.gpus).await;
        };
        let install = engine.begin_device(&job).await?;
        simulated.memory.feed(install, &job.layout, &checkpoint, held).await
    }
}

/// The version's number with a digest that follows from what it is made of.
pub(super) fn held(version: u64, layout: &Layout) -> HeldVersion {
    let digests: Vec<u128> = layout.tensors().map(|_| u128::from(version)).collect();
    let manifest = Manifest::new(version, layout.clone(), DigestAlgorithm::Xxh3_128, &digests);
    let manifest = manifest.map_or_else(|_| "0".repeat(64), |manifest| manifest.digest());
    HeldVersion { version, manifest }
}
