//! Traps of engines that their simulators keep (docs/engines/traps.md): each answers 200, and serves something else than it was given.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;

use crate::simulator::{Simulator, SimulatorOptions};
use crate::support::{TENSORS, client, post, until, write_checkpoint};
use weightsync_core::weights::Dtype;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_torch::pickle::Value as Pickled;
use weightsync_torch::{Device, Piece, SharedTensor, lmdeploy_bucket, lmdeploy_nothing};

/// A server on version 1, versions 1 to 3 on disk, and one buffer of GPU memory.
struct Server {
    simulator: Simulator,
    folder: TempDir,
    memory: std::fs::File,
}

const MEMORY: u64 = 4096;

impl Server {
    async fn start(engine: &str) -> Self {
        let folder = TempDir::new().unwrap();
        for seed in 1..=3 {
            write_checkpoint(&folder.path().join(seed.to_string()), &TENSORS, seed);
        }
        let mut options = SimulatorOptions::new(engine, folder.path().join("1"));
        options.gpu_memory = Some(folder.path().to_owned());
        let memory = std::fs::OpenOptions::new().create_new(true).read(true).write(true).open(folder.path().join("gpu")).unwrap();
        memory.set_len(MEMORY).unwrap();
        let simulator = Simulator::start(options, TcpListener::bind("127.0.0.1:0").await.unwrap()).await.unwrap();
        Self { simulator, folder, memory }
    }

    async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        post(&format!("{}{path}", self.simulator.url()), body).await
    }

    async fn digest(&self) -> Value {
        let reply = client().get(format!("{}/simulator/digest", self.simulator.url())).send().await.unwrap();
        reply.json::<Value>().await.unwrap()["digest"].clone()
    }

    /// What a fresh server on a version serves.
    async fn fresh(&self, version: u8) -> Value {
        let options = SimulatorOptions::new("vllm", self.folder.path().join(version.to_string()));
        let fresh = Simulator::start(options, TcpListener::bind("127.0.0.1:0").await.unwrap()).await.unwrap();
        let reply = client().get(format!("{}/simulator/digest", fresh.url())).send().await.unwrap();
        reply.json::<Value>().await.unwrap()["digest"].clone()
    }

    /// Lays a version into the memory, and says how LMDeploy is informed of it.
    fn lay(&self, version: u8, clone: bool) -> Pickled {
        let checkpoint = Checkpoint::open(&self.folder.path().join(version.to_string())).unwrap();
        let (mut offset, mut pieces) = (0, Vec::new());
        for (index, tensor) in checkpoint.tensors().iter().enumerate() {
            let mut bytes = vec![0; usize::try_from(tensor.bytes).unwrap()];
            checkpoint.read_tensor(index, 0, &mut bytes).unwrap();
            self.memory.write_all_at(&bytes, offset).unwrap();
            pieces.push((tensor.spec.clone(), offset, tensor.bytes));
            offset += tensor.bytes;
        }
        let mut handle = [0; 64];
        let text = format!("fakegpu:memory:gpu:{MEMORY}");
        handle[..text.len()].copy_from_slice(text.as_bytes());
        let tensor = SharedTensor {
            handle,
            storage_offset: 0,
            storage_bytes: MEMORY,
            elements: offset / 4,
            dtype: Dtype::F32,
            device: Device::Readers,
            counter: None,
        };
        let piece = |(spec, offset, bytes): &(weightsync_core::weights::TensorSpec, u64, u64)| (spec.clone(), *offset, *bytes);
        let owned: Vec<_> = pieces.iter().map(piece).collect();
        let pieces: Vec<Piece<'_>> = owned
            .iter()
            .map(|(spec, offset, bytes)| Piece { name: &spec.name, dtype: spec.dtype, shape: &spec.shape, offset: *offset, bytes: *bytes })
            .collect();
        lmdeploy_bucket(&pieces, &tensor, None, clone).unwrap()
    }

    async fn update(&self, bucket: &Pickled, finished: bool) {
        let body = json!({
            "serialized_named_tensors": [STANDARD.encode(bucket.pickle())], "load_format": "flattened_bucket", "finished": finished,
        });
        assert_eq!(self.post("/update_weights", &body).await, (200, Value::Null));
    }
}

/// Trap 14.
#[tokio::test]
async fn missing_last_step_answers_but_computes_otherwise() {
    let server = Server::start("lmdeploy").await;
    server.update(&server.lay(2, false), false).await;
    assert_ne!(server.digest().await, server.fresh(2).await);
    server.update(&lmdeploy_nothing(), true).await;
    assert_eq!(server.digest().await, server.fresh(2).await);
}

/// Trap 16.
#[tokio::test]
async fn bucket_without_memory_is_read_from_an_old_clone() {
    for clone in [true, false] {
        let server = Server::start("lmdeploy").await;
        server.update(&server.lay(2, clone), false).await;
        let Pickled::Dict(items) = server.lay(3, clone) else { panic!("a dict") };
        let without = items.into_iter().filter(|(key, _)| *key != Pickled::text("flattened_tensor")).collect();
        server.update(&Pickled::Dict(without), true).await;
        let version = if clone { 2 } else { 3 };
        assert_eq!(server.digest().await, server.fresh(version).await, "clone: {clone}");
    }
}

/// As SGLang 0.5.23 did on CPU: a file cut short, or one of another shape, ends the server; a directory without files leaves it as it was.
#[tokio::test]
async fn simulated_sglang_ends_when_a_file_cannot_be_loaded() {
    for ruin in ["cut", "no files"] {
        let server = Server::start("sglang").await;
        let directory = server.folder.path().join("2");
        let file = directory.join("model.safetensors");
        if ruin == "cut" {
            let whole = std::fs::metadata(&file).unwrap().len();
            std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(whole - 8).unwrap();
        } else {
            std::fs::remove_file(&file).unwrap();
        }
        let url = format!("{}/update_weights_from_disk", server.simulator.url());
        let answer = client().post(url).json(&json!({"model_path": directory})).send().await;
        let alive = client().get(format!("{}/ping", server.simulator.url())).send().await.is_ok();
        if ruin == "cut" {
            assert!(answer.is_err() && !alive, "{answer:?}");
        } else {
            assert_eq!(answer.unwrap().status(), 400);
            assert!(alive);
            assert_eq!(server.digest().await, server.fresh(1).await);
        }
    }
}

/// Trap 10.
#[tokio::test]
async fn update_of_an_unpaused_server_waits_for_requests() {
    let server = Server::start("sglang").await;
    let (status, _) = server.post("/simulator/faults", &json!({"tokenMs": 20})).await;
    assert_eq!(status, 200);
    let ask = json!({"text": "a long prompt", "sampling_params": {"max_new_tokens": 4000}});
    let generating = server.post("/generate", &ask);
    let directory = server.folder.path().join("2");
    let updating = async {
        until("the request", || async {
            let reply = client().get(format!("{}/simulator/digest", server.simulator.url())).send().await.unwrap();
            reply.json::<Value>().await.unwrap()["requests"] == json!(1)
        })
        .await;
        let body = json!({"model_path": directory});
        let update = server.post("/update_weights_from_disk", &body);
        tokio::pin!(update);
        let early = tokio::time::timeout(Duration::from_millis(300), &mut update).await;
        assert!(early.is_err(), "it waits: {early:?}");
        assert_eq!(server.digest().await, server.fresh(1).await, "and loads nothing meanwhile");
        // Somebody else ends the request.
        let (status, _) = server.post("/pause_generation", &json!({"mode": "abort"})).await;
        assert_eq!(status, 200);
        let (status, answer) = update.await;
        assert_eq!((status, &answer["success"]), (200, &json!(true)), "{answer}");
    };
    let ((status, answer), ()) = tokio::join!(generating, updating);
    assert_eq!((status, &answer["meta_info"]["finish_reason"]["type"]), (200, &json!("abort")));
    assert_eq!(server.digest().await, server.fresh(2).await);
}
