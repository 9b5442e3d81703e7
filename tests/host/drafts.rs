//! Versions with a draft model: who takes one, who is left out and why, and what an engine holds of both.

use serde_json::json;

use crate::model::Model;
use crate::world::{Actor, Published, World, behind, installed};

/// Makes the model and the draft model of a version, which have tensors of the same names.
pub type Make = fn(u64) -> Model;

fn draft(make: Make, version: u64) -> Model {
    make(version + 100)
}

/// Publishes both, and says what came of it.
pub async fn publish(world: &World, make: Make, version: u64) -> Published {
    let model = make(version).save(&world.folder().join(format!("v{version}")));
    let draft = draft(make, version).save(&world.folder().join(format!("v{version}-draft")));
    world.publish(&model, version, &["--draft", &draft.to_string_lossy()]).await
}

/// Whether an engine serves exactly both of that version.
pub async fn serves(world: &World, number: usize, make: Make, version: u64) -> bool {
    let held = world.simulator(number, "digest").await;
    held["tensors"] == make(version).digests() && held["draft"] == draft(make, version).digests()
}

#[tokio::test(flavor = "multi_thread")]
async fn both_models_reach_workers_and_draftless_engine_is_out() {
    let drafting = || Actor::new().with_backend().drafting();
    let world = World::start(json!({}), [drafting().ranks(2, 2), Actor::new().with_backend(), Actor::new().drafting()]).await;
    world.until_ready(3).await;
    for version in 1..=2 {
        let result = publish(&world, Model::small, version).await.done();
        assert_eq!(installed(&result), ["actor-0"], "{result}");
        assert!(behind(&result, "actor-1").contains("started without one"), "{result}");
        assert!(behind(&result, "actor-2").contains("does not take from a directory"), "{result}");
        assert!(serves(&world, 0, Model::small, version).await, "version {version}");
    }
    // A version without one brings the others back, and leaves the draft model as it is.
    let checkpoint = Model::small(3).save(&world.folder().join("v3"));
    world.publish(&checkpoint, 3, &[]).await.done();
    for number in 0..3 {
        world.until_serves(number, &Model::small(3)).await;
    }
    assert_eq!(world.simulator(0, "digest").await["draft"], draft(Model::small, 2).digests());
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_that_fails_with_the_draft_is_fed_in_full() {
    let world = World::start(json!({}), [Actor::new().with_backend().drafting()]).await;
    world.until_ready(1).await;
    let lost = json!({"path": "/start_draft_weight_update", "times": 1, "fault": {"kind": "disconnect"}});
    world.spoil(0, &json!({"rules": [lost]})).await;
    // By the next attempt, or by the next version.
    let version = if publish(&world, Model::small, 1).await.code == 0 { 1 } else { 2 };
    if version == 2 {
        publish(&world, Model::small, 2).await.done();
    }
    assert!(serves(&world, 0, Model::small, version).await);
    world.until_ready(1).await;
}
