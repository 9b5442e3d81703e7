//! Both deliveries give the same bytes: whatever a version is made of, an engine that received it in a group of its own workers serves what the
//! same engine serves that an agent handed it to, and that is what lies in the checkpoint.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;
use weightsync_agent::hand_over::feed_checkpoint;
use weightsync_core::protocol::{HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Dtype, Layout, digest_hex, tensor_digest};
use weightsync_dev::conformance::Sources;
use weightsync_engine::{DeviceJob, Engine, EngineConfig, InstallJob, InstallTerms, connect};
use weightsync_gpu::worker::{Ring, WorkerStart};
use weightsync_testkit::simulator::{GroupOptions, Simulator, SimulatorOptions, WeightTransfer};

use super::fixture::{Machine, pattern, uuid};
use crate::world::{PROGRAM, SOON};

/// Those that torch has a name for.
const DTYPES: [Dtype; 12] = [
    Dtype::BF16,
    Dtype::F16,
    Dtype::F32,
    Dtype::F64,
    Dtype::F8_E4M3,
    Dtype::F8_E5M2,
    Dtype::I8,
    Dtype::U8,
    Dtype::I16,
    Dtype::I32,
    Dtype::I64,
    Dtype::BOOL,
];
/// GPUs of an engine.
const GPUS: [u32; 2] = [1, 2];

/// What a version is made of, and the length of its buckets.
#[derive(Debug, Clone)]
struct Made {
    tensors: Vec<(String, Dtype, Vec<u64>)>,
    tied: bool,
    bucket: u64,
}

/// Scalars, empty tensors and some that are longer than a bucket among them; the output layer is one of its own or the embedding.
fn made() -> impl Strategy<Value = Made> {
    let shape = prop_oneof![4 => proptest::collection::vec(0..9_u64, 0..4), 1 => (900..1100_u64).prop_map(|length| vec![length])];
    let tensor = (proptest::sample::select(DTYPES.to_vec()), shape);
    let outer = (proptest::sample::select(DTYPES.to_vec()), any::<bool>(), proptest::sample::select(vec![64_u64, 256, 4096]));
    (proptest::collection::vec(tensor, 0..10), outer).prop_map(|(tensors, (dtype, tied, bucket))| {
        let named = |(index, (dtype, shape))| (format!("model.layers.{index}.weight"), dtype, shape);
        let mut tensors: Vec<_> = tensors.into_iter().enumerate().map(named).collect();
        tensors.push(("model.embed_tokens.weight".to_owned(), dtype, vec![17, 3]));
        if !tied {
            tensors.push(("lm_head.weight".to_owned(), dtype, vec![17, 3]));
        }
        Made { tensors, tied, bucket }
    })
}

impl Made {
    /// Writes it as a checkpoint; answers name and digest of each tensor.
    fn save(&self, folder: &Path, seed: u64) -> Value {
        std::fs::create_dir_all(folder).unwrap();
        let (mut header, mut data, mut digests) = (Map::new(), Vec::new(), Map::new());
        for ((name, dtype, shape), number) in self.tensors.iter().zip(0_u64..) {
            let begin = data.len();
            let bytes = pattern(seed << 32 | number, usize::try_from(dtype.tensor_bytes(shape).unwrap()).unwrap());
            digests.insert(name.clone(), json!(digest_hex(tensor_digest(&bytes))));
            data.extend(bytes);
            header.insert(name.clone(), json!({"dtype": format!("{dtype:?}"), "shape": shape, "data_offsets": [begin, data.len()]}));
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(data);
        std::fs::write(folder.join("model.safetensors"), file).unwrap();
        let config = json!({"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", "tie_word_embeddings": self.tied});
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        Value::Object(digests)
    }
}

/// One machine for all cases.
struct Bench {
    machine: Machine,
    sources: Arc<Sources>,
    /// Where an agent next to an engine has buckets: one ring a GPU.
    rings: Vec<Ring>,
    http: reqwest::Client,
}

impl Bench {
    async fn new() -> Self {
        let machine = Machine::new();
        let environment = machine.environment().into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        let start = WorkerStart { environment, ..WorkerStart::new(PROGRAM, &["worker"], "rank 0") };
        let sources = Sources::find(start, Some(machine.nccl()), Some(&uuid(0)), Some(machine.folder().to_owned())).await.unwrap();
        let mut rings = Vec::new();
        for gpu in GPUS {
            rings.push(machine.worker(gpu).await.ring(2, 64 << 10, SOON).await.unwrap());
        }
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self { machine, sources, rings, http: reqwest::Client::builder().no_proxy().build().unwrap() }
    }

    async fn simulator(&self, kind: &str, start: &Path) -> Simulator {
        let mut options = SimulatorOptions::new(kind, start.to_owned());
        options.world_size = u32::try_from(GPUS.len()).unwrap();
        options.gpus = GPUS.map(uuid).to_vec();
        options.gpu_memory = Some(self.machine.folder().join("memory"));
        options.groups = Some(GroupOptions {
            environment: self.machine.environment().into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
            nccl: Some(self.machine.nccl()),
            ..GroupOptions::new(kind, PROGRAM.into())
        });
        options.weight_transfer = (kind == "vllm").then(|| WeightTransfer::of("nccl"));
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        Simulator::start(options, listener).await.unwrap()
    }

    async fn serves(&self, simulator: &Simulator) -> Value {
        let answer = self.http.get(format!("{}/simulator/digest", simulator.url())).timeout(SOON).send().await.unwrap();
        answer.json::<Value>().await.unwrap()["tensors"].clone()
    }

    async fn check(&self, made: &Made) -> Result<(), TestCaseError> {
        let folder = tempfile::tempdir().unwrap();
        let (start, next) = (folder.path().join("1"), folder.path().join("2"));
        made.save(&start, 1);
        let expected = made.save(&next, 2);
        for kind in ["vllm", "sglang", "lmdeploy"] {
            for by_group in [true, false] {
                let simulator = self.simulator(kind, &start).await;
                let engine = adapter(kind, &simulator, &start);
                let installed = if by_group {
                    let job = job(made, &next, folder.path());
                    let checkpoint = Checkpoint::open(&next).unwrap();
                    let updated = self.sources.update(engine.as_ref(), &job, held(), &checkpoint, Ipv4Addr::LOCALHOST.into()).await;
                    updated.map(drop).map_err(|error| error.to_string())
                } else {
                    self.hand_over(engine.as_ref(), made, &next, folder.path()).await
                };
                let who = if by_group { "its own group" } else { "an agent" };
                prop_assert!(installed.is_ok(), "{kind}, by {who}: {}", installed.unwrap_err());
                prop_assert_eq!(&self.serves(&simulator).await, &expected, "{}, by {}", kind, who);
                simulator.stop().await;
            }
        }
        Ok(())
    }

    /// By the agent next to it: from a directory, or for LMDeploy, which takes none, from its GPUs' memory.
    async fn hand_over(&self, engine: &dyn Engine, made: &Made, next: &Path, folder: &Path) -> Result<(), String> {
        if engine.takes_directories().is_err() {
            let checkpoint = Arc::new(Checkpoint::open(next).unwrap());
            let fed = feed_checkpoint(engine, &job(made, next, folder), held(), checkpoint, &self.rings, false).await;
            return fed.map(drop).map_err(|error| error.to_string());
        }
        let job = InstallJob {
            terms: InstallTerms {
                version: held(),
                pause: PausePolicy::Keep,
                kv_cache: KvCachePolicy::Reset,
                canary: None,
                timeout: SOON,
                cancel: CancellationToken::new(),
            },
            directory: next.to_owned(),
            local_directory: next.to_owned(),
        };
        engine.install(&job).await.map(drop).map_err(|error| error.to_string())
    }
}

fn held() -> HeldVersion {
    HeldVersion { version: 2, manifest: "2".repeat(64) }
}

fn adapter(kind: &str, simulator: &Simulator, start: &Path) -> Arc<dyn Engine> {
    let config = EngineConfig {
        kind: kind.to_owned(),
        url: simulator.url(),
        api_key: None,
        served_model: Some(start.to_owned()),
        record: None,
        owner: "test".into(),
        processes: PathBuf::from("/proc"),
        unproven_routes: false,
    };
    connect(config).unwrap()
}

fn job(made: &Made, checkpoint: &Path, folder: &Path) -> DeviceJob {
    let specs = Checkpoint::open(checkpoint).unwrap().specs();
    DeviceJob {
        terms: InstallTerms {
            version: InstallTerms::mark(2, None),
            pause: PausePolicy::Abort,
            kv_cache: KvCachePolicy::Reset,
            canary: None,
            timeout: SOON,
            cancel: CancellationToken::new(),
        },
        layout: Arc::new(Layout::new("model", specs, made.bucket).unwrap().cut_between_tensors()),
        silence: SOON,
        sockets: folder.join("s"),
        sockets_in_engine: folder.join("s"),
    }
}

#[test]
fn both_deliveries_give_equal_bytes_on_every_simulator() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let bench = runtime.block_on(Bench::new());
    let mut runner =
        TestRunner::new(ProptestConfig { cases: 12, max_shrink_iters: 64, failure_persistence: None, ..ProptestConfig::default() });
    runner.run(&made(), |made| runtime.block_on(bench.check(&made))).unwrap();
    // Handles of workers are given up on a runtime.
    let _entered = runtime.enter();
    drop(bench);
}
