//! `delivery: Engine` from end to end: agents and engines are processes, the ranks of the engines are workers that the simulators start by
//! themselves, and what an engine serves is computed from the bytes that came out of its group.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Signal, getpgid};
use serde_json::{Value, json};

use super::fixture::Machine;
use crate::model::Model;
use crate::world::{Actor, World, installed, until};

async fn joined(machine: &Machine, update: Value, actors: Vec<Actor>) -> World {
    let count = actors.len();
    let world = World::start_joining(machine, update, actors).await;
    world.until_ready(count).await;
    world
}

/// Publishes a version and says what came of it.
async fn publish(world: &World, version: u64) -> (Model, Value) {
    let model = Model::large(version);
    let checkpoint = model.save(&world.folder().join(format!("v{version}")));
    let result = world.publish(&checkpoint, version, &[]).await.done();
    (model, result)
}

/// How often an engine was called so.
async fn called(world: &World, number: usize, call: &str) -> usize {
    let calls = world.simulator(number, "calls").await;
    calls.as_array().unwrap().iter().filter(|known| *known == call).count()
}

/// Log-probs of a few tokens, or none when the answer is none or was cut short. They depend on every weight that is served.
async fn answered(http: &reqwest::Client, port: u16) -> Option<String> {
    let body = json!({"model": "model", "prompt": "The quick brown fox", "max_tokens": 4, "temperature": 0, "logprobs": 1});
    let answer = http.post(format!("http://127.0.0.1:{port}/v1/completions")).json(&body).send().await.ok()?;
    let answer: Value = answer.json().await.ok()?;
    let choice = answer.pointer("/choices/0")?;
    (choice["finish_reason"] == "length").then(|| choice["logprobs"]["token_logprobs"].to_string())
}

/// Stories F17 and F22.
#[tokio::test(flavor = "multi_thread")]
async fn multi_rank_engines_join_and_all_ranks_get_all_bytes() {
    // A port that some other part says in the environment is no one's.
    let machine = Machine::new().with("MASTER_ADDR", "203.0.113.1").with("MASTER_PORT", 29501);
    let actors = vec![Actor::sglang().joining(&[1, 2]), Actor::of("lmdeploy").joining(&[3])];
    let world = joined(&machine, json!({"pause": "AbortAwake"}), actors).await;
    for version in 1..=2 {
        let (model, result) = publish(&world, version).await;
        assert_eq!(installed(&result).len(), 2, "{result}");
        for number in 0..2 {
            // Ranks that got different bytes would show here.
            assert!(world.serves(number, &model).await, "version {version}, actor-{number}");
        }
    }
}

/// Stories F56, F61 and F67.
#[tokio::test(flavor = "multi_thread")]
async fn answers_in_updates_come_from_one_whole_version() {
    let machine = Machine::new();
    let world = joined(&machine, json!({"pause": "Abort"}), vec![Actor::new().joining(&[1]), Actor::sglang().joining(&[2])]).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = Vec::new();
    for number in 0..2 {
        world.spoil(number, &json!({"tokenMs": 3})).await;
        let (http, port, stop) = (world.http.clone(), world.port(number), stop.clone());
        clients.push(tokio::spawn(async move {
            let mut seen = BTreeSet::new();
            while !stop.load(Ordering::Acquire) {
                seen.extend(answered(&http, port).await);
                tokio::task::yield_now().await;
            }
            seen
        }));
    }
    let mut whole = [BTreeSet::new(), BTreeSet::new()];
    for version in 0..=3 {
        if version > 0 {
            assert_eq!(installed(&publish(&world, version).await.1).len(), 2);
        }
        for (number, whole) in whole.iter_mut().enumerate() {
            whole.insert(answered(&world.http, world.port(number)).await.expect("an engine at rest answers"));
        }
    }
    stop.store(true, Ordering::Release);
    for (number, (client, whole)) in clients.into_iter().zip(whole).enumerate() {
        assert_eq!(whole.len(), 4, "versions compute different answers");
        let seen = client.await.unwrap();
        assert!(seen.len() > 1 && seen.is_subset(&whole), "actor-{number}: {seen:?} is not of {whole:?}");
    }
}

/// Story F66.
#[tokio::test(flavor = "multi_thread")]
async fn endless_pause_leaves_engine_out_before_a_broadcast() {
    let machine = Machine::new();
    let update = json!({"pause": "Abort", "timeoutSeconds": 6, "silenceSeconds": 3});
    let world = joined(&machine, update, vec![Actor::new().joining(&[1]), Actor::sglang().joining(&[2])]).await;
    let (first, _) = publish(&world, 1).await;
    world.spoil(0, &json!({"rules": [{"path": "/pause", "fault": {"kind": "hang"}}]})).await;
    let (second, result) = publish(&world, 2).await;
    assert_eq!(installed(&result), ["actor-1"], "{result}");
    assert!(world.serves(1, &second).await && world.serves(0, &first).await);
    // It is well again, and gets what it missed.
    world.spoil(0, &json!({})).await;
    world.until_serves(0, &second).await;
}

/// Story F68.
#[tokio::test(flavor = "multi_thread")]
async fn endless_request_ends_a_drain_at_its_deadline() {
    let machine = Machine::new();
    let update = json!({"pause": "Drain", "timeoutSeconds": 6, "silenceSeconds": 3});
    let world = joined(&machine, update, vec![Actor::new().joining(&[1]), Actor::new().joining(&[2])]).await;
    world.spoil(0, &json!({"tokenMs": 200})).await;
    let endless = json!({"model": "model", "prompt": "a", "max_tokens": 4096, "temperature": 0});
    let url = format!("http://127.0.0.1:{}/v1/completions", world.port(0));
    let asked = world.http.post(url).timeout(std::time::Duration::from_secs(600)).json(&endless).send();
    let running = tokio::spawn(asked);
    until("the request to be there", || async { called(&world, 0, "POST /v1/completions").await > 0 }).await;
    let (model, result) = publish(&world, 1).await;
    assert_eq!(installed(&result), ["actor-1"], "{result}");
    assert!(world.serves(1, &model).await && !world.serves(0, &model).await);
    assert!(!running.is_finished(), "a drain ends no request");
    running.abort();
    // No one waits for an answer any more; the engine takes what it missed once its request is over.
    world.spoil(0, &json!({})).await;
    world.until_serves(0, &model).await;
}

/// Story F71.
#[tokio::test(flavor = "multi_thread")]
async fn engine_late_to_a_broadcast_is_awaited_in_parallel() {
    let machine = Machine::new();
    let world = joined(&machine, json!({"pause": "Abort"}), vec![Actor::new().joining(&[1]), Actor::sglang().joining(&[2])]).await;
    for (number, path) in ["/update_weights", "/update_weights_from_distributed"].into_iter().enumerate() {
        world.spoil(number, &json!({"rules": [{"path": path, "times": 2, "fault": {"kind": "slow", "ms": 300}}]})).await;
    }
    let (model, result) = publish(&world, 1).await;
    assert_eq!(installed(&result).len(), 2, "{result}");
    assert!(world.serves(0, &model).await && world.serves(1, &model).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_agents_engine_leaves_old_group_and_joins_next() {
    let machine = Machine::new();
    let actors = vec![Actor::sglang().joining(&[1]), Actor::of("lmdeploy").joining(&[2])];
    let world = joined(&machine, json!({"pause": "AbortAwake", "silenceSeconds": 5}), actors).await;
    let (first, _) = publish(&world, 1).await;
    for number in 0..2 {
        assert!(world.serves(number, &first).await);
        let left = called(&world, number, "POST /destroy_weights_update_group").await;
        world.signal(&format!("actor-{number}"), Signal::KILL).await;
        // The one who knew the group's name is gone; its successor reads it where it was noted.
        until("the engine to leave", || async { called(&world, number, "POST /destroy_weights_update_group").await > left }).await;
        world.until_ready(2).await;
    }
    let (second, result) = publish(&world, 2).await;
    assert_eq!(installed(&result).len(), 2, "{result}");
    assert!(world.serves(0, &second).await && world.serves(1, &second).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_engine_killed_in_a_group_joins_the_next() {
    let machine = Machine::new();
    let world =
        joined(&machine, json!({"pause": "Abort", "silenceSeconds": 3}), vec![Actor::new().joining(&[1]), Actor::sglang().joining(&[2])])
            .await;
    publish(&world, 1).await;
    // It dies when the third bucket is asked for: rank 0 and the other engine are in the broadcast by then.
    world.spoil(1, &json!({"rules": [{"path": "/update_weights_from_distributed", "after": 2, "fault": {"kind": "crash"}}]})).await;
    let (second, result) = publish(&world, 2).await;
    assert!(installed(&result).contains(&"actor-0"), "{result}");
    assert!(world.serves(0, &second).await);
    world.until_serves(1, &second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_group_releases_engines_it_did_not_start() {
    let machine = Machine::new();
    let actors = vec![Actor::sglang().joining(&[1]).absent(), Actor::of("lmdeploy").joining(&[2]).absent()];
    let mut world = World::start_joining(&machine, json!({"pause": "AbortAwake"}), actors).await;
    world.start_engine(0);
    world.start_engine(1);
    world.until_ready(2).await;
    let (model, result) = publish(&world, 1).await;
    assert_eq!(installed(&result).len(), 2, "{result}");
    let mut before = Vec::new();
    for number in 0..2 {
        before.push(called(&world, number, "POST /destroy_weights_update_group").await);
    }
    // Else a terminal's Ctrl-C would end the agent at once.
    assert_ne!(getpgid(Some(world.agent("actor-0").await)).unwrap(), getpgid(None).unwrap());
    world.stop();
    for (number, before) in before.into_iter().enumerate() {
        // What its ranks hold for a group stays theirs otherwise, until the next group or for ever.
        assert_eq!(called(&world, number, "POST /destroy_weights_update_group").await, before + 1, "actor-{number}");
        assert!(world.serves(number, &model).await, "actor-{number} goes on with what it holds");
    }
}
