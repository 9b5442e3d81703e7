//! `delivery: Engine` with a draft model after the model: engines that join groups take each into its own.

use serde_json::json;

use super::fixture::Machine;
use crate::drafts::{publish, serves};
use crate::model::Model;
use crate::world::{Actor, World, installed};

#[tokio::test(flavor = "multi_thread")]
async fn joining_engines_take_the_draft_or_are_left_out_by_name() {
    let machine = Machine::new();
    let actors = [Actor::new().joining(&[1]).drafting(), Actor::sglang().joining(&[2]).drafting(), Actor::of("lmdeploy").joining(&[3])];
    let mut world = World::start_joining(&machine, json!({"pause": "AbortAwake"}), actors).await;
    world.until_ready(3).await;
    for version in 1..=2 {
        let result = publish(&world, Model::large, version).await.done();
        assert_eq!(installed(&result), ["actor-0", "actor-1"], "{result}");
        for number in 0..2 {
            assert!(serves(&world, number, Model::large, version).await, "version {version}, actor-{number}");
        }
    }
    // A group has one world: who cannot take what it brings is left out of the next one.
    let reported = world.reported("PeerUnreachable", "actor-2").await;
    assert!(reported.contains("which lmdeploy does not take from a group"), "{reported}");
}
