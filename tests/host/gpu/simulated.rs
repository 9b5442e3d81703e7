//! Simulated engines as members of groups: their ranks are workers on the stand-in driver, rank 0 is one of ours, and the store is our own.

mod adapters;
mod lmdeploy;
mod sglang;
mod vllm;

use std::net::Ipv4Addr;
use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use weightsync_core::protocol::worker::{NcclId, Proof};
use weightsync_testkit::simulator::{GroupOptions, Simulator, SimulatorOptions, WeightTransfer};
use weightsync_torch::store::{Server, nccl_id_keys};

use super::fixture::{Machine, Member, uuid};
use crate::model::Model;
use crate::world::{PROGRAM, SOON};

/// Long enough to see that something waits; nothing fails when it is too short.
const A_WHILE: Duration = Duration::from_millis(300);

/// Four tensors of 64 KiB.
fn model(seed: u64) -> Model {
    Model::of(seed, (0..4).map(|layer| (format!("layers.{layer}.weight"), 16 << 10)))
}

/// An engine of some ranks on the GPUs from 1 on, and rank 0 on GPU 0.
struct Fixture {
    machine: Machine,
    engine: Simulator,
    ranks: u32,
    zero: Member,
    http: reqwest::Client,
    store: Server,
    checkpoint: tempfile::TempDir,
}

/// Status and body.
type Reply = (u16, Value);

impl Fixture {
    async fn new(engine: &str, ranks: u32) -> Self {
        Self::with(engine, ranks, |_| {}).await
    }

    async fn with(engine: &str, ranks: u32, change: impl FnOnce(&mut SimulatorOptions)) -> Self {
        let machine = Machine::new();
        let checkpoint = tempfile::tempdir().unwrap();
        model(0).save(checkpoint.path());
        let environment = machine.environment();
        let folder = environment.iter().find(|(name, _)| *name == "FAKEGPU_DIR").unwrap().1.clone();
        let mut options = SimulatorOptions::new(engine, checkpoint.path().to_owned());
        options.world_size = ranks;
        options.gpus = (1..=ranks).map(uuid).collect();
        options.gpu_memory = Some(std::path::Path::new(&folder).join("memory"));
        options.groups = Some(GroupOptions {
            environment: environment.into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
            nccl: Some(machine.nccl()),
            ..GroupOptions::new(engine, PROGRAM.into())
        });
        options.weight_transfer = (engine == "vllm").then(|| WeightTransfer::of("nccl"));
        change(&mut options);
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let engine = Simulator::start(options, listener).await.unwrap();
        let zero = Member::with_slots(machine.worker(0).await, 2).await;
        // Another test of this process may have installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        let store = Server::bind((Ipv4Addr::LOCALHOST, 0).into(), |_| true, &CancellationToken::new()).await.unwrap();
        Self { machine, engine, ranks, zero, http, store, checkpoint }
    }

    fn world(&self) -> u32 {
        self.ranks + 1
    }

    async fn call(&self, path: &str, body: Value) -> Reply {
        let sent = self.http.post(format!("{}{path}", self.engine.url())).json(&body).timeout(SOON).send();
        let reply = sent.await.unwrap();
        let status = reply.status().as_u16();
        (status, reply.json().await.unwrap_or_default())
    }

    /// A call that is never answered while this looks.
    async fn unanswered(&self, path: &str, body: Value) {
        let sent = self.http.post(format!("{}{path}", self.engine.url())).json(&body).send();
        assert!(tokio::time::timeout(A_WHILE, sent).await.is_err(), "{path} was answered");
    }

    async fn get(&self, path: &str) -> Reply {
        let reply = self.http.get(format!("{}{path}", self.engine.url())).timeout(SOON).send().await.unwrap();
        let status = reply.status().as_u16();
        (status, reply.json().await.unwrap_or_default())
    }

    async fn serves(&self, model: &Model) -> bool {
        self.get("/simulator/digest").await.1["tensors"] == model.digests()
    }

    /// A text that depends on every weight that is served, and on whether the last update was finished.
    async fn text(&self, prompt: &str) -> Value {
        let body = json!({"model": "model", "prompt": prompt, "max_tokens": 4, "logprobs": 1, "temperature": 0});
        self.call("/v1/completions", body).await.1["choices"][0]["logprobs"]["token_logprobs"].clone()
    }

    /// What an engine on torch is asked to meet at.
    fn meeting(&self, name: &str) -> Value {
        json!({"master_address": "127.0.0.1", "master_port": self.store.address().port(), "rank_offset": 1, "world_size": self.world(),
            "group_name": name, "backend": "nccl"})
    }

    /// Publishes the id of a new group, as rank 0 does before anybody is informed of the store.
    async fn publish_id(&self, name: &str) -> NcclId {
        let id = self.zero.worker.unique_id(SOON).await.unwrap();
        for key in nccl_id_keys(name) {
            self.store.set(&key, &id.0).unwrap();
        }
        id
    }

    /// Makes rank 0's communicator.
    async fn join(&self, group: u64, id: NcclId, proof: Proof) {
        self.zero.worker.join_as(group, id, (0, self.world()), proof, SOON).await.unwrap();
    }

    /// Broadcasts bytes from rank 0.
    async fn send(&self, group: u64, bytes: &[u8]) {
        let slot = self.zero.ring.take(SOON).await.unwrap();
        self.zero.fill(&slot, bytes).await;
        self.zero.broadcast(group, &slot, bytes.len() as u64, SOON).await.unwrap();
    }

    /// Rank 0 leaves without a word.
    async fn abort(&self, group: u64) {
        self.zero.worker.abort(group, SOON).await.unwrap();
    }
}

/// Some tensors of a model, as an engine is informed of them, and their bytes.
fn bucket(model: &Model, tensors: std::ops::Range<usize>) -> (Value, Vec<u8>) {
    let names: Vec<String> = tensors.clone().map(|layer| format!("layers.{layer}.weight")).collect();
    let (dtypes, shapes) = (vec!["float32"; names.len()], vec![vec![16 << 10]; names.len()]);
    (json!({"names": names, "dtypes": dtypes, "shapes": shapes}), tensors.flat_map(|tensor| model.bytes(tensor)).collect())
}

/// One object of two.
fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Success, as SGLang and LMDeploy say it.
fn assert_well(reply: &Reply) {
    assert!(reply.0 == 200 && reply.1["success"] == true, "{reply:?}");
}

/// A refusal with these words.
fn assert_refused(reply: &Reply, words: &str) {
    assert!(reply.0 == 400 && reply.1["success"] == false && reply.1["message"].as_str().unwrap().contains(words), "{reply:?}");
}
