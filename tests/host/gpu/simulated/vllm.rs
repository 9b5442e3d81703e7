use serde_json::{Value, json};
use weightsync_core::protocol::worker::{NcclId, Proof};

use super::{A_WHILE, Fixture, Reply, bucket, model};
use crate::world::SOON;

fn info(fixture: &Fixture, id: &NcclId, more: Value) -> Value {
    let info = json!({"rank_offset": 1, "world_size": fixture.world(), "nccl_unique_id_b64": id.to_base64()});
    json!({"init_info": super::with(info, more)})
}

/// What a call announces.
fn announced(tensors: &Value) -> Value {
    json!({"update_info": {"names": tensors["names"], "dtype_names": tensors["dtypes"], "shapes": tensors["shapes"]}})
}

fn assert_raised(reply: &Reply, words: &str) {
    assert!(reply.0 == 500 && reply.1["error"]["message"].as_str().unwrap().contains(words), "{reply:?}");
}

fn assert_done(reply: &Reply, words: &str) {
    assert_eq!((reply.0, &reply.1["message"]), (200, &json!(words)));
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_vllm_joins_in_the_call_and_takes_both_buckets() {
    let fixture = Fixture::new("vllm", 2).await;
    for (group, packed) in [(1, false), (2, true)] {
        let new = model(group);
        let id = fixture.zero.worker.unique_id(SOON).await.unwrap();
        // 100 KiB: a bucket ends with the tensor that makes it longer, so two of 64 KiB are one.
        let init = fixture
            .call("/init_weight_transfer_engine", info(&fixture, &id, json!({"packed": packed, "packed_buffer_size_bytes": 100 << 10})));
        tokio::pin!(init);
        assert!(tokio::time::timeout(A_WHILE, &mut init).await.is_err(), "it waits for rank 0 (trap 1)");
        let (init, ()) = tokio::join!(init, fixture.join(group, id, Proof::AllReduce));
        assert_done(&init, "Weight transfer initialized");
        assert_done(&fixture.call("/start_weight_update", json!({})).await, "Weight update started");
        let (tensors, bytes) = bucket(&new, 0..4);
        let send = async {
            for part in bytes.chunks(if packed { 128 << 10 } else { 64 << 10 }) {
                fixture.send(group, part).await;
            }
        };
        assert_done(&tokio::join!(fixture.call("/update_weights", announced(&tensors)), send).0, "Weights updated");
        assert_done(&fixture.call("/finish_weight_update", json!({"weight_version": format!("v{group}")})).await, "Weight update finished");
        assert!(fixture.serves(&new).await);
        assert_eq!(fixture.get("/weight_info").await.1["weight_version"], format!("v{group}"));
        assert_done(&fixture.call("/shutdown_weight_transfer_engine", json!({})).await, "Weight transfer shut down");
        fixture.abort(group).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_vllm_names_a_wrong_init_and_a_wrong_order() {
    let fixture = Fixture::new("vllm", 1).await;
    let id = fixture.zero.worker.unique_id(SOON).await.unwrap();
    let init = async |body| fixture.call("/init_weight_transfer_engine", body).await;
    assert_raised(&init(info(&fixture, &id, json!({"packed_bytes": 1}))).await, "unexpected keyword argument 'packed_bytes'");
    assert_raised(&init(info(&fixture, &id, json!({"master_address": "a"}))).await, "OR master_address/master_port, not both");
    assert_raised(&init(info(&fixture, &id, json!({"nccl_unique_id_b64": "QUJD"}))).await, "must decode to 128 bytes, got 3");
    assert_raised(&init(json!({"init_info": {"rank_offset": 1}})).await, "'world_size'");
    assert_eq!(init(json!({})).await.0, 400);
    let (tensors, _) = bucket(&model(1), 0..1);
    let update = async || fixture.call("/update_weights", announced(&tensors)).await;
    assert_raised(&update().await, "start_weight_update must be called before update_weights");
    assert_raised(&fixture.call("/finish_weight_update", json!({})).await, "without a matching start_weight_update");
    assert_done(&fixture.call("/start_weight_update", json!({})).await, "Weight update started");
    assert_raised(&fixture.call("/start_weight_update", json!({})).await, "already active");
    assert_raised(&fixture.call("/shutdown_weight_transfer_engine", json!({})).await, "during a weight update");
    // F92: what a dead trainer left open is closed by a finish.
    assert_done(&fixture.call("/finish_weight_update", json!({})).await, "Weight update finished");
    assert_done(&fixture.call("/start_weight_update", json!({})).await, "Weight update started");
    assert_raised(&update().await, "not initialized");
    assert_raised(&update().await, "start_weight_update must be called before update_weights");
    let none = Fixture::with("vllm", 1, |options| options.weight_transfer = None).await;
    assert_raised(&none.call("/init_weight_transfer_engine", info(&none, &id, json!({}))).await, "Weight transfer not configured");
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_vllm_without_rank_0s_all_reduce_is_stuck() {
    // Trap 2.
    let fixture = Fixture::new("vllm", 1).await;
    let id = fixture.zero.worker.unique_id(SOON).await.unwrap();
    let call = fixture.unanswered("/init_weight_transfer_engine", info(&fixture, &id, json!({})));
    tokio::join!(call, fixture.join(1, id, Proof::Nothing));
    assert_eq!(fixture.get("/health").await.0, 200);
    fixture.unanswered("/v1/completions", json!({"model": "model", "prompt": "a", "max_tokens": 1})).await;
    fixture.unanswered("/start_weight_update", json!({})).await;
    assert_eq!(fixture.machine.violations(), "");
}
