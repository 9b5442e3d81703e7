//! An engine that is put to sleep by somebody else than us.

use serde_json::json;

use crate::model::Model;
use crate::world::{Actor, World, installed, until};

/// huggingface/trl#5312: a sleep of level 2, a wake-up, no update; from then on log-probs are those of no version.
/// Story F55.
#[tokio::test(flavor = "multi_thread")]
async fn engine_put_to_sleep_is_unready_and_refed_on_wake() {
    let mut world = World::start(json!({}), [Actor::new(), Actor::new()]).await;
    world.until_ready(2).await;
    let (one, two) = (Model::small(1), Model::small(2));
    world.publish(&one.save(&world.folder().join("v1")), 1, &[]).await.done();
    world.post(0, "/sleep?level=2", &json!({})).await;
    world.reported_saying("EngineUnhealthy", "actor-0", "asleep, and not for an update").await;
    until("the sleeping one to be out", || async { world.replicas("ready").await == ["actor-1"] }).await;
    let (status, page) = world.page("actor-0", "/readyz").await;
    assert_eq!(status, 503, "{page}");
    // The others go on without it, and no one wakes it.
    let result = world.publish(&two.save(&world.folder().join("v2")), 2, &[]).await.done();
    assert_eq!(installed(&result), ["actor-1"], "{result}");
    assert_eq!(world.get(0, "/is_sleeping").await["is_sleeping"], json!(true));

    world.post(0, "/wake_up", &json!({})).await;
    world.until_serves(0, &two).await;
    world.until_ready(2).await;
    assert_eq!(world.events_of("MemberRestarted", "actor-0"), 0, "it slept, it did not restart");
}
