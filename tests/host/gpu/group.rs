//! An agent that is killed while its group's GPUs are in a broadcast.

use rustix::process::Signal;
use serde_json::json;

use super::fixture::Machine;
use crate::model::Model;
use crate::world::{Actor, World, installed, until};

#[tokio::test(flavor = "multi_thread")]
async fn agent_killed_in_a_broadcast_costs_one_attempt() {
    // Slow enough to be met in the middle.
    let machine = Machine::new().with("FAKEGPU_NCCL_MBPS", 6);
    let transport = json!({"type": "NCCL", "bucketMiB": 1});
    let world = World::start_on(&machine, transport, json!({"silenceSeconds": 3}), [Actor::new(), Actor::new()]).await;
    world.until_ready(2).await;
    let one = Model::large(1);
    let checkpoint = one.save(&world.folder().join("v1"));
    let victim = world.agent("actor-1").await;
    let (published, ()) = tokio::join!(world.publish(&checkpoint, 1, &[]), async {
        until("the update to run", || async { world.replicas("updating").await.len() == 2 }).await;
        rustix::process::kill_process(victim, Signal::KILL).unwrap();
    });
    let result = published.done();
    assert!(result["attempts"].as_u64().unwrap() >= 2 && !installed(&result).is_empty(), "{result}");
    assert!(world.serves(0, &one).await);
    world.until_serves(1, &one).await;
}
