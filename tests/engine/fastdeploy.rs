//! FastDeploy's own `DynamicWeightManager`, and the simulator of it, read what the adapter wrote.
//!
//! `WEIGHTSYNC_FASTDEPLOY` names the folder of tests/tools/fastdeploy.sh (`make upstream-fastdeploy` sets it): upstream's file, unmodified, on Paddle's
//! CPU build, with a front of our own that has the server's routes (fastdeploy.py). The weights are read, loaded and verified by upstream's
//! code; only the HTTP front and the model are made here.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use weightsync_agent::hand_over::{MemoryFeed, feed_memory};
use weightsync_core::protocol::{HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_core::weights::Layout;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_engine::{Engine, EngineConfig, Holding, HostBucket, HostJob, HostMemory, HostTensor, InstallJob, InstallTerms, connect};
use weightsync_testkit::simulator::{Simulator, SimulatorOptions};
use weightsync_testkit::support::{get, post};

/// Paddle starts in 5 s on an idle machine.
const SOON: Duration = Duration::from_secs(120);

/// Names, element types in a file and in Paddle, bytes of an element, shapes. The third is a layer of the draft model.
const TENSORS: [(&str, &str, &str, usize, &[usize]); 4] = [
    ("model.norm.weight", "F32", "float32", 4, &[5]),
    ("model.layers.0.q_proj.weight", "BF16", "bfloat16", 2, &[3, 4]),
    ("model.layers.2.q_proj.weight", "BF16", "bfloat16", 2, &[4]),
    ("model.layers.0.experts.weight", "F8_E4M3", "float8_e4m3fn", 1, &[2, 2]),
];

/// Bytes of a tensor of a version; no two are alike, and none is a NaN.
fn bytes(version: u8, index: usize) -> Vec<u8> {
    let (.., size, shape) = TENSORS[index];
    let length = size * shape.iter().product::<usize>();
    (0..length).map(|at| (u8::try_from(at + 7 * index).unwrap() + 31 * version) % 0x60).collect()
}

/// A checkpoint of these tensors; each goes into the file of its number.
fn write(directory: &Path, version: u8, files: &[(&str, &[usize])]) {
    std::fs::create_dir_all(directory).unwrap();
    for (name, indices) in files {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for index in *indices {
            let (tensor, dtype, .., shape) = TENSORS[*index];
            let begin = data.len();
            data.extend(bytes(version, *index));
            header.insert(tensor.to_owned(), json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}));
        }
        let header = serde_json::to_vec(&header).unwrap();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header);
        file.extend(data);
        std::fs::write(directory.join(name), file).unwrap();
    }
}

/// The way by which the server takes weights.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Snapshot,
    Steps {
        mtp: bool,
    },
    /// From the agent's memory.
    Memory {
        mtp: bool,
    },
    /// Steps of a server with the strategy `ipc`.
    Ipc,
    /// Its own parameters: without the flag.
    Own {
        memory: bool,
    },
}

impl Way {
    fn strategy(self) -> &'static str {
        match self {
            Self::Snapshot => "ipc_snapshot",
            Self::Ipc => "ipc",
            Self::Steps { .. } | Self::Memory { .. } | Self::Own { .. } => "rsync",
        }
    }

    fn flag(self) -> bool {
        matches!(self, Self::Steps { .. } | Self::Memory { .. } | Self::Ipc)
    }

    fn mtp(self) -> bool {
        matches!(self, Self::Steps { mtp: true } | Self::Memory { mtp: true })
    }

    fn is_memory(self) -> bool {
        matches!(self, Self::Memory { .. } | Self::Own { memory: true })
    }
}

/// Who takes the weights.
#[derive(Clone, Copy)]
enum By {
    Simulator,
    Upstream,
}

enum Front {
    Real(Child),
    Simulated(Box<Simulator>),
}

impl Drop for Front {
    fn drop(&mut self) {
        if let Self::Real(child) = self {
            // It ends when its standard input does, and gives its shared memory back.
            drop(child.stdin.take());
            let _ended = child.wait();
        }
    }
}

struct Bench {
    folder: TempDir,
    url: String,
    engine: Arc<dyn Engine>,
    front: Front,
}

impl Bench {
    async fn start(by: By, way: Way) -> Self {
        let folder = TempDir::new().unwrap();
        let at = |name: &str| folder.path().join(name);
        let all: &[usize] = &[0, 1, 2, 3];
        for version in 1..=3 {
            write(&at(&version.to_string()), version, &[("model.safetensors", all)]);
        }
        write(&at("model"), 1, &[("model.safetensors", all), ("model_state.tp0.0.pdparams", all)]);
        write(&at("steps/0"), 1, &[("model.safetensors", all)]);
        std::fs::write(at("model/version.yaml"), "step: 0\n").unwrap();
        let updates = if way.is_memory() { "memory" } else { "folder" };
        let config = json!({"directory": at("steps"), "updates": updates, "gdr_mtp_chunk_size": 2}).to_string();
        let words = ["--dynamic-load-weight", "--load_strategy", way.strategy(), "--rsync_config", &config];
        let (front, url, processes) = match by {
            By::Simulator => simulated(folder.path(), way, &words).await,
            By::Upstream => {
                let from = std::env::var_os("WEIGHTSYNC_FASTDEPLOY").expect("WEIGHTSYNC_FASTDEPLOY=$(tests/tools/fastdeploy.sh)");
                real(Path::new(&from), folder.path(), way, &words)
            }
        };
        let engine = connect(EngineConfig {
            kind: "fastdeploy".into(),
            url: url.clone(),
            api_key: None,
            served_model: Some(at("model")),
            record: None,
            owner: "test".into(),
            processes,
            unproven_routes: false,
        });
        Self { url, engine: engine.unwrap(), front, folder }
    }

    fn job(&self, version: u64) -> InstallJob {
        let directory = self.folder.path().join(version.to_string());
        InstallJob {
            terms: InstallTerms {
                version: held(version),
                pause: PausePolicy::Abort,
                kv_cache: KvCachePolicy::Reset,
                canary: None,
                timeout: SOON,
                cancel: CancellationToken::new(),
            },
            local_directory: directory.clone(),
            directory,
        }
    }

    /// By the way that the server was started for.
    async fn install(&self, way: Way, version: u64) -> Result<(), String> {
        if !way.is_memory() {
            return self.engine.install(&self.job(version)).await.map(drop).map_err(|error| error.to_string());
        }
        let checkpoint = Arc::new(Checkpoint::open(&self.folder.path().join(version.to_string())).unwrap());
        let layout = Arc::new(Layout::new("model", checkpoint.specs(), 64).unwrap().cut_between_tensors());
        let (pause, kv_cache) = (PausePolicy::Abort, KvCachePolicy::Reset);
        let feed = MemoryFeed { version: held(version), layout, memory: None, pause, kv_cache, timeout: SOON };
        feed_memory(self.engine.as_ref(), &feed, checkpoint).await.map(drop).map_err(|error| format!("{error:?}"))
    }

    /// The server's own parameters are those of a version, byte for byte (simulated: by their digests).
    async fn holds(&self, version: u8) {
        match &self.front {
            Front::Real(_) => {
                let found = get(&format!("{}/parameters", self.url)).await;
                for model in found["models"].as_array().unwrap() {
                    for (index, (name, ..)) in TENSORS.iter().enumerate() {
                        let hex = bytes(version, index).iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat();
                        // The draft model has its own layer alone.
                        assert!(model.get(*name).is_none_or(|found| *found == json!(hex)), "{name} of version {version}: {model}");
                    }
                }
                assert_eq!(found["models"][0].as_object().unwrap().len(), TENSORS.len());
            }
            Front::Simulated(simulator) => {
                let mut options = SimulatorOptions::new("fastdeploy", self.folder.path().join(version.to_string()));
                "ipc".clone_into(&mut options.fastdeploy.load_strategy);
                let fresh = Simulator::start(options, TcpListener::bind("127.0.0.1:0").await.unwrap()).await.unwrap();
                let tensors = |url: String| async move { get(&format!("{url}/simulator/digest")).await["tensors"].clone() };
                assert_eq!(tensors(simulator.url()).await, tensors(fresh.url()).await);
            }
        }
    }
}

fn held(version: u64) -> HeldVersion {
    HeldVersion { version, manifest: blake3::hash(&version.to_le_bytes()).to_hex().to_string() }
}

/// Upstream's manager with our front, started by the words of the real server, so that its process is found as the real one's.
fn real(from: &Path, folder: &Path, way: Way, words: &[&str]) -> (Front, String, PathBuf) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let module = folder.join("py/fastdeploy/entrypoints/openai");
    std::fs::create_dir_all(&module).unwrap();
    std::fs::copy(root.join("tests/engine/fastdeploy.py"), module.join("api_server.py")).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let shapes: Map<String, Value> = TENSORS.iter().map(|(name, _, dtype, _, shape)| ((*name).to_owned(), json!([dtype, shape]))).collect();
    let log = std::fs::File::create(folder.join("log")).unwrap();
    let path = std::env::join_paths([folder.join("py"), root.join("python/weightsync/fastdeploy"), root.join("python")]).unwrap();
    let mut command = Command::new(from.join("venv/bin/python"));
    command.args(["-m", "fastdeploy.entrypoints.openai.api_server", "--port", &port.to_string(), "--model"]).arg(folder.join("model"));
    command.args(words).args(way.mtp().then_some("--mtp"));
    command.current_dir(folder).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
    command.env("PYTHONPATH", path).env("PYTHONDONTWRITEBYTECODE", "1").env("WEIGHTSYNC_FD_SHAPES", Value::Object(shapes).to_string());
    command.env("WEIGHTSYNC_FD_MANAGER", from.join("dynamic_weight_manager.py"));
    command.env("FD_USE_GDR_CHECKPOINT_TRANSFER", if way.flag() { "1" } else { "0" });
    let mut child = command.spawn().unwrap();
    let mut printed = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut printed).unwrap();
    let log = std::fs::read_to_string(folder.join("log")).unwrap();
    assert_eq!(printed, "serving\n", "{log}");
    (Front::Real(child), format!("http://127.0.0.1:{port}"), "/proc".into())
}

async fn simulated(folder: &Path, way: Way, words: &[&str]) -> (Front, String, PathBuf) {
    let mut options = SimulatorOptions::new("fastdeploy", folder.join("model"));
    if way != Way::Snapshot {
        way.strategy().clone_into(&mut options.fastdeploy.load_strategy);
        options.fastdeploy.gdr = way.flag();
        options.fastdeploy.mtp = way.mtp();
        options.fastdeploy.mtp_layers = (2, 1);
        options.fastdeploy.transfer = Some(folder.join("steps"));
    }
    let simulator = Simulator::start(options, TcpListener::bind("127.0.0.1:0").await.unwrap()).await.unwrap();
    let (url, port) = (simulator.url(), simulator.address().port().to_string());
    let process = folder.join("proc/77");
    std::fs::create_dir_all(&process).unwrap();
    let program = ["python", "-m", "fastdeploy.entrypoints.openai.api_server", "--port", &port];
    std::fs::write(process.join("cmdline"), program.iter().chain(words).copied().collect::<Vec<_>>().join("\0")).unwrap();
    std::fs::write(process.join("stat"), format!("77 (engine) S {} 4242 0", ["0"; 18].join(" "))).unwrap();
    std::fs::write(process.join("environ"), format!("FD_USE_GDR_CHECKPOINT_TRANSFER={}\0", u8::from(way.flag()))).unwrap();
    (Front::Simulated(Box::new(simulator)), url, folder.join("proc"))
}

/// Each by the simulator, and by upstream's own loader.
macro_rules! loaders {
    ($($test:ident),* $(,)?) => {
        mod simulator {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::By::Simulator).await;
            })*
        }
        mod upstream {
            $(#[tokio::test]
            #[ignore = "needs FastDeploy: make upstream-fastdeploy"]
            async fn $test() {
                super::$test(super::By::Upstream).await;
            })*
        }
    };
}

loaders!(
    loader_takes_steps_and_drafts,
    loader_takes_snapshots,
    a_step_without_a_drafts_weights_is_refused_untouched,
    a_broken_step_leaves_the_weights_as_they_were,
    loader_takes_steps_from_memory_and_no_file_is_made,
    loader_takes_steps_under_ipc_and_its_own_parameters,
    version_that_is_not_its_own_parameters_is_refused_untouched,
    byte_that_flips_in_memory_holds_the_server_until_fed,
);

async fn loader_takes_steps_and_drafts(by: By) {
    for mtp in [false, true] {
        let on = Bench::start(by, Way::Steps { mtp }).await;
        on.holds(1).await;
        assert_eq!(on.engine.probe(SOON).await.unwrap().delivery, "update_weights, steps in a folder");
        for version in [2, 3] {
            on.engine.install(&on.job(version)).await.unwrap();
            on.holds(u8::try_from(version).unwrap()).await;
            assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Version(held(version)));
        }
        // A version in two files is one step.
        let split = on.folder.path().join("2");
        std::fs::remove_file(split.join("model.safetensors")).unwrap();
        write(&split, 2, &[("model-00001-of-00002.safetensors", &[0, 2]), ("model-00002-of-00002.safetensors", &[1, 3])]);
        let index: Map<String, Value> = TENSORS
            .iter()
            .enumerate()
            .map(|(index, (name, ..))| ((*name).to_owned(), json!(format!("model-0000{}-of-00002.safetensors", index % 2 + 1))))
            .collect();
        std::fs::write(split.join("model.safetensors.index.json"), json!({"weight_map": index}).to_string()).unwrap();
        on.engine.install(&on.job(2)).await.unwrap();
        on.holds(2).await;
        on.engine.put_back(SOON).await.unwrap();
        on.holds(1).await;
    }
}

async fn loader_takes_snapshots(by: By) {
    let on = Bench::start(by, Way::Snapshot).await;
    on.holds(1).await;
    assert_eq!(on.engine.probe(SOON).await.unwrap().delivery, "ipc_snapshot, a file in its model directory");
    for version in [2, 3] {
        on.engine.install(&on.job(version)).await.unwrap();
        on.holds(u8::try_from(version).unwrap()).await;
    }
    on.engine.put_back(SOON).await.unwrap();
    on.holds(1).await;
}

async fn a_step_without_a_drafts_weights_is_refused_untouched(by: By) {
    let on = Bench::start(by, Way::Steps { mtp: true }).await;
    let (whole, less) = (on.folder.path().join("2"), &[0, 1, 3][..]);
    std::fs::remove_dir_all(&whole).unwrap();
    write(&whole, 2, &[("model.safetensors", less)]);
    let error = on.engine.install(&on.job(2)).await.unwrap_err();
    assert!(!error.is_dirty() && error.to_string().contains("lacks model.layers.2.q_proj.weight"), "{error}");
    on.holds(1).await;
    on.engine.install(&on.job(3)).await.unwrap();
    on.holds(3).await;
}

async fn a_broken_step_leaves_the_weights_as_they_were(by: By) {
    let on = Bench::start(by, Way::Steps { mtp: false }).await;
    let cut = on.folder.path().join("steps/cut");
    write(&cut, 2, &[("model.safetensors", &[0, 1, 2, 3])]);
    let file = std::fs::OpenOptions::new().write(true).open(cut.join("model.safetensors")).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let (status, answer) = post(&format!("{}/v1/pause", on.url), &json!({})).await;
    assert_eq!(status, 200, "{answer}");
    for step in ["cut", "9", "../model", ".."] {
        let (status, answer) = post(&format!("{}/v1/update_weights", on.url), &json!({"version": step})).await;
        assert!(status == 500 && answer["status"] == json!("error"), "{step}: {answer}");
        on.holds(1).await;
    }
    // With no version, that of version.yaml.
    let (status, answer) = post(&format!("{}/v1/update_weights", on.url), &json!({})).await;
    assert!(status == 200 && answer["result"][0]["version"] == json!("0"), "{answer}");
}

async fn loader_takes_steps_from_memory_and_no_file_is_made(by: By) {
    for way in [Way::Memory { mtp: false }, Way::Memory { mtp: true }, Way::Own { memory: true }] {
        let on = Bench::start(by, way).await;
        on.holds(1).await;
        assert_eq!(on.engine.probe(SOON).await.unwrap().delivery, "update_weights, from the agent's memory");
        for version in [2, 3] {
            on.install(way, version).await.unwrap();
            on.holds(u8::try_from(version).unwrap()).await;
            assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Version(held(version)));
        }
        assert_eq!(std::fs::read_dir(on.folder.path().join("steps")).unwrap().count(), 1, "its start step alone");
        on.engine.put_back(SOON).await.unwrap();
        on.holds(1).await;
    }
}

async fn loader_takes_steps_under_ipc_and_its_own_parameters(by: By) {
    for way in [Way::Ipc, Way::Own { memory: false }] {
        let on = Bench::start(by, way).await;
        on.holds(1).await;
        for version in [2, 3] {
            on.install(way, version).await.unwrap();
            on.holds(u8::try_from(version).unwrap()).await;
        }
        on.engine.put_back(SOON).await.unwrap();
        on.holds(1).await;
    }
}

/// Upstream compares what comes, and keeps what does not come without a word.
async fn version_that_is_not_its_own_parameters_is_refused_untouched(by: By) {
    for way in [Way::Own { memory: false }, Way::Own { memory: true }] {
        let on = Bench::start(by, way).await;
        write(&on.folder.path().join("2"), 2, &[("model.safetensors", &[0, 1, 3])]);
        let refused = on.install(way, 2).await.unwrap_err();
        assert!(refused.contains("lacks model.layers.2.q_proj.weight"), "{refused}");
        on.holds(1).await;
        on.install(way, 3).await.unwrap();
        on.holds(3).await;
    }
}

/// Each rank sums the bytes that it is about to load.
async fn byte_that_flips_in_memory_holds_the_server_until_fed(by: By) {
    let way = Way::Memory { mtp: false };
    let on = Bench::start(by, way).await;
    let checkpoint = Checkpoint::open(&on.folder.path().join("2")).unwrap();
    let layout = Arc::new(Layout::new("model", checkpoint.specs(), 64).unwrap().cut_between_tensors());
    let file = tempfile::tempfile().unwrap();
    file.set_len(layout.total_bytes).unwrap();
    let memory = Arc::new(HostMemory::of(&file, layout.total_bytes).unwrap());
    let job = HostJob { terms: on.job(2).terms, layout: layout.clone(), memory, silence: SOON };
    let mut install = on.engine.begin_host(&job).await.unwrap();
    for (index, entry) in layout.entries.iter().enumerate() {
        let mut bytes = vec![0; usize::try_from(entry.bytes).unwrap()];
        checkpoint.read_tensor(index, 0, &mut bytes).unwrap();
        file.write_all_at(&bytes, entry.offset).unwrap();
        let (spec, digest) = (entry.tensor.clone(), install.digest().of(&bytes));
        let tensors = vec![HostTensor { spec, offset: entry.offset, bytes: entry.bytes, digest }];
        install.bucket(HostBucket { sequence: u32::try_from(index).unwrap(), copy: false, tensors }).await.unwrap();
    }
    let spoiled = &layout.entries[2];
    file.write_all_at(&[0x7f], spoiled.offset).unwrap();
    let error = install.finish(held(2)).await.unwrap_err();
    let named = format!("tensor {} is not what the agent says", spoiled.tensor.name);
    assert!(error.is_dirty() && error.to_string().contains(&named), "{error}");
    assert_eq!(get(&format!("{}/v1/is_paused", on.url)).await["result"]["is_paused"], json!(true), "it is held");
    on.install(way, 3).await.unwrap();
    on.holds(3).await;
}
