//! Installs from shared memory into the simulated vLLM that was started with our own back end.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::support::{Bench, SOON, adapter, held};
use crate::{
    EngineError, Holding, HostBucket, HostDigest, HostInstall, HostJob, HostMemory, HostTensor, InstallError, InstallReport, InstallTerms,
};
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};
use weightsync_core::weights::Layout;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_testkit::simulator::{Fault, FaultRule, Faults, LoadFault, SimulatorOptions, WeightTransfer};

/// A version and the memory from which it is fed.
pub(super) struct Version {
    checkpoint: Checkpoint,
    pub(super) layout: Arc<Layout>,
    pub(super) memory: File,
    number: u64,
}

impl Version {
    fn of(bench: &Bench, number: u64) -> Self {
        Self::from(Checkpoint::open(&bench.directory(number)).unwrap(), number)
    }

    pub(super) fn from(checkpoint: Checkpoint, number: u64) -> Self {
        let layout = Arc::new(Layout::new("model", checkpoint.specs(), 64).unwrap());
        let memory = tempfile::tempfile().unwrap();
        memory.set_len(layout.total_bytes).unwrap();
        Self { checkpoint, layout, memory, number }
    }

    pub(super) fn job(&self) -> HostJob {
        HostJob {
            terms: InstallTerms {
                version: held(self.number),
                pause: PausePolicy::Keep,
                kv_cache: KvCachePolicy::Reset,
                canary: None,
                timeout: SOON,
                cancel: CancellationToken::new(),
            },
            layout: self.layout.clone(),
            memory: Arc::new(HostMemory::of(&self.memory, self.layout.total_bytes).unwrap()),
            silence: SOON,
        }
    }

    /// The tensor with that index, written at its place in the stream, or at the beginning of the memory.
    pub(super) fn bucket(&self, index: usize, digest: HostDigest, place: Option<u64>) -> HostBucket {
        let entry = &self.layout.entries[index];
        let mut bytes = vec![0; usize::try_from(entry.bytes).unwrap()];
        self.checkpoint.read_tensor(index, 0, &mut bytes).unwrap();
        let offset = place.unwrap_or(entry.offset);
        self.memory.write_all_at(&bytes, offset).unwrap();
        let tensor = HostTensor { spec: entry.tensor.clone(), offset, bytes: entry.bytes, digest: digest.of(&bytes) };
        HostBucket { sequence: u32::try_from(index).unwrap(), copy: false, tensors: vec![tensor] }
    }

    async fn tell(&self, install: &mut Box<dyn HostInstall>) -> Result<(), InstallError> {
        for index in 0..self.layout.entries.len() {
            let bucket = self.bucket(index, install.digest(), None);
            install.bucket(bucket).await?;
        }
        Ok(())
    }

    pub(super) async fn install(&self, bench: &Bench) -> Result<InstallReport, InstallError> {
        let mut install = bench.engine.begin_host(&self.job()).await?;
        self.tell(&mut install).await?;
        install.finish(held(self.number)).await
    }
}

pub(super) async fn bench(more: impl FnOnce(&mut SimulatorOptions)) -> Bench {
    let with = |options: &mut SimulatorOptions| {
        options.weight_transfer = Some(WeightTransfer::weightsync());
        more(options);
    };
    Bench::start_with("vllm", Faults::default(), with).await
}

fn digests(names: &[&str]) -> WeightTransfer {
    WeightTransfer { digests: names.iter().map(|name| (*name).to_owned()).collect(), ..WeightTransfer::weightsync() }
}

#[tokio::test]
async fn all_ranks_check_a_version_while_the_engine_serves() {
    for names in [&["blake3"][..], &["xxh3-128", "blake3"]] {
        let bench = bench(|options| (options.world_size, options.weight_transfer) = (2, Some(digests(names)))).await;
        let before = bench.digest().await;
        let version = Version::of(&bench, 2);
        let mut install = bench.engine.begin_host(&version.job()).await.unwrap();
        assert_eq!(install.digest().name(), names[0]);
        version.tell(&mut install).await.unwrap();
        assert!(!bench.is_paused().await);
        assert_eq!(bench.digest().await, before);
        let report = install.finish(held(2)).await.unwrap();
        let steps: Vec<_> = report.steps_ms.iter().map(|(step, _)| step.as_str()).collect();
        assert_eq!(steps, ["stage", "pause", "load", "check", "resume", "probe"]);
        assert_eq!(bench.digest().await, bench.fresh_digest(2).await);
        assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Version(held(2)));
        Version::of(&bench, 3).install(&bench).await.unwrap();
        assert_eq!(bench.digest().await, bench.fresh_digest(3).await);
    }
}

#[tokio::test]
async fn slot_reused_before_its_layer_loads_gives_wrong_weights() {
    let bench = bench(|_| {}).await;
    let version = Version::of(&bench, 2);
    let mut install = bench.engine.begin_host(&version.job()).await.unwrap();
    for index in 0..version.layout.entries.len() {
        // Incorrect use: the place is reused after the tensor was taken, and the tensor is not copied.
        let bucket = version.bucket(index, install.digest(), Some(0));
        install.bucket(bucket).await.unwrap();
        install.taken(u32::try_from(index).unwrap()).await.unwrap();
    }
    install.finish(held(2)).await.unwrap();
    assert_ne!(bench.digest().await, bench.fresh_digest(2).await);

    // With a copy it is right.
    let mut install = bench.engine.begin_host(&version.job()).await.unwrap();
    for index in 0..version.layout.entries.len() {
        let bucket = HostBucket { copy: true, ..version.bucket(index, install.digest(), Some(0)) };
        install.bucket(bucket).await.unwrap();
        install.taken(u32::try_from(index).unwrap()).await.unwrap();
    }
    install.finish(held(2)).await.unwrap();
    assert_eq!(bench.digest().await, bench.fresh_digest(2).await);
}

#[tokio::test]
async fn server_without_the_back_end_keeps_its_other_ways() {
    let bench = Bench::start("vllm").await;
    for _ in 0..3 {
        let refused = bench.engine.host_route(SOON).await.unwrap_err();
        assert!(matches!(refused, EngineError::Unsupported { .. }), "{refused}");
    }
    let facts = bench.engine.probe(SOON).await.unwrap();
    assert_eq!(facts.delivery, "reload_weights from a directory");
    // A call that all workers refuse would spoil the replies to later ones.
    assert!(!bench.calls().await.iter().any(|call| call.ends_with("/init_weight_transfer_engine")));
    let refused = Version::of(&bench, 2).install(&bench).await.unwrap_err();
    assert_eq!((refused.step, refused.is_dirty()), ("start", false));
    bench.engine.install(&bench.job(2)).await.unwrap();
    assert_eq!(bench.digest().await, bench.fresh_digest(2).await);
}

#[tokio::test]
async fn workers_without_digests_and_missing_ranks_are_named() {
    let blind = bench(|options| options.weight_transfer = Some(digests(&["sha1"]))).await;
    let refused = Version::of(&blind, 2).install(&blind).await.unwrap_err();
    assert!(!refused.is_dirty() && refused.to_string().contains("no digest"), "{refused}");
    assert!(!blind.is_paused().await);

    let lonely = bench(|_| {}).await;
    lonely.set_faults(Faults { world_size: Some(3), ..Faults::default() }).await;
    let version = Version::of(&lonely, 2);
    let job = HostJob { silence: Duration::from_millis(300), ..version.job() };
    let refused = lonely.engine.begin_host(&job).await.err().unwrap();
    assert!(!refused.is_dirty() && refused.to_string().contains("rank"), "{refused}");
    assert!(!lonely.is_paused().await);
    assert_eq!(lonely.digest().await, lonely.fresh_digest(1).await);
}

#[tokio::test]
async fn a_load_that_fails_holds_the_engine_until_it_is_fed_in_full() {
    let bench = bench(|_| {}).await;
    bench.set_faults(Faults { load: Some(LoadFault::FailHalfwayOnce), ..Faults::default() }).await;
    let failed = Version::of(&bench, 2).install(&bench).await.unwrap_err();
    assert!(failed.is_dirty() && failed.to_string().contains("out of memory"), "{failed}");
    assert!(bench.is_paused().await);
    assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::HalfAnUpdate(held(2)));
    Version::of(&bench, 2).install(&bench).await.unwrap();
    assert_eq!(bench.digest().await, bench.fresh_digest(2).await);
    assert!(!bench.is_paused().await);
}

#[tokio::test]
async fn foreign_open_session_is_ended_and_not_reused() {
    let bench = bench(|_| {}).await;
    let url = format!("{}/start_weight_update", bench.simulator.url());
    assert_eq!(super::support::client().post(url).send().await.unwrap().status(), 200);
    Version::of(&bench, 2).install(&bench).await.unwrap();
    assert_eq!(bench.digest().await, bench.fresh_digest(2).await);
    let finishes = bench.calls().await.iter().filter(|call| call.ends_with("/finish_weight_update")).count();
    assert_eq!(finishes, 2, "one that ends what was left, and ours");
}

#[tokio::test]
async fn a_reply_that_is_no_success_is_none_in_any_step() {
    for (path, dirty) in [
        ("/init_weight_transfer_engine", false),
        ("/pause", false),
        ("/start_weight_update", true),
        ("/update_weights", true),
        ("/finish_weight_update", true),
        ("/reset_encoder_cache", true),
        ("/reset_prefix_cache", true),
    ] {
        for fault in [Fault::unavailable(), Fault::Disconnect] {
            let bench = bench(|_| {}).await;
            bench.engine.probe(SOON).await.unwrap();
            let engine = adapter("vllm", &bench.simulator.url(), None, Some(bench.directory(1)));
            engine.host_route(SOON).await.unwrap();
            let rule = FaultRule { path: path.to_owned(), after: 0, times: None, fault };
            bench.set_faults(Faults { rules: vec![rule], ..Faults::default() }).await;
            let version = Version::of(&bench, 2);
            let mut job = version.job();
            job.terms.timeout = Duration::from_secs(3);
            let outcome = match engine.begin_host(&job).await {
                Ok(mut install) => match version.tell(&mut install).await {
                    Ok(()) => install.finish(held(2)).await.map(drop),
                    Err(error) => Err(error),
                },
                Err(error) => Err(error),
            };
            let failed = outcome.expect_err(path);
            assert_eq!(failed.is_dirty(), dirty, "{path}: {failed}");
            bench.set_faults(Faults::default()).await;
            let holding = bench.engine.holding(SOON).await.unwrap();
            assert_eq!(holding == Holding::HalfAnUpdate(held(2)), dirty, "{path}: {holding:?}");
            assert_eq!(bench.is_paused().await, dirty, "{path}");
        }
    }
}
