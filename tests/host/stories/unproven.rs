//! Installs whose end proved nothing, and groups that end while an engine is held: the engine itself is asked what it does.

use serde_json::{Value, json};

use crate::model::Model;
use crate::world::{Actor, World, spoiled, until};

async fn is_paused(world: &World, number: usize) -> bool {
    world.get(number, "/is_paused").await["is_paused"] == json!(true)
}

fn five_hundred() -> Value {
    json!({"kind": "answer", "status": 500, "body": {"error": "it does not resume"}})
}

/// The engine loaded version 2 and is held: no one may be informed that it serves version 1.
#[tokio::test(flavor = "multi_thread")]
async fn engine_that_does_not_resume_is_proven_once_it_does() {
    let world = World::start(json!({"timeoutSeconds": 5}), [Actor::new()]).await;
    world.until_ready(1).await;
    let (one, two) = (Model::small(1), Model::small(2));
    world.publish(&one.save(&world.folder().join("v1")), 1, &[]).await.done();

    world.spoil(0, &spoiled("/resume", &five_hundred())).await;
    world.publish(&two.save(&world.folder().join("v2")), 2, &["--timeout", "4"]).await.failed();
    assert!(world.serves(0, &two).await && is_paused(&world, 0).await, "it loaded the version, and is held");
    // Readiness stays as it is until the update's time is over.
    until("the pod not to be ready", || async { world.page("actor-0", "/readyz").await.0 == 503 }).await;
    until("the roster to say so", || async { world.replicas("unknown").await.len() == 1 }).await;

    world.spoil(0, &json!({})).await;
    until("the engine to run", || async { !is_paused(&world, 0).await }).await;
    until("the roster to say what the engine holds", || async {
        let roster = world.roster("trainer").await;
        let version = roster["replicas"][0]["version"].as_u64();
        let holds = if world.serves(0, &two).await { 2 } else { 1 };
        roster["replicas"][0]["state"] == "ready" && version == Some(holds)
    })
    .await;
}

/// `weightsync local` ends in good order while an engine that it did not start holds half an update.
#[tokio::test(flavor = "multi_thread")]
async fn end_of_local_leaves_no_engine_paused() {
    let mut world = World::start(json!({"timeoutSeconds": 3}), [Actor::new().absent()]).await;
    world.start_engine(0);
    world.until_ready(1).await;
    let (one, two) = (Model::small(1), Model::small(2));
    world.publish(&one.save(&world.folder().join("v1")), 1, &[]).await.done();
    world.spoil(0, &json!({"load": "failHalfway"})).await;
    world.publish(&two.save(&world.folder().join("v2")), 2, &["--timeout", "4"]).await.failed();
    assert!(is_paused(&world, 0).await);

    world.spoil(0, &json!({})).await;
    world.stop();
    assert!(!is_paused(&world, 0).await, "no one is left to resume it");
    assert!(world.serves(0, &one).await || world.serves(0, &Model::small(0)).await, "it is whole");
}
