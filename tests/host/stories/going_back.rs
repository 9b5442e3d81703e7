//! Versions without the trainer, and going back to earlier ones.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::model::Model;
use crate::world::{Actor, World, installed, until};

/// A group of two engines of two kinds that was at version 1 and is at version 2.
async fn at_two() -> World {
    let world = World::start(json!({"keep": 2, "minReady": 2}), [Actor::new(), Actor::sglang()]).await;
    world.until_ready(2).await;
    for version in [1, 2] {
        publish(&world, version).await;
    }
    world
}

async fn publish(world: &World, version: u64) {
    let checkpoint = Model::small(version).save(&world.folder().join(format!("v{version}")));
    assert_eq!(installed(&world.publish(&checkpoint, version, &[]).await.done()).len(), 2);
}

async fn all_serve(world: &World, version: u64) {
    for number in 0..2 {
        world.until_serves(number, &Model::small(version)).await;
    }
    until("the roster to say so", || async {
        let roster = world.roster("trainer").await;
        let replicas = roster["replicas"].as_array().cloned().unwrap_or_default();
        let there = |replica: &Value| replica["version"] == version && replica["state"] == "ready";
        roster["version"] == version && replicas.len() == 2 && replicas.iter().all(there)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn local_group_rolls_back_by_its_file_then_takes_higher_one() {
    let mut world = at_two().await;
    world.target(Some(1)).await;
    world.event("the group to go back", |event| event["reason"] == "RolledBack").await;
    all_serve(&world, 1).await;
    let checkpoint = Model::small(3).save(&world.folder().join("v3"));
    let error = world.publish(&checkpoint, 3, &[]).await.failed();
    assert_eq!((&error["code"], &error["retryable"]), (&json!("VersionPinned"), &json!(true)), "{error}");
    assert!(error["message"].as_str().unwrap().contains("targetVersion"), "{error}");

    world.target(None).await;
    let refused = async {
        loop {
            let error = world.publish(&checkpoint, 2, &[]).await.failed();
            // Until the members heard that the target is taken away.
            if error["code"] != "VersionPinned" {
                return error;
            }
        }
    };
    let error = tokio::time::timeout(crate::world::SOON, refused).await.expect("the target is taken away");
    assert_eq!(error["code"], "VersionNotHigher", "{error}");
    assert!(error["message"].as_str().unwrap().contains("went back"), "{error}");
    publish(&world, 3).await;
    all_serve(&world, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rollouts_go_back_by_themselves_when_the_trainer_is_gone() {
    let mut world = at_two().await;
    world.signal("trainer", Signal::STOP).await;
    world.reported("AgentLost", "trainer/trainer").await;
    world.target(Some(1)).await;
    world.event("the group to go back", |event| event["reason"] == "RolledBack").await;
    for number in 0..2 {
        world.until_serves(number, &Model::small(1)).await;
    }
    world.target(Some(7)).await;
    let missing = world.event("what is kept to be said", |event| event["reason"] == "TargetVersionMissing").await;
    let message = missing["message"].as_str().unwrap();
    assert!(message.contains("version 7") && message.contains("2 (by 2), 1 (by 2)"), "{message}");
    assert!(world.serves(0, &Model::small(1)).await && world.serves(1, &Model::small(1)).await, "everything stays as it is");
}

/// THUDM/slime, NVIDIA-NeMo/RL: no one covers a trainer that is lost.
/// Story F44.
#[tokio::test(flavor = "multi_thread")]
async fn rollouts_serve_and_feed_while_the_trainer_is_gone() {
    let mut world = World::start(json!({}), [Actor::new(), Actor::sglang(), Actor::new().absent()]).await;
    world.until_ready(2).await;
    publish(&world, 5).await;
    world.signal("trainer", Signal::STOP).await;
    world.reported("AgentLost", "trainer/trainer").await;
    world.start_engine(2);
    for number in 0..3 {
        world.until_serves(number, &Model::small(5)).await;
    }
    // Another life of the trainer's agent, which knows nothing of before.
    let before = world.agent("trainer").await;
    world.signal("trainer", Signal::KILL).await;
    until("the trainer to be made again", || async { world.agent("trainer").await != before }).await;
    world.until_ready(3).await;
    let lower = Model::small(4).save(&world.folder().join("v4"));
    let error = world.publish(&lower, 4, &[]).await.failed();
    assert_eq!((&error["code"], &error["retryable"]), (&json!("VersionNotHigher"), &json!(false)), "{error}");
    assert!(error["message"].as_str().unwrap().contains("version 4 is not higher than 5"), "{error}");
    for number in 0..3 {
        assert!(world.serves(number, &Model::small(5)).await, "actor-{number} serves what it served");
    }
    let higher = Model::small(6).save(&world.folder().join("v6"));
    assert_eq!(installed(&world.publish(&higher, 6, &[]).await.done()).len(), 3);
}
