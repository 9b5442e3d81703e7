use serde_json::json;
use weightsync_core::protocol::worker::Proof;

use super::{A_WHILE, Fixture, assert_refused, assert_well, bucket, model, with};
use crate::world::SOON;

#[tokio::test(flavor = "multi_thread")]
async fn simulated_lmdeploy_serves_no_version_before_it_is_finished() {
    let fixture = Fixture::new("lmdeploy", 2).await;
    let new = model(1);
    let id = fixture.publish_id("w").await;
    assert_well(&fixture.call("/init_weights_update_group", fixture.meeting("w")).await);
    assert_refused(&fixture.call("/init_weights_update_group", fixture.meeting("w")).await, "rank1: group 'w' already initialized");
    let (tensors, bytes) = bucket(&new, 0..4);
    let update =
        fixture.call("/update_weights_from_distributed", with(tensors, json!({"group_name": "w", "load_format": "flattened_bucket"})));
    let send = async {
        fixture.join(1, id, Proof::Nothing).await;
        fixture.send(1, &bytes).await;
    };
    assert_well(&tokio::join!(update, send).0);
    assert!(fixture.serves(&new).await);
    // Trap 14: every byte is there, and what is computed is stale until the last step, which needs no broadcast.
    let stale = fixture.text("before").await;
    let finish = json!({"names": [], "dtypes": [], "shapes": [], "group_name": "w", "finished": true});
    assert_well(&fixture.call("/update_weights_from_distributed", finish).await);
    assert_ne!(fixture.text("after").await, stale);
    fixture.abort(1).await;
    assert_well(&fixture.call("/destroy_weights_update_group", json!({"group_name": "w"})).await);
    assert_refused(&fixture.call("/destroy_weights_update_group", json!({"group_name": "w"})).await, "not initialized");
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_lmdeploy_refuses_mixed_types_and_no_ray() {
    let fixture = Fixture::new("lmdeploy", 1).await;
    fixture.publish_id("w").await;
    assert_well(&fixture.call("/init_weights_update_group", fixture.meeting("w")).await);
    let mixed = json!({"names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[1], [1]], "group_name": "w",
        "load_format": "flattened_bucket"});
    assert_refused(&fixture.call("/update_weights_from_distributed", mixed).await, "All tensors should have same dtype");
    let unknown = json!({"names": [], "dtypes": [], "shapes": [], "group_name": "x"});
    assert_refused(&fixture.call("/update_weights_from_distributed", unknown).await, "group 'x' not initialized");
    assert_eq!(fixture.call("/destroy_weights_update_group", json!({})).await.0, 422);
    let legacy = with(fixture.meeting("y"), json!({"backend": "nccl-legacy"}));
    assert_refused(&fixture.call("/init_weights_update_group", legacy).await, "Unknown c10d backend type NCCL-LEGACY");
    // F29: the default executor of one GPU has none of this.
    let plain = Fixture::with("lmdeploy", 1, |options| options.ray = false).await;
    assert_eq!(plain.call("/init_weights_update_group", plain.meeting("w")).await.0, 500);
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_lmdeploy_whose_rank_0_dies_is_stuck_yet_healthy() {
    let fixture = Fixture::new("lmdeploy", 1).await;
    let id = fixture.publish_id("w").await;
    assert_well(&fixture.call("/init_weights_update_group", fixture.meeting("w")).await);
    let (tensors, _) = bucket(&model(1), 0..4);
    let update = with(tensors, json!({"group_name": "w", "load_format": "flattened_bucket"}));
    let ((), ()) = tokio::join!(fixture.unanswered("/update_weights_from_distributed", update), fixture.join(1, id, Proof::Nothing));
    fixture.zero.worker.kill("the trainer died");
    fixture.zero.worker.ended().await;
    // Measured: health and a new init answer, a generation and the destroy never do.
    let (status, health) = fixture.get("/health").await;
    assert_eq!((status, &health["status"]), (200, &json!("healthy")));
    assert_well(&fixture.call("/init_weights_update_group", fixture.meeting("other")).await);
    fixture.unanswered("/v1/completions", json!({"model": "model", "prompt": "a", "max_tokens": 1})).await;
    fixture.unanswered("/destroy_weights_update_group", json!({"group_name": "w"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_0_that_dies_while_nothing_is_sent_does_no_harm() {
    let fixture = Fixture::new("lmdeploy", 1).await;
    let id = fixture.publish_id("w").await;
    assert_well(&fixture.call("/init_weights_update_group", fixture.meeting("w")).await);
    let new = model(1);
    let (tensors, bytes) = bucket(&new, 0..4);
    let update = with(tensors, json!({"group_name": "w", "load_format": "flattened_bucket", "finished": true}));
    let send = async {
        fixture.join(1, id, Proof::Nothing).await;
        fixture.send(1, &bytes).await;
    };
    assert_well(&tokio::join!(fixture.call("/update_weights_from_distributed", update), send).0);
    let destroy = fixture.call("/destroy_weights_update_group", json!({"group_name": "w"}));
    tokio::pin!(destroy);
    assert!(tokio::time::timeout(A_WHILE, &mut destroy).await.is_err(), "it waits for rank 0");
    fixture.zero.worker.kill("the trainer died");
    assert_well(&tokio::time::timeout(SOON, destroy).await.unwrap());
    assert!(fixture.serves(&new).await);
}
