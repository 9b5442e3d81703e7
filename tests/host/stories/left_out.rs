//! Rollouts that cannot take part: left out by name, while the others go on, and taken in when they can.

use rustix::process::Signal;
use serde_json::json;

use crate::model::Model;
use crate::world::{Actor, World, installed, is_member, spoiled, unavailable};

/// InternLM/xtuner#1828: an unhealthy address, or a missing one, is put into the new group and hangs it.
/// Story F04.
#[tokio::test(flavor = "multi_thread")]
async fn engines_with_503_or_no_listener_are_left_out() {
    let actors = [Actor::new(), Actor::new().faults(spoiled("*", &unavailable())), Actor::new().absent()];
    let mut world = World::start(json!({}), actors).await;
    let one = Model::small(1);
    let checkpoint = one.save(&world.folder().join("v1"));
    let ill = world.reported("EngineUnhealthy", "actor-1").await;
    // Asked before it listens at all it is as absent as the other one.
    assert!(ill.contains("503") || ill.contains("cannot be reached"), "{ill}");
    let gone = world.reported("EngineUnhealthy", "actor-2").await;
    assert!(gone.contains("cannot be reached"), "{gone}");
    let result = world.publish(&checkpoint, 1, &[]).await.done();
    assert_eq!(installed(&result), ["actor-0"]);
    assert!(world.serves(0, &one).await);
    world.spoil(1, &json!({})).await;
    world.start_engine(2);
    for late in [1, 2] {
        world.until_serves(late, &one).await;
    }
    world.until_ready(3).await;
}

/// modelscope/twinkle#102: a late subscriber never receives earlier messages.
/// Story F11.
#[tokio::test(flavor = "multi_thread")]
async fn late_agent_reads_what_it_missed_and_gets_the_version() {
    let world = World::start(json!({"silenceSeconds": 2}), [Actor::new(), Actor::new()]).await;
    world.signal("actor-1", Signal::STOP).await;
    // The command line waits for no agent that has not started yet.
    world.until_ready(1).await;
    let one = Model::small(1);
    let checkpoint = one.save(&world.folder().join("v1"));
    let result = world.publish(&checkpoint, 1, &[]).await.done();
    assert_eq!(installed(&result), ["actor-0"]);
    // No one says the version again: the trainer's process has ended.
    world.signal("actor-1", Signal::CONT).await;
    world.until_serves(1, &one).await;
    world.until_ready(2).await;
}

/// radixark/miles#2510, NovaSky-AI/SkyRL#1271: offsets follow the engine's real size, not the configured one.
/// Story F19.
#[tokio::test(flavor = "multi_thread")]
async fn engine_of_another_size_is_refused_and_takes_no_ranks() {
    let mut world = World::start(json!({}), [Actor::new().ranks(4, 8), Actor::new().ranks(2, 2)]).await;
    let refused = world.reported("SizeMismatch", "actor-0").await;
    assert!(refused.contains("has 4 worker ranks") && refused.contains("the spec has 8"), "{refused}");
    world.until_ready(1).await;
    let roster = world.roster("trainer").await;
    let replica = &roster["replicas"][0];
    assert_eq!((&replica["rankOffset"], &replica["size"]), (&json!(1), &json!(2)));
    assert!(is_member(&replica["name"], "actor-1"), "{roster}");
    let checkpoint = Model::small(1).save(&world.folder().join("v1"));
    assert_eq!(installed(&world.publish(&checkpoint, 1, &[]).await.done()), ["actor-1"]);
    assert_eq!(world.loads(0).await, 0);
}

/// InternLM/xtuner: no time limit at all in the trainer's HTTP client.
/// Story F75.
#[tokio::test(flavor = "multi_thread")]
async fn engine_that_accepts_but_never_answers_is_named() {
    let hangs = json!({"kind": "hang"});
    let update = json!({"health": {"periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 2}});
    let mut world = World::start(update, [Actor::new(), Actor::new().faults(spoiled("*", &hangs)), Actor::sglang()]).await;
    world.reported("EngineUnhealthy", "actor-1").await;
    let one = Model::small(1);
    let checkpoint = one.save(&world.folder().join("v1"));
    assert_eq!(installed(&world.publish(&checkpoint, 1, &[]).await.done()), ["actor-0", "actor-2"]);
    // One that begins to hang in the group leaves it, and comes back when it answers.
    world.spoil(2, &spoiled("*", &hangs)).await;
    world.reported_saying("EngineUnhealthy", "actor-2", "did not respond").await;
    let two = Model::small(2);
    let checkpoint = two.save(&world.folder().join("v2"));
    assert_eq!(installed(&world.publish(&checkpoint, 2, &[]).await.done()), ["actor-0"]);
    for healed in [1, 2] {
        world.spoil(healed, &json!({})).await;
    }
    for healed in [1, 2] {
        world.until_serves(healed, &two).await;
    }
}
