//! Numbers of versions, and sizes of what they are made of.

use std::process::Command;

use serde_json::{Value, json};

use crate::model::Model;
use crate::world::{Actor, PROGRAM, World, installed};

/// PrimeIntellect-ai/prime-rl#2896: a number is skipped, and somebody waits for it.
/// Story F53.
#[tokio::test(flavor = "multi_thread")]
async fn version_7_follows_5_without_a_wait_for_6() {
    let world = World::start(json!({}), [Actor::new(), Actor::sglang()]).await;
    world.until_ready(2).await;
    for version in [5, 7] {
        let checkpoint = Model::small(version).save(&world.folder().join(format!("v{version}")));
        assert_eq!(installed(&world.publish(&checkpoint, version, &[]).await.done()).len(), 2);
    }
    let checkpoint = Model::small(6).save(&world.folder().join("v6"));
    let error = world.publish(&checkpoint, 6, &[]).await.failed();
    assert_eq!((&error["code"], &error["retryable"]), (&json!("VersionNotHigher"), &json!(false)), "{error}");
    assert!(world.serves(0, &Model::small(7)).await && world.serves(1, &Model::small(7)).await);
    assert_eq!(world.roster("trainer").await["version"], 7);
}

/// verl-project/verl#6091: a tensor is larger than a bucket.
/// Story F62.
#[tokio::test(flavor = "multi_thread")]
async fn tensor_larger_than_a_bucket_arrives_whole() {
    let model = |seed| {
        let small = ["model.embed_tokens.weight", "model.norm.weight"].map(|name| (name.to_owned(), 1000));
        Model::of(seed, small.into_iter().chain([("model.layers.0.mlp.experts.weight".to_owned(), 5 << 18 | 6)]))
    };
    let world = World::start_with(&model(0), json!({"bucketMiB": 1}), [Actor::new(), Actor::sglang()]).await;
    world.until_ready(2).await;
    let checkpoint = model(1).save(&world.folder().join("v1"));
    let result = world.publish(&checkpoint, 1, &[]).await.done();
    assert_eq!(installed(&result).len(), 2);
    assert!(world.serves(0, &model(1)).await && world.serves(1, &model(1)).await);

    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/examples/quickstart");
    let plan =
        Command::new(PROGRAM).args(["plan", "--output", "json", "--filename", example, "--checkpoint"]).arg(&checkpoint).output().unwrap();
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&plan.stderr)));
    let explanation = &plan["plans"][0]["explanation"];
    assert_eq!(explanation["model"]["bytes"], result["bytes"]);
    let bytes = result["bytes"].as_u64().unwrap();
    for member in explanation["members"].as_array().unwrap().iter().filter(|member| member["hop"].is_u64()) {
        // Never a second whole tensor in flight: the version that arrives, the one that serves, and receive buffers.
        assert_eq!(member["memory"]["versions"], 2 * bytes, "{member}");
        assert!(member["memory"]["inFlight"].as_u64().unwrap() <= 64 << 20, "{member}");
    }
}
