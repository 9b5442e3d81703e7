//! Whole groups that the engines join by themselves (`delivery: Engine`): engines whose ranks are workers of their own, the real agents, and a
//! trainer that publishes.

use rustix::process::Signal;
use serde_json::{Value, json};

use super::fixture::Machine;
use super::joiner::{Joiner, Kind};
use crate::model::Model;
use crate::world::{Actor, World, installed, until};

/// Rollouts whose engines joined; they are on the GPUs from 1 on.
async fn joined(machine: &Machine, update: Value, kinds: &[Kind]) -> (World, Vec<Joiner>) {
    let (world, engines) = started(machine, update, kinds).await;
    world.until_ready(kinds.len()).await;
    (world, engines)
}

async fn started(machine: &Machine, mut update: Value, kinds: &[Kind]) -> (World, Vec<Joiner>) {
    update.as_object_mut().unwrap().insert("pause".into(), json!("AbortAwake"));
    let actor = |kind: &Kind| match kind {
        Kind::Vllm => Actor::new().absent(),
        Kind::Sglang => Actor::sglang().absent(),
        Kind::Lmdeploy => Actor::of("lmdeploy").absent(),
    };
    let world = World::start_joining(machine, update, kinds.iter().map(actor)).await;
    let mut engines = Vec::new();
    for (number, kind) in kinds.iter().enumerate() {
        engines.push(Joiner::start(machine, *kind, u32::try_from(number).unwrap() + 1, world.port(number)).await);
    }
    (world, engines)
}

/// Publishes a version and says what came of it.
async fn publish(world: &World, version: u64) -> (Model, Value) {
    let model = Model::large(version);
    let checkpoint = model.save(&world.folder().join(format!("v{version}")));
    let result = world.publish(&checkpoint, version, &[]).await.done();
    (model, result)
}

/// Stories F05 and F06.
#[tokio::test(flavor = "multi_thread")]
async fn versions_reach_engines_of_three_kinds_that_join() {
    let machine = Machine::new();
    let (world, engines) = joined(&machine, json!({}), &[Kind::Vllm, Kind::Sglang, Kind::Lmdeploy]).await;
    let joins = engines[1].count("/init_weights_update_group");
    for version in 1..=2 {
        let (model, result) = publish(&world, version).await;
        assert_eq!((installed(&result).len(), &result["attempts"]), (3, &json!(1)), "{result}");
        for (number, engine) in engines.iter().enumerate() {
            assert!(engine.serves(&model) && engine.runs(), "version {version}, actor-{number}");
        }
    }
    // A group lives as long as its epoch.
    assert_eq!((engines[1].count("/init_weights_update_group"), engines[1].count("/end_weight_update")), (joins, 2));
}

/// What the trainer's agent says of each replica: what its version was proven by.
async fn proven_by(world: &World) -> Vec<Value> {
    let roster = world.roster("trainer").await;
    roster["replicas"].as_array().unwrap().iter().map(|replica| replica["provenBy"].clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_of_one_kind_are_proven_by_their_checksums() {
    let machine = Machine::new().with("FAKEGPU_COUNT", 6);
    let (world, engines) = joined(&machine, json!({}), &[Kind::Vllm, Kind::Vllm, Kind::Sglang, Kind::Sglang, Kind::Lmdeploy]).await;
    for version in 1..=2 {
        let (_, result) = publish(&world, version).await;
        assert_eq!(installed(&result).len(), 5, "{result}");
        until("all proofs", || async { proven_by(&world).await == ["Engine", "Engine", "Engine", "Engine", "Nothing"] }).await;
    }
    assert!(engines[0].count("/weight_checker") >= 2 && engines[2].count("/weights_checker") >= 2, "each version asks each engine");
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_without_another_to_compare_with_is_not_proven() {
    let machine = Machine::new();
    let (world, engines) = joined(&machine, json!({}), &[Kind::Vllm]).await;
    publish(&world, 1).await;
    until("no proof", || async { proven_by(&world).await == ["Nothing"] }).await;
    assert_eq!(engines[0].count("/weight_checker"), 0, "it would stop for nothing");
}

/// Story F46.
#[tokio::test(flavor = "multi_thread")]
async fn engine_that_loaded_other_weights_is_held_and_fed() {
    let machine = Machine::new();
    let (world, engines) = joined(&machine, json!({}), &[Kind::Vllm, Kind::Vllm, Kind::Vllm]).await;
    engines[1].corrupts(1);
    let (model, result) = publish(&world, 1).await;
    assert_eq!(installed(&result), ["actor-0", "actor-2"], "{result}");
    let behind = result["behind"][0].to_string();
    assert!(behind.contains("actor-1") && behind.contains("are those of 0 of the 2 other replicas of its pool"), "{behind}");
    until("the engine with other weights to be fed", || async { world.replicas("ready").await.len() == 3 }).await;
    assert!(engines.iter().all(|engine| engine.serves(&model) && engine.runs()));
    until("all proofs", || async { proven_by(&world).await == ["Engine", "Digests", "Engine"] }).await;
}

/// Stories F94 and F50.
#[tokio::test(flavor = "multi_thread")]
async fn engine_that_refuses_a_bucket_ends_its_broadcast_only() {
    let machine = Machine::new();
    let (world, engines) = joined(&machine, json!({"silenceSeconds": 5}), &[Kind::Vllm, Kind::Sglang]).await;
    engines[1].instead("/update_weights_from_distributed", (2, 1), 400, json!({"success": false, "message": "unknown group"}));
    let (model, result) = publish(&world, 1).await;
    assert!(result["attempts"].as_u64().unwrap() > 1, "{result}");
    assert!(engines[0].serves(&model) && engines[0].runs());
    // The one that refused was left out of the next group, and gets the version when it is back.
    until("the engine that refused to serve", || async { engines[1].runs() && world.replicas("ready").await.len() == 2 }).await;
}

/// Stories F02, F29 and F31.
#[tokio::test(flavor = "multi_thread")]
async fn killed_source_is_replaced_and_engines_rejoin() {
    let machine = Machine::new();
    let (world, engines) = joined(&machine, json!({"silenceSeconds": 3}), &[Kind::Vllm, Kind::Sglang]).await;
    publish(&world, 1).await;
    world.signal("trainer", Signal::KILL).await;
    until("the engines to join again", || async { engines[1].count("/init_weights_update_group") >= 2 }).await;
    assert!(engines[1].count("/destroy_weights_update_group") >= 1);
    world.until_ready(2).await;
    let (model, result) = publish(&world, 2).await;
    assert_eq!(installed(&result).len(), 2, "{result}");
    assert!(engines.iter().all(|engine| engine.serves(&model)));
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_in_a_dead_group_is_named_by_the_first_bucket() {
    let machine = Machine::new();
    let (mut world, engines) = joined(&machine, json!({"silenceSeconds": 10}), &[Kind::Vllm, Kind::Sglang]).await;
    engines[1].idle(true);
    let (model, result) = publish(&world, 1).await;
    assert_eq!(installed(&result), ["actor-0"], "{result}");
    assert!(engines[0].serves(&model));
    let why = world.reported("PeerUnreachable", "actor-1").await;
    assert!(why.contains("its group does nothing"), "{why}");
}

/// Story F60.
#[tokio::test(flavor = "multi_thread")]
async fn engine_that_cannot_join_is_left_out_with_the_option() {
    let machine = Machine::new();
    let (mut world, engines) = started(&machine, json!({}), &[Kind::Vllm, Kind::Sglang]).await;
    engines[1].instead("/begin_weight_update", (0, u32::MAX), 404, json!({"detail": "Not Found"}));
    let why = world.reported("TransportUnavailable", "actor-1").await;
    assert!(why.contains("SGLang 0.5.23 or newer"), "{why}");
    until("one replica to be ready", || async { world.replicas("ready").await == ["actor-0"] }).await;
    let (model, result) = publish(&world, 1).await;
    assert_eq!(installed(&result), ["actor-0"]);
    assert!(engines[0].serves(&model));
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_wedged_by_a_killed_source_is_named() {
    let machine = Machine::new();
    let (mut world, engines) = joined(&machine, json!({"silenceSeconds": 3, "timeoutSeconds": 10}), &[Kind::Vllm, Kind::Vllm]).await;
    // Rank 0's worker dies when the second bucket is half sent.
    machine.order("ncclBroadcast@0 2 vanish");
    let model = Model::large(1);
    let checkpoint = model.save(&world.folder().join("v1"));
    let error = world.publish(&checkpoint, 1, &["--timeout", "5"]).await.failed();
    assert_eq!(error["retryable"], json!(true), "{error}");
    let why = world.reported("EngineWedged", "actor-0").await;
    assert!(why.contains("computed nothing"), "{why}");
    assert!(!engines[0].serves(&model));
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_rank_that_dies_is_left_out_and_others_get_version() {
    let machine = Machine::new();
    let (world, engines) = joined(&machine, json!({"silenceSeconds": 3}), &[Kind::Vllm, Kind::Lmdeploy]).await;
    machine.order("ncclBroadcast@2 3 vanish");
    let (model, result) = publish(&world, 1).await;
    assert_eq!(installed(&result), ["actor-0"], "{result}");
    assert!(engines[0].serves(&model) && !engines[1].serves(&model));
}

/// Buckets of a test are short: they go ahead where NCCL holds nothing back.
fn without_buffers() -> Machine {
    Machine::new().with("NCCL_BUFFSIZE", 1)
}

#[tokio::test(flavor = "multi_thread")]
async fn queueing_engines_are_asked_ahead_while_they_load() {
    let machine = without_buffers();
    let (world, engines) = joined(&machine, json!({}), &[Kind::Lmdeploy, Kind::Lmdeploy]).await;
    for engine in &engines {
        engine.lingers(u64::MAX);
    }
    for version in 1..=3 {
        let (model, result) = publish(&world, version).await;
        assert_eq!((installed(&result).len(), &result["attempts"]), (2, &json!(1)), "{result}");
        assert!(engines.iter().all(|engine| engine.serves(&model)), "version {version}");
    }
    // The last step went with the last bucket.
    assert_eq!(engines[0].count("/update_weights_from_distributed"), 3 * 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_are_not_asked_ahead_within_nccls_buffers() {
    for (machine, kinds) in [(Machine::new(), [Kind::Lmdeploy; 2]), (without_buffers(), [Kind::Lmdeploy, Kind::Sglang])] {
        let (world, engines) = joined(&machine, json!({}), &kinds).await;
        let (model, result) = publish(&world, 1).await;
        assert_eq!((installed(&result).len(), &result["attempts"]), (2, &json!(1)), "{result}");
        assert!(engines.iter().all(|engine| engine.serves(&model) && engine.most_at_once() == 1));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_that_fails_a_bucket_harms_no_other_broadcast() {
    let machine = without_buffers();
    let (world, engines) = joined(&machine, json!({"silenceSeconds": 10}), &[Kind::Lmdeploy, Kind::Lmdeploy]).await;
    // Both are in the fourth broadcast when one fails with the third.
    for engine in &engines {
        engine.lingers(3);
    }
    engines[1].spoils(3);
    let joins = engines[1].count("/init_weights_update_group");
    let (model, result) = publish(&world, 1).await;
    assert!(result["attempts"].as_u64().unwrap() > 1, "{result}");
    assert!(engines[0].serves(&model) && engines[0].runs());
    // The one that failed holds a mixture, and takes the next version: it has no GPU of its own to be fed from.
    until("the engine that failed to join again", || async { engines[1].count("/init_weights_update_group") > joins }).await;
    let (model, result) = publish(&world, 2).await;
    assert_eq!(installed(&result).len(), 2, "{result}");
    assert!(engines.iter().all(|engine| engine.serves(&model) && engine.runs()));
}
