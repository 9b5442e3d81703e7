//! A publish that no group can take ends with the cause, and says whether trying again can help.

use serde_json::{Value, json};

use super::canary::answer;
use crate::model::Model;
use crate::world::{Actor, World, spoiled};

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_names_what_its_engine_lacks_and_is_final() {
    let asked = json!({"keep": 2, "canary": {"prompt": "Two and two is", "maxTokens": 4, "minLogProb": -4}});
    let mute = spoiled("/v1/completions", &answer(&Value::Null));
    let mut world = World::start(asked, [Actor::new().faults(mute)]).await;
    world.reported("Unsupported", "actor-0").await;
    let checkpoint = Model::small(1).save(&world.folder().join("v1"));
    let error = world.publish(&checkpoint, 1, &["--timeout", "3"]).await.failed();
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("actor-0: Unsupported: ") && message.contains("gives no log-probs"), "{message}");
    assert_eq!((&error["code"], &error["retryable"]), (&json!("NotEnoughReplicas"), &json!(false)), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_names_an_engine_that_is_down_and_is_retryable() {
    let mut world = World::start(json!({}), [Actor::new().absent()]).await;
    world.reported("EngineUnhealthy", "actor-0").await;
    let checkpoint = Model::small(1).save(&world.folder().join("v1"));
    let error = world.publish(&checkpoint, 1, &["--timeout", "3"]).await.failed();
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("actor-0: EngineUnhealthy: ") && message.contains("cannot be reached"), "{message}");
    assert!(!message.contains("WeightSync"), "there is no such object here: {message}");
    assert_eq!(error["retryable"], json!(true), "{message}");
}
