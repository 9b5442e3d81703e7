use serde_json::json;
use weightsync_core::protocol::worker::Proof;
use weightsync_torch::store::nccl_id_keys;

use super::{A_WHILE, Fixture, assert_refused, assert_well, bucket, model, with};
use crate::world::{SOON, until};

#[tokio::test(flavor = "multi_thread")]
async fn version_reaches_both_simulated_sglang_ranks_name_reusable() {
    let fixture = Fixture::new("sglang", 2).await;
    for (round, group) in [(1, 10), (2, 11)] {
        let new = model(round);
        let id = fixture.publish_id("weights").await;
        assert_well(&fixture.call("/init_weights_update_group", fixture.meeting("weights")).await);
        fixture.store.wait_for_clients(2, SOON).await.unwrap();
        assert_refused(&fixture.call("/init_weights_update_group", fixture.meeting("weights")).await, "has already been created");
        assert_well(&fixture.call("/begin_weight_update", json!({})).await);
        let (first, bytes) = bucket(&new, 0..2);
        let more = json!({"group_name": "weights", "load_format": "flattened_bucket", "flush_cache": false});
        // The communicator is made within the first update, on both sides.
        let update = fixture.call("/update_weights_from_distributed", with(first, more.clone()));
        let send = async {
            fixture.join(group, id, Proof::Nothing).await;
            fixture.send(group, &bytes).await;
        };
        assert_well(&tokio::join!(update, send).0);
        let (second, _) = bucket(&new, 2..4);
        let tensors = async {
            fixture.send(group, &new.bytes(2)).await;
            fixture.send(group, &new.bytes(3)).await;
        };
        let last = with(second, json!({"group_name": "weights", "weight_version": format!("v{round}")}));
        assert_well(&tokio::join!(fixture.call("/update_weights_from_distributed", last), tensors).0);
        assert_well(&fixture.call("/end_weight_update", json!({})).await);
        assert!(fixture.serves(&new).await);
        assert_eq!(fixture.get("/model_info").await.1["weight_version"], format!("v{round}"));
        // Leaving is a rendezvous: the engine waits for rank 0, which aborts.
        let destroy = fixture.call("/destroy_weights_update_group", json!({"group_name": "weights"}));
        tokio::pin!(destroy);
        assert!(tokio::time::timeout(A_WHILE, &mut destroy).await.is_err());
        fixture.abort(group).await;
        assert_well(&destroy.await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_sglang_refuses_wrong_order_before_broadcast() {
    let fixture = Fixture::new("sglang", 1).await;
    let flattened = json!({"load_format": "flattened_bucket", "group_name": "g"});
    let (tensors, _) = bucket(&model(1), 0..1);
    let update = async |body| fixture.call("/update_weights_from_distributed", body).await;
    // Trap 14, and what a sender that broadcasts all the same would hang on (trap 4).
    assert_refused(
        &update(with(tensors.clone(), flattened.clone())).await,
        "must run between begin_weight_update() and end_weight_update()",
    );
    assert_refused(&fixture.call("/end_weight_update", json!({})).await, "no weight-update session is open");
    assert_refused(&fixture.call("/destroy_weights_update_group", json!({"group_name": "g"})).await, "does not exist");
    assert_well(&fixture.call("/begin_weight_update", json!({})).await);
    assert_refused(&fixture.call("/begin_weight_update", json!({})).await, "already open");
    let words = "Failed to receive weights: Group g not in []. Please call `init_weights_update_group` first.";
    assert_refused(&update(with(tensors, flattened.clone())).await, words);
    fixture.publish_id("g").await;
    assert_well(&fixture.call("/init_weights_update_group", fixture.meeting("g")).await);
    let odd = json!({"names": ["a", "b"], "dtypes": ["uint8", "float32"], "shapes": [[3], [1]]});
    assert_refused(&update(with(odd, flattened.clone())).await, "Unaligned received tensor");
    assert_refused(&update(with(json!({"names": [], "dtypes": [], "shapes": []}), flattened.clone())).await, "empty");
    let unknown = json!({"names": ["a"], "dtypes": ["bf16"], "shapes": [[1]]});
    assert_refused(&update(with(unknown, flattened)).await, "module 'torch' has no attribute 'bf16'");
    assert_eq!(fixture.call("/init_weights_update_group", json!({"group_name": "h"})).await.0, 400);
    assert_eq!(fixture.store.readers(&nccl_id_keys("g")[0]), 0, "no rank asked for the id");
}

#[tokio::test(flavor = "multi_thread")]
async fn unanswered_store_stops_simulated_sglang_until_it_gives_up() {
    // Trap 8: the scheduler tries the store, and does nothing else.
    let fixture = Fixture::with("sglang", 1, |options| options.groups.as_mut().unwrap().patience = 4 * A_WHILE).await;
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let lost = with(fixture.meeting("g"), json!({"master_port": free}));
    let (init, ()) = tokio::join!(fixture.call("/init_weights_update_group", lost), async {
        tokio::time::sleep(A_WHILE / 3).await;
        fixture.unanswered("/generate", json!({"text": "a", "sampling_params": {"max_new_tokens": 1}})).await;
    });
    assert_refused(&init, "Failed to initialize custom process group");
    assert_eq!(fixture.get("/server_info").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn nccl2_group_accepts_a_bucket_from_no_rank_legacy_refuses() {
    // Trap 15: torch 2.15, where the group is none.
    let fixture = Fixture::with("sglang", 1, |options| options.groups.as_mut().unwrap().torch = (2, 15)).await;
    let new = model(1);
    let id = fixture.publish_id("g").await;
    assert_well(&fixture.call("/init_weights_update_group", fixture.meeting("g")).await);
    // Nothing keeps what met at the store: the connection goes with it.
    until("the ranks to leave the store", || async { fixture.store.clients() == 0 }).await;
    assert_well(&fixture.call("/begin_weight_update", json!({})).await);
    let (tensors, bytes) = bucket(&new, 0..4);
    let flattened = with(tensors.clone(), json!({"group_name": "g", "load_format": "flattened_bucket"}));
    assert_well(&fixture.call("/update_weights_from_distributed", flattened).await);
    let single = with(tensors.clone(), json!({"group_name": "g"}));
    assert_refused(&fixture.call("/update_weights_from_distributed", single).await, "'NoneType' object has no attribute 'wait'");
    assert_well(&fixture.call("/end_weight_update", json!({})).await);
    assert!(!fixture.serves(&new).await && !fixture.serves(&model(0)).await, "it serves what lay in its memory");
    assert_eq!(fixture.store.readers(&nccl_id_keys("g")[0]), 0, "which shows in the store");
    assert_well(&fixture.call("/destroy_weights_update_group", json!({"group_name": "g"})).await);

    let legacy = with(fixture.meeting("g"), json!({"backend": "nccl-legacy"}));
    assert_well(&fixture.call("/init_weights_update_group", legacy).await);
    assert_well(&fixture.call("/begin_weight_update", json!({})).await);
    let update = with(tensors, json!({"group_name": "g", "load_format": "flattened_bucket"}));
    let send = async {
        fixture.join(1, id, Proof::Nothing).await;
        fixture.send(1, &bytes).await;
    };
    assert_well(&tokio::join!(fixture.call("/update_weights_from_distributed", update), send).0);
    assert_well(&fixture.call("/end_weight_update", json!({})).await);
    assert!(fixture.serves(&new).await);
    fixture.abort(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_sglang_hides_an_error_of_a_rank_but_the_first() {
    // Trap 18.
    let fixture = Fixture::new("sglang", 2).await;
    let new = model(1);
    let id = fixture.publish_id("g").await;
    assert_well(&fixture.call("/init_weights_update_group", fixture.meeting("g")).await);
    assert_well(&fixture.call("/begin_weight_update", json!({})).await);
    let (tensors, bytes) = bucket(&new, 0..4);
    let update = with(tensors, json!({"group_name": "g", "load_format": "flattened_bucket"}));
    let faults = fixture.call("/simulator/faults", json!({"load": "failHalfwayOnce", "loadRank": 1})).await;
    assert_eq!(faults.0, 200);
    let send = async {
        fixture.join(1, id, Proof::Nothing).await;
        fixture.send(1, &bytes).await;
    };
    assert_well(&tokio::join!(fixture.call("/update_weights_from_distributed", update), send).0);
    assert_well(&fixture.call("/end_weight_update", json!({})).await);
    assert!(!fixture.serves(&new).await);
    fixture.abort(1).await;
}
