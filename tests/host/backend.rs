//! A group in which one server was started with WeightSync's own back end, and one was not.

use rustix::process::Signal;
use serde_json::json;

use crate::model::Model;
use crate::world::{Actor, World, installed, until};

async fn called(world: &World, number: usize, path: &str) -> usize {
    let calls = world.simulator(number, "calls").await;
    calls.as_array().unwrap().iter().filter(|call| call.as_str().unwrap().ends_with(path)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_agents_server_is_healed_by_its_successor() {
    let world = World::start(json!({}), [Actor::new().with_backend().ranks(2, 2), Actor::new()]).await;
    world.until_ready(2).await;
    for version in 1..=2 {
        let checkpoint = Model::small(version).save(&world.folder().join(format!("v{version}")));
        assert_eq!(installed(&world.publish(&checkpoint, version, &[]).await.done()).len(), 2);
        assert!(world.serves(0, &Model::small(version)).await && world.serves(1, &Model::small(version)).await);
    }
    assert_eq!((called(&world, 0, "/update_weights").await, called(&world, 1, "/update_weights").await), (2, 0));
    assert!(called(&world, 0, "/collective_rpc").await < called(&world, 1, "/collective_rpc").await, "no directory was loaded");

    world.spoil(0, &json!({"loadMs": 1500})).await;
    let checkpoint = Model::small(3).save(&world.folder().join("v3"));
    let (published, ()) = tokio::join!(world.publish(&checkpoint, 3, &[]), async {
        until("the load of the first", || async { called(&world, 0, "/update_weights").await == 3 }).await;
        world.signal("actor-0", Signal::KILL).await;
    });
    world.spoil(0, &json!({})).await;
    // The other one may have it already, or the next attempt brings it to both.
    if published.code == 0 {
        world.until_serves(1, &Model::small(3)).await;
        world.until_serves(0, &Model::small(3)).await;
    } else {
        assert_eq!(installed(&world.publish(&checkpoint, 3, &[]).await.done()).len(), 2);
    }
    world.until_ready(2).await;
}
