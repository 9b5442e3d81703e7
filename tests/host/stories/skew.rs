//! How far versions in service may be apart: a replica that failed to switch serves on, as long as the object's limit lets it.

use serde_json::json;

use crate::model::Model;
use crate::world::{Actor, World, installed, spoiled, unavailable, until};

/// Publishes a version that only the first replica can switch to.
async fn publish_to_one(world: &World, version: u64) {
    let checkpoint = Model::small(version).save(&world.folder().join(format!("v{version}")));
    assert_eq!(installed(&world.publish(&checkpoint, version, &[]).await.done()), ["actor-0"]);
    // By its own word the second one knows of it: that it is ready is no ignorance.
    until("the other to hear of it", || async { world.roster("actor-1").await["version"] == version }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_that_failed_to_switch_serves_until_next_version() {
    let world = World::start(json!({"maxSkew": 1}), [Actor::new(), Actor::new()]).await;
    world.until_ready(2).await;
    let checkpoint = Model::small(1).save(&world.folder().join("v1"));
    assert_eq!(installed(&world.publish(&checkpoint, 1, &[]).await.done()).len(), 2);
    world.spoil(1, &spoiled("/pause", &unavailable())).await;

    publish_to_one(&world, 2).await;
    assert_eq!(world.page("actor-1", "/readyz").await.0, 200, "one version behind is near enough");
    assert!(world.serves(1, &Model::small(1)).await);

    publish_to_one(&world, 3).await;
    let (status, why) = world.page("actor-1", "/readyz").await;
    assert!(status == 503 && why.contains("the newest in service is 3"), "{status} {why}");

    world.spoil(1, &json!({})).await;
    until("it to be ready with the newest", || async {
        world.serves(1, &Model::small(3)).await && world.page("actor-1", "/readyz").await.0 == 200
    })
    .await;
}
