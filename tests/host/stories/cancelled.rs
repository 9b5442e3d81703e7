//! A publish that its trainer gives up, by a signal or by its death, costs no replica its place.

use serde_json::json;

use crate::model::Model;
use crate::world::{Actor, World, installed};

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_trainer_costs_no_replica_its_place() {
    let model = |seed| Model::of(seed, (0..24).map(|layer| (format!("model.layers.{layer}.mlp.weight"), 256 << 10)));
    let world = World::start_with(&model(0), json!({}), [Actor::new(), Actor::new()]).await;
    world.until_ready(2).await;
    let one = model(1).save(&world.folder().join("one"));
    let both = ["actor-0", "actor-1"];
    let mut killed = 0;
    for round in 0..24 {
        // While bytes are on their way between the two, unless the stream is quicker than its progress.
        killed += u32::from(world.publish_and_kill(&one, 2 * round + 1, "sending").await);
        let result = world.publish(&one, 2 * round + 2, &[]).await.done();
        assert_eq!(installed(&result), both, "round {round}");
        assert_eq!(result["behind"], json!([]), "round {round}");
        if killed == 12 {
            break;
        }
    }
    assert!(killed >= 6, "{killed} of 24 publishes were killed in the middle");
    for member in both {
        assert_eq!(world.events_of("PeerUnreachable", member), 0, "{member}");
    }
}
