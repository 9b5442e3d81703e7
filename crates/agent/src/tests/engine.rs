//! An engine that loads real files: it says what it serves by hashing what it read, so a lie shows.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;

use super::workers::Workers;
use crate::locks::lock;
use weightsync_core::protocol::{CanaryPolicy, EngineFacts, HeldVersion, KvCachePolicy, MixedWindow, PausePolicy, Version};
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{IgnoredTensors, TensorSpec, digest_hex, tensor_digest};
use weightsync_engine::{
    Engine, EngineError, EngineStart, Fit, Health, Holding, HostDigest, HostInstall, HostJob, InstallError, InstallJob, InstallReport,
    Left, Settled, Settling,
};

/// What the engine does wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// Answers no call.
    Down,
    /// Fails in the middle of a load.
    FailsInLoad,
    /// Reads the weights, and knows no tensor of that name.
    KnowsNoSuchTensor,
    /// Loads nothing any more until it starts again.
    LoaderBroken,
    /// Says no before it is touched.
    FailsBeforeLoad,
    /// Never ends a load.
    Hangs,
    /// Loads, and then does not run again.
    StaysPaused,
}

#[derive(Debug, Default)]
pub struct Inside {
    pub start: u32,
    pub fault: Fault,
    /// Digest of all tensors, by name, as they were read.
    pub serves: Option<String>,
    pub holding: Option<HeldVersion>,
    pub half: Option<HeldVersion>,
    pub paused: bool,
    pub installs: u32,
    pub directory: Option<PathBuf>,
    pub slow: Duration,
    /// How long it takes to say what it is.
    pub slow_facts: Duration,
    pub put_back: u32,
    /// Its start-up weights are gone.
    pub lost_start_up: bool,
    /// It is asked for its one token after an install.
    pub owes: bool,
    /// When it served while it loaded.
    pub mixed: Vec<MixedWindow>,
    /// The version that it does not compute with.
    pub spoiled: Option<Version>,
    /// Versions that a canary refuses.
    pub refuses: Vec<Version>,
    /// It gives no log-probs.
    pub mute: bool,
    /// A tensor that its start-up weights have.
    pub needs: Option<String>,
    /// Tensors that a version is not compared by.
    pub ignored: IgnoredTensors,
    /// Its workers read shared memory, and check this digest.
    pub memory: Option<HostDigest>,
    /// Lengths of the memories that were shared with them.
    pub shared: Vec<u64>,
}

/// The engine.
#[derive(Clone, Default)]
pub struct TestEngine(pub Arc<Mutex<Inside>>);

impl TestEngine {
    pub fn set(&self, change: impl FnOnce(&mut Inside)) {
        change(&mut lock(&self.0));
    }

    pub fn get<T>(&self, read: impl FnOnce(&Inside) -> T) -> T {
        read(&lock(&self.0))
    }

    /// Starts again, with its start-up weights.
    pub fn restart(&self) {
        self.set(|inside| {
            let (start, installs, ignored) = (inside.start + 1, inside.installs, inside.ignored.clone());
            *inside = Inside { start, installs, ignored, ..Inside::default() };
        });
    }

    pub fn serves(&self) -> Option<String> {
        self.get(|inside| inside.serves.clone())
    }

    fn answer(&self) -> Result<EngineStart, EngineError> {
        self.get(|inside| match inside.fault {
            Fault::Down => Err(EngineError::Timeout { url: "http://engine".into(), deadline: Duration::ZERO }),
            _ => Ok(EngineStart(inside.start.to_string())),
        })
    }
}

/// What an engine that read this directory serves.
pub fn digest_of(directory: &Path) -> Result<String, String> {
    let checkpoint = Checkpoint::open(directory).map_err(|error| error.to_string())?;
    let mut tensors = Vec::new();
    for (index, tensor) in checkpoint.tensors().iter().enumerate() {
        let mut bytes = vec![0; usize::try_from(tensor.bytes).unwrap()];
        checkpoint.read_tensor(index, 0, &mut bytes).map_err(|error| error.to_string())?;
        tensors.push(format!("{}={}", tensor.spec.name, digest_hex(tensor_digest(&bytes))));
    }
    tensors.sort();
    Ok(tensors.join(" "))
}

#[async_trait]
impl Engine for TestEngine {
    fn kind(&self) -> &'static str {
        "test"
    }

    fn is_still(&self, start: &EngineStart) -> bool {
        self.get(|inside| start.0 == inside.start.to_string())
    }

    async fn probe(&self, deadline: Duration) -> Result<EngineFacts, EngineError> {
        self.answer()?;
        let slow = self.get(|inside| inside.slow_facts);
        tokio::time::sleep(slow.min(deadline)).await;
        if slow > deadline {
            return Err(EngineError::Timeout { url: "http://engine".into(), deadline });
        }
        Ok(facts())
    }

    fn accepts(&self, _pause: PausePolicy, _kv_cache: KvCachePolicy) -> Result<(), EngineError> {
        Ok(())
    }

    fn ignore(&self, ignored: &IgnoredTensors) {
        self.set(|inside| inside.ignored = ignored.clone());
    }

    fn fits(&self, tensors: &[TensorSpec]) -> Result<Fit, EngineError> {
        match self.get(|inside| inside.needs.clone().filter(|needed| !inside.ignored.matches(needed))) {
            Some(needed) if !tensors.iter().any(|tensor| tensor.name == needed) => {
                Err(EngineError::Unsupported { what: format!("tensor {needed} is missing"), next_step: "publish all tensors".into() })
            }
            _ => Ok(Fit::Unchecked { why: "its start-up weights are nowhere".into(), tied: false }),
        }
    }

    async fn health(&self, deadline: Duration) -> Result<Health, EngineError> {
        Ok(Health { start: self.answer()?, holding: Some(self.holding(deadline).await?) })
    }

    async fn answers(&self, _canary: &CanaryPolicy, _deadline: Duration) -> Result<bool, EngineError> {
        self.answer()?;
        let without = EngineError::Unsupported { what: "it gives no log-probs".into(), next_step: "start it with them".into() };
        if self.get(|inside| inside.mute) { Err(without) } else { Ok(true) }
    }

    async fn install(&self, job: &InstallJob) -> Result<InstallReport, InstallError> {
        let failed = |step, left, what: &str| InstallError {
            step,
            left,
            source: EngineError::BadReply { url: "http://engine".into(), what: what.into() },
        };
        let (start, fault, slow) = self.get(|inside| (inside.start, inside.fault, inside.slow));
        if fault == Fault::FailsBeforeLoad {
            return Err(failed("pause", Left::AsBefore, "no"));
        }
        self.set(|inside| {
            inside.paused = true;
            inside.half = Some(job.terms.version.clone());
            inside.serves = None;
            inside.installs += 1;
        });
        tokio::time::sleep(slow).await;
        if fault == Fault::Hangs {
            std::future::pending::<()>().await;
        }
        if fault == Fault::FailsInLoad {
            return Err(failed("load", Left::Mixture, "out of memory"));
        }
        if matches!(fault, Fault::KnowsNoSuchTensor | Fault::LoaderBroken) {
            return Err(failed("load", Left::Mixture, "there is no module or parameter named 'other'"));
        }
        let read = digest_of(&job.directory).map_err(|error| failed("load", Left::Mixture, &error))?;
        if self.get(|inside| inside.start != start) {
            return Err(InstallError { step: "load", left: Left::Unknown, source: EngineError::Restarted });
        }
        if job.terms.canary.is_some() && self.get(|inside| inside.refuses.contains(&job.terms.version.version)) {
            let source = EngineError::CanaryRefused { measured: "the log-prob of token 1 of 1 is no number".into() };
            return Err(InstallError { step: "canary", left: Left::Mixture, source });
        }
        let stays_paused = fault == Fault::StaysPaused;
        self.set(|inside| {
            inside.serves = Some(read);
            inside.holding = Some(job.terms.version.clone());
            inside.half = None;
            inside.paused = stays_paused;
            inside.directory = Some(job.directory.clone());
        });
        if stays_paused {
            return Err(failed("resume", Left::Unknown, "it is still paused"));
        }
        Ok(InstallReport {
            start: EngineStart(start.to_string()),
            steps_ms: vec![("load".into(), 1)],
            owes_answer: self.get(|inside| inside.owes),
        })
    }

    fn mixed_windows(&self) -> Vec<MixedWindow> {
        self.get(|inside| inside.mixed.clone())
    }

    async fn see_owed_answer(&self, version: &HeldVersion, _deadline: Duration) -> Result<(), InstallError> {
        if self.get(|inside| inside.spoiled != Some(version.version)) {
            return Ok(());
        }
        self.set(|inside| (inside.half, inside.paused) = (Some(version.clone()), true));
        let source = EngineError::BadReply { url: "http://engine".into(), what: "it generated no token".into() };
        Err(InstallError { step: "probe", left: Left::Mixture, source })
    }

    async fn host_route(&self, _deadline: Duration) -> Result<&'static str, EngineError> {
        self.answer()?;
        let without = EngineError::Unsupported { what: "it has no workers that read memory".into(), next_step: "use files".into() };
        self.get(|inside| inside.memory).map(|_| "shared memory").ok_or(without)
    }

    async fn begin_host(&self, job: &HostJob) -> Result<Box<dyn HostInstall>, InstallError> {
        let digest = self.get(|inside| inside.memory).expect("it has this way");
        Ok(Box::new(Workers::begin(self, job, digest)))
    }

    async fn settle(&self, _how: &Settling, deadline: Duration) -> Result<Settled, InstallError> {
        let unknown = |source| InstallError { step: "start", left: Left::Unknown, source };
        let start = self.answer().map_err(unknown)?;
        let holding = self.holding(deadline).await.map_err(unknown)?;
        if self.get(|inside| inside.fault == Fault::StaysPaused) {
            return Err(unknown(EngineError::BadReply { url: "http://engine".into(), what: "it is still paused".into() }));
        }
        let resumed = !matches!(holding, Holding::HalfAnUpdate(_)) && self.get(|inside| inside.paused);
        if resumed {
            self.set(|inside| inside.paused = false);
        }
        Ok(Settled { start, holding, resumed })
    }

    async fn put_back(&self, _deadline: Duration) -> Result<(), EngineError> {
        self.answer()?;
        if self.get(|inside| inside.fault == Fault::LoaderBroken) {
            return Err(EngineError::Status { url: "http://engine".into(), status: 500, body: "exceeds dimension size".into() });
        }
        if self.get(|inside| inside.lost_start_up) {
            return Err(EngineError::BadReply { url: "http://engine".into(), what: "no such directory".into() });
        }
        self.set(|inside| {
            inside.half = None;
            inside.holding = None;
            inside.paused = false;
            inside.put_back += 1;
        });
        Ok(())
    }

    async fn holding(&self, _deadline: Duration) -> Result<Holding, EngineError> {
        self.answer()?;
        Ok(self.get(|inside| match (&inside.half, &inside.holding) {
            (Some(half), _) => Holding::HalfAnUpdate(half.clone()),
            (None, Some(held)) => Holding::Version(held.clone()),
            (None, None) => Holding::Startup,
        }))
    }
}

/// What an engine of the tests says that it is.
pub fn facts() -> EngineFacts {
    EngineFacts {
        kind: "test".into(),
        server_version: "1".into(),
        size: 1,
        url: "http://engine".into(),
        delivery: "files".into(),
        answer_version: "none".into(),
        unchecked: None,
        model_bytes: None,
        groups: None,
    }
}
