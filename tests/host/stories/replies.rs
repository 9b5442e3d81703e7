//! Engines that say that all went well when it did not, or say nothing: no version is ever reported that they do not hold.

use serde_json::{Value, json};

use crate::model::Model;
use crate::world::{Actor, World, behind, installed, spoiled, until};

const LOADS: [(usize, &str); 2] = [(0, "/collective_rpc"), (1, "/update_weights_from_disk")];

fn answers_200(body: &Value) -> Value {
    json!({"kind": "answer", "status": 200, "body": body})
}

async fn is_paused(world: &World, number: usize) -> Value {
    world.get(number, "/is_paused").await["is_paused"].clone()
}

/// vllm-project/vime#87: a step that failed returned nothing, and the loss showed 300 s later.
/// Story F12.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_200_without_success_is_a_failure_at_once() {
    let world = World::start(json!({}), [Actor::new(), Actor::sglang(), Actor::new()]).await;
    world.until_ready(3).await;
    for (number, load) in LOADS {
        world.spoil(number, &spoiled(load, &answers_200(&json!({"success": false, "message": "it did not work"})))).await;
    }
    let one = Model::small(1);
    let checkpoint = one.save(&world.folder().join("v1"));
    let result = world.publish(&checkpoint, 1, &[]).await.done();
    assert_eq!(installed(&result), ["actor-2"]);
    for (number, _) in LOADS {
        let reason = behind(&result, &format!("actor-{number}"));
        assert!(reason.contains("load") && reason.contains("success"), "{reason}");
        assert!(!world.serves(number, &one).await);
        let (status, why) = world.page(&format!("actor-{number}"), "/readyz").await;
        assert_eq!(status, 503, "a pod whose engine may hold a mixture is not ready: {why}");
    }
    for (number, _) in LOADS {
        world.spoil(number, &json!({})).await;
        world.until_serves(number, &one).await;
    }
    world.until_ready(3).await;
}

/// inclusionAI/AReaL#1590: a gateway answers 200 with an error inside, and the version goes up.
/// Story F47.
#[tokio::test(flavor = "multi_thread")]
async fn error_inside_an_answer_200_keeps_the_version() {
    let world = World::start(json!({}), [Actor::new(), Actor::sglang()]).await;
    let (one, two) = (Model::small(1), Model::small(2));
    let (first, second) = (one.save(&world.folder().join("v1")), two.save(&world.folder().join("v2")));
    world.until_ready(2).await;
    world.publish(&first, 1, &[]).await.done();
    for (number, load) in LOADS {
        let body = json!({"success": true, "results": [null], "status": "error", "error": {"message": "it did not work", "code": 500}});
        world.spoil(number, &spoiled(load, &answers_200(&body))).await;
    }
    let error = world.publish(&second, 2, &["--timeout", "4"]).await.failed();
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("actor-0") && message.contains("actor-1"), "{message}");
    assert_eq!(error["retryable"], false);
    assert_eq!(world.roster("trainer").await["version"], 1);
    for (number, _) in LOADS {
        assert!(!world.serves(number, &two).await);
        world.spoil(number, &json!({})).await;
    }
    world.publish(&second, 2, &[]).await.done();
    for (number, _) in LOADS {
        world.until_serves(number, &two).await;
    }
    assert_eq!(world.roster("trainer").await["version"], 2);
}

/// lightseekorg/tokenspeed#1373: the update returns 200, the weights are uninitialised memory.
/// Story F46.
#[tokio::test(flavor = "multi_thread")]
async fn load_acknowledged_but_not_done_is_not_ready() {
    let world = World::start(json!({}), [Actor::new(), Actor::new(), Actor::sglang()]).await;
    world.until_ready(3).await;
    for number in [1, 2] {
        world.spoil(number, &json!({"load": "acknowledgeUnread"})).await;
    }
    let one = Model::small(1);
    let checkpoint = one.save(&world.folder().join("v1"));
    let result = world.publish(&checkpoint, 1, &[]).await.done();
    assert_eq!(installed(&result), ["actor-0"]);
    for number in [1, 2] {
        let reason = behind(&result, &format!("actor-{number}"));
        assert!(reason.contains("opened none of their files"), "{reason}");
        assert_eq!(world.page(&format!("actor-{number}"), "/readyz").await.0, 503);
        world.spoil(number, &json!({})).await;
        world.until_serves(number, &one).await;
    }
}

/// radixark/miles#3216: some tensors are skipped without a word.
/// Story F48.
#[tokio::test(flavor = "multi_thread")]
async fn version_lacking_a_tensor_is_refused_before_a_byte() {
    let world = World::start(json!({}), [Actor::new(), Actor::sglang()]).await;
    world.until_ready(2).await;
    let missing = "model.layers.7.mlp.weight";
    let checkpoint = Model::small(1).without(missing).save(&world.folder().join("v1"));
    let error = world.publish(&checkpoint, 1, &["--timeout", "10"]).await.failed();
    assert!(error["message"].as_str().unwrap().contains(missing), "{error}");
    assert_eq!(error["phase"], "Begin", "{error}");
    for number in [0, 1] {
        assert_eq!(world.loads(number).await, 0);
        assert!(world.serves(number, &Model::small(0)).await);
    }
    // The number was not spent on it.
    let whole = Model::small(1);
    let checkpoint = whole.save(&world.folder().join("whole"));
    world.publish(&checkpoint, 1, &[]).await.done();
    assert!(world.serves(0, &whole).await && world.serves(1, &whole).await);
}

/// PrimeIntellect-ai/prime-rl#2673: a pause without a time limit.
/// Story F69.
#[tokio::test(flavor = "multi_thread")]
async fn hanging_pause_ends_at_its_deadline_unpaused() {
    let world = World::start(json!({"timeoutSeconds": 4, "silenceSeconds": 2}), [Actor::new(), Actor::new(), Actor::new()]).await;
    world.until_ready(3).await;
    // Carried out or not: in both cases no one answers.
    world.spoil(1, &spoiled("/pause", &json!({"kind": "hang"}))).await;
    world.spoil(2, &spoiled("/pause", &json!({"kind": "loseReply"}))).await;
    let one = Model::small(1);
    let checkpoint = one.save(&world.folder().join("v1"));
    let result = world.publish(&checkpoint, 1, &[]).await.done();
    assert_eq!(installed(&result), ["actor-0"]);
    assert!(world.serves(0, &one).await);
    for number in [0, 1, 2] {
        until("the engine to run again", || async { is_paused(&world, number).await == false }).await;
    }
    for number in [1, 2] {
        assert!(!world.serves(number, &one).await, "it was not touched");
        world.spoil(number, &json!({})).await;
        world.until_serves(number, &one).await;
    }
}
