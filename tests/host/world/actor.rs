//! A rollout of a world: which engine is simulated, where, and by which words it is started.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};

use crate::gpu::fixture::uuid;

/// A rollout of a world.
#[derive(Clone)]
pub struct Actor {
    pub(super) kind: &'static str,
    pub(super) faults: Value,
    pub(super) ranks: u32,
    pub(super) said: u32,
    pub(super) absent: bool,
    /// With a draft model, which is the world's first model too.
    pub(super) drafts: bool,
    pub(super) gpu: Option<u32>,
    /// The program's own name and more words of its command.
    pub(super) words: Vec<String>,
}

impl Actor {
    /// A simulated vLLM with one rank and no faults.
    pub fn new() -> Self {
        Self { kind: "vllm", faults: json!({}), ranks: 1, said: 1, absent: false, drafts: false, gpu: None, words: Vec::new() }
    }

    /// Started with WeightSync's own weight-transfer back end.
    pub fn with_backend(self) -> Self {
        Self { words: vec![program(), "--weightsync-backend".to_owned()], ..self }
    }

    /// The same on this GPU of its machine.
    pub fn with_backend_on(self, gpu: u32) -> Self {
        let mut with_backend = self.with_backend();
        with_backend.words.extend(["--gpu".to_owned(), uuid(gpu)]);
        with_backend.on_gpu(gpu)
    }

    /// With a model that drafts for it.
    pub fn drafting(self) -> Self {
        Self { drafts: true, ..self }
    }

    /// With one rank on each of these GPUs of its machine, and able to join groups with them.
    pub fn joining(self, gpus: &[u32]) -> Self {
        let transfer = if self.kind == "vllm" { &["--weight-transfer", "nccl"][..] } else { &[] };
        let own = gpus.iter().flat_map(|gpu| ["--gpu".to_owned(), uuid(*gpu)]);
        let words = std::iter::once(program()).chain(transfer.iter().map(|word| (*word).to_owned())).chain(own).collect();
        let ranks = u32::try_from(gpus.len()).unwrap();
        Self { words, gpu: gpus.first().copied(), ranks, said: ranks, ..self }
    }

    /// A simulated SGLang.
    pub fn sglang() -> Self {
        Self { kind: "sglang", ..Self::new() }
    }

    /// An engine of that kind.
    pub fn of(kind: &'static str) -> Self {
        Self { kind, ..Self::new() }
    }

    /// A simulated LMDeploy on this GPU; `name` is the program by a name of its choice.
    pub fn lmdeploy(name: &Path, gpu: &str) -> Self {
        Self { kind: "lmdeploy", words: vec![name.to_string_lossy().into_owned(), "--gpu".into(), gpu.into()], ..Self::new() }
    }

    /// A simulated FastDeploy, with a model directory of its own.
    pub fn fastdeploy() -> Self {
        Self { kind: "fastdeploy", ..Self::new() }
    }

    /// What goes wrong from the start.
    pub fn faults(self, faults: Value) -> Self {
        Self { faults, ..self }
    }

    /// An engine of `ranks` ranks, of which the file says `said`.
    pub fn ranks(self, ranks: u32, said: u32) -> Self {
        Self { ranks, said, ..self }
    }

    /// On this GPU of its machine, instead of one of its own.
    pub fn on_gpu(self, gpu: u32) -> Self {
        Self { gpu: Some(gpu), ..self }
    }

    /// No one listens on its port, until [`World::start_engine`].
    pub fn absent(self) -> Self {
        Self { absent: true, ..self }
    }
}

/// The command that starts its engine, on the model of `folder`.
pub(super) fn engine(actor: &Actor, at: SocketAddr, folder: &Path) -> Vec<String> {
    let (host, port) = (at.ip().to_string(), at.port());
    let mut model = folder.join("start");
    if actor.kind == "fastdeploy" {
        let own = folder.join(format!("fastdeploy-{port}"));
        // Made once: what it holds later is the server's and its agent's.
        if std::fs::create_dir(&own).is_ok() {
            std::fs::copy(model.join("model.safetensors"), own.join("model_state.tp0.0.pdparams")).unwrap();
        }
        model = own;
    }
    let model = model.to_string_lossy().into_owned();
    let (port, ranks, faults) = (port.to_string(), actor.ranks.to_string(), actor.faults.to_string());
    // LMDeploy that is given no name serves under the path of its model.
    let served = if actor.kind == "lmdeploy" { model.clone() } else { "model".to_owned() };
    let words =
        ["simulate-engine", "--engine", actor.kind, "--host", &host, "--server-port", &port, "--model", &model, "--world-size", &ranks];
    let dev = program();
    let (name, own) = actor.words.split_first().map_or((dev.as_str(), &[][..]), |(name, own)| (name.as_str(), own));
    let words = std::iter::once(name).chain(words).chain(["--faults", &faults, "--served-model-name", &served]);
    let words = words.chain(actor.drafts.then_some(["--draft", &model]).into_iter().flatten());
    words.map(str::to_owned).chain(own.iter().cloned()).collect()
}

/// `weightsync-dev`, which has the simulated engines.
fn program() -> String {
    weightsync_testkit::dev_program().display().to_string()
}
