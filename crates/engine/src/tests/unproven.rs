//! Routes from GPU memory that follow an engine's source: refused by default if they never ran on a GPU, and their effects.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use super::gpu::{GPUS, GpuBench};
use super::support::{SOON, held, post};
use crate::unproven::Unproven;
use crate::{EngineConfig, Holding, connect};
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};
use weightsync_core::weights::Dtype;
use weightsync_testkit::simulator::{Fault, FaultRule, Faults, WeightTransfer};
use weightsync_torch::{Device, Piece, SharedTensor, sglang_bucket};

/// Engine, ranks, the route, its call for a bucket, and the call that opens its session.
type Way = (&'static str, usize, &'static str, &'static str, &'static str);

const WAYS: [Way; 2] = [
    ("sglang", 2, "update_weights_from_tensor", "/update_weights_from_tensor", "/begin_weight_update"),
    ("vllm", 1, "ipc", "/update_weights", "/start_weight_update"),
];

/// A simulator whose adapter may or may not use the route.
async fn bench((kind, ranks, ..): Way, wanted: bool) -> GpuBench {
    let mut on = GpuBench::start(kind, ranks, None, |options| {
        options.weight_transfer = Some(WeightTransfer::of("ipc"));
        options.checkpoint_engine = kind == "sglang";
    })
    .await;
    on.engine = connect(EngineConfig {
        kind: kind.to_owned(),
        url: on.bench.simulator.url(),
        api_key: None,
        served_model: Some(on.bench.directory(1)),
        record: None,
        owner: "test".into(),
        processes: on.processes.path().to_owned(),
        unproven_routes: wanted,
    })
    .unwrap();
    on
}

async fn call(on: &GpuBench, path: &str, body: serde_json::Value) -> u16 {
    post(&format!("{}{path}", on.bench.simulator.url()), &body).await.0
}

#[test]
fn unseen_layouts_are_refused_and_unread_ones_always() {
    let way = Unproven { engine: "SGLang", way: "it", seen: &["0.5.22"], read: &["0.5.23"] };
    assert!(way.allowed("0.5.22", false).is_ok());
    assert!(way.allowed("0.5.23", true).is_ok());
    assert!(way.allowed("0.5.23", false).unwrap_err().contains("WEIGHTSYNC_UNPROVEN_ROUTES=1"));
    assert!(way.allowed("0.5.24", true).unwrap_err().contains("only that of 0.5.22 and 0.5.23"));
}

#[tokio::test]
async fn without_being_wanted_no_such_way_is_chosen() {
    let sglang = bench(WAYS[0], false).await;
    let route = sglang.engine.device_route(PausePolicy::Abort, KvCachePolicy::Reset, SOON).await.unwrap();
    assert_eq!(route.name, "checkpoint-engine");
    // vLLM 0.32.0 ran on a GPU.
    let vllm = bench(WAYS[1], false).await;
    assert_eq!(vllm.engine.device_route(PausePolicy::Abort, KvCachePolicy::Reset, SOON).await.unwrap().name, "ipc");
    let two = bench(("vllm", 2, "", "", ""), true).await;
    let error = two.engine.device_route(PausePolicy::Abort, KvCachePolicy::Reset, SOON).await.unwrap_err();
    assert!(error.to_string().contains("with one worker only"), "{error}");
}

#[tokio::test]
async fn three_versions_equal_fresh_servers_with_slots_overwritten() {
    for way in WAYS {
        let on = bench(way, true).await;
        let route = on.engine.device_route(PausePolicy::Abort, KvCachePolicy::Reset, SOON).await.unwrap();
        assert_eq!(route.name, way.2);
        for version in [2, 3, 2] {
            on.install(version).await.unwrap();
            assert_eq!(on.bench.digest().await, on.bench.fresh_digest(version).await, "{way:?}");
            assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Version(held(version)), "{way:?}");
        }
    }
}

/// Story F92.
#[tokio::test]
async fn a_session_that_a_dead_trainer_left_open_is_ended_first() {
    for way in WAYS {
        let on = bench(way, true).await;
        assert_eq!(call(&on, way.4, json!({})).await, 200);
        on.install(2).await.unwrap();
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(2).await, "{way:?}");
    }
}

#[tokio::test]
async fn call_that_fails_midway_holds_engine_until_next_update() {
    for way in WAYS {
        let on = bench(way, true).await;
        let fault = Fault::Answer { status: 500, body: json!({"error": {"message": "no"}, "success": false}) };
        let rules = vec![FaultRule { path: way.3.into(), after: 1, times: Some(1), fault }];
        on.bench.set_faults(Faults { rules, ..Faults::default() }).await;
        let error = on.install(2).await.unwrap_err();
        assert!(error.is_dirty(), "{way:?}: {error}");
        assert!(on.bench.is_paused().await, "{way:?}");
        on.install(3).await.unwrap();
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(3).await, "{way:?}");
    }
}

#[tokio::test]
async fn simulated_sglang_without_our_shared_memory_is_not_trusted() {
    let on = bench(WAYS[0], true).await;
    on.bench.set_faults(Faults { blind_to_counters: true, ..Faults::default() }).await;
    let error = on.install(2).await.unwrap_err();
    assert!(error.is_dirty() && error.to_string().contains("share /dev/shm"), "{error}");
}

/// Trap 17.
#[tokio::test]
async fn simulated_sglang_reads_a_tensor_after_its_success() {
    let on = bench(("sglang", 1, "", "", ""), true).await;
    assert_eq!(call(&on, "/pause_generation", json!({"mode": "abort"})).await, 200);
    assert_eq!(call(&on, "/begin_weight_update", json!({})).await, 200);
    // The device executes its work so much later.
    on.bench.set_faults(Faults { late_ms: 500, ..Faults::default() }).await;
    let version = on.version(2);
    for bucket in version.layout.buckets() {
        let laid = version.bucket(bucket);
        let place = &laid.places[0];
        let tensor = SharedTensor {
            handle: place.handle.0,
            storage_offset: place.offset,
            storage_bytes: bucket.bytes,
            elements: bucket.bytes,
            dtype: Dtype::U8,
            device: Device::Uuid(GPUS[0].into()),
            counter: None,
        };
        let parts: Vec<_> = version.layout.parts(bucket.offset, bucket.bytes).collect();
        let pieces: Vec<Piece<'_>> = parts
            .iter()
            .map(|part| Piece {
                name: &part.entry.tensor.name,
                dtype: part.entry.tensor.dtype,
                shape: &part.entry.tensor.shape,
                offset: part.in_range,
                bytes: part.bytes,
            })
            .collect();
        let pickle = STANDARD.encode(sglang_bucket(&pieces, &tensor).unwrap().pickle());
        let body = json!({"serialized_named_tensors": [pickle], "load_format": "flattened_bucket", "flush_cache": false});
        assert_eq!(call(&on, "/update_weights_from_tensor", body).await, 200);
    }
    // The ring was reused while the device still read.
    assert_eq!(call(&on, "/end_weight_update", json!({})).await, 200);
    assert_ne!(on.bench.digest().await, on.bench.fresh_digest(2).await);
}
