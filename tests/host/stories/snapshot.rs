//! FastDeploy after real agents: versions by the snapshot of its model directory, a restart in between, and a load that fails.

use serde_json::json;

use crate::model::Model;
use crate::world::{Actor, World, behind, installed, until};

#[tokio::test(flavor = "multi_thread")]
async fn simulated_fastdeploy_takes_snapshots_and_restarts_on_last() {
    let world = World::start(json!({"pause": "Abort", "kvCache": "Reset"}), [Actor::fastdeploy(), Actor::new()]).await;
    world.until_ready(2).await;
    for version in [1, 2] {
        let checkpoint = Model::small(version).save(&world.folder().join(format!("v{version}")));
        assert_eq!(installed(&world.publish(&checkpoint, version, &[]).await.done()).len(), 2);
        assert!(world.serves(0, &Model::small(version)).await && world.serves(1, &Model::small(version)).await);
    }
    world.spoil(0, &json!({"rules": [{"path": "/v1/is_paused", "times": 1, "fault": {"kind": "crash"}}]})).await;
    // Started again by its supervisor, without faults, it reads the snapshot that is there.
    until("the restart", || async { world.simulator(0, "faults").await["rules"] == json!([]) }).await;
    world.until_serves(0, &Model::small(2)).await;
    world.until_ready(2).await;
    let checkpoint = Model::small(3).save(&world.folder().join("v3"));
    world.publish(&checkpoint, 3, &[]).await.done();
    world.until_serves(0, &Model::small(3)).await;
    world.until_ready(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_fastdeploy_whose_load_fails_is_healed_by_next() {
    let world = World::start(json!({"pause": "Abort", "kvCache": "Reset", "minReady": 1}), [Actor::fastdeploy(), Actor::new()]).await;
    world.until_ready(2).await;
    world.spoil(0, &json!({"load": "failHalfway"})).await;
    let checkpoint = Model::small(1).save(&world.folder().join("v1"));
    let result = world.publish(&checkpoint, 1, &[]).await.done();
    assert_eq!(installed(&result), ["actor-1"]);
    assert!(!behind(&result, "actor-0").is_empty());
    assert_eq!(world.get(0, "/v1/is_paused").await["result"]["is_paused"], json!(true), "half an update is not let run");
    world.spoil(0, &json!({})).await;
    let checkpoint = Model::small(2).save(&world.folder().join("v2"));
    world.publish(&checkpoint, 2, &[]).await.done();
    world.until_serves(0, &Model::small(2)).await;
    world.until_ready(2).await;
    assert_eq!(world.get(0, "/v1/is_paused").await["result"]["is_paused"], json!(false));
}
