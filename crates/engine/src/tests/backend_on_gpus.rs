//! vLLM with WeightSync's own back end, whose workers copy from GPU memory.

use super::gpu::GpuBench;
use super::support::{SOON, held, post};
use crate::{EngineError, Holding, InstallError, Left};
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};
use weightsync_testkit::simulator::WeightTransfer;

/// Two ranks, each on a GPU of its own.
async fn bench(on_gpus: bool) -> GpuBench {
    GpuBench::start("vllm", 2, None, |options| {
        options.weight_transfer = Some(WeightTransfer::weightsync());
        if !on_gpus {
            options.gpu_memory = None;
        }
    })
    .await
}

/// Passes the first bucket, after `spoil` changed it.
async fn one_bucket(on: &GpuBench, spoil: impl Fn(&mut crate::DeviceBucket)) -> InstallError {
    let (version, job) = (on.version(2), on.job(2));
    let mut install = on.engine.begin_device(&job).await.unwrap();
    let mut bucket = version.bucket(version.layout.bucket(0).unwrap());
    spoil(&mut bucket);
    install.bucket(bucket).await.unwrap_err()
}

#[tokio::test]
async fn versions_equal_fresh_servers_with_slots_overwritten() {
    let on = bench(true).await;
    let route = on.engine.device_route(PausePolicy::Abort, KvCachePolicy::Reset, SOON).await.unwrap();
    assert_eq!(route.name, "weightsync");
    for version in [2, 3, 2] {
        on.install(version).await.unwrap();
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(version).await);
        assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Version(held(version)));
    }
}

#[tokio::test]
async fn engine_without_a_pause_is_not_fed_this_way() {
    let on = bench(true).await;
    let error = on.engine.device_route(PausePolicy::External, KvCachePolicy::Reset, SOON).await.unwrap_err();
    assert!(error.to_string().contains("half of the buckets"), "{error}");
}

#[tokio::test]
async fn a_session_that_a_dead_agent_left_open_is_ended_first() {
    let on = bench(true).await;
    let call = format!("{}/start_weight_update", on.bench.simulator.url());
    assert_eq!(post(&call, &serde_json::json!({})).await.0, 200);
    on.install(2).await.unwrap();
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(2).await);
}

#[tokio::test]
async fn copy_that_differs_ends_install_naming_the_tensor() {
    let on = bench(true).await;
    let error = one_bucket(&on, |bucket| bucket.sums[0] ^= 1).await;
    let words = error.to_string();
    assert!(error.is_dirty() && words.contains("rank 0") && words.contains("its digest is"), "{words}");
    assert!(on.bench.is_paused().await);
    on.install(3).await.unwrap();
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(3).await);
}

#[tokio::test]
async fn broken_stream_leaves_engine_held_until_fed() {
    let on = bench(true).await;
    let (version, job) = (on.version(2), on.job(2));
    let install = version.feed_some(on.engine.as_ref(), &job, 2).await;
    assert_eq!(install.abandon("the stream broke").await, Left::Mixture);
    assert!(on.bench.is_paused().await);
    on.install(3).await.unwrap();
    assert!(!on.bench.is_paused().await);
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(3).await);
}

#[tokio::test]
async fn worker_on_cpu_or_other_gpu_is_named_untouched() {
    let on_cpus = bench(false).await;
    let error = one_bucket(&on_cpus, |_| ()).await;
    assert!(!error.is_dirty() && matches!(error.source, EngineError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("not on a GPU"), "{error}");

    let on = bench(true).await;
    let error = one_bucket(&on, |bucket| bucket.places.truncate(1)).await;
    assert!(!error.is_dirty() && error.to_string().contains("where a worker of the engine is"), "{error}");
    for bench in [on, on_cpus] {
        assert!(!bench.bench.is_paused().await);
        assert_eq!(bench.bench.digest().await, bench.bench.fresh_digest(1).await);
    }
}
