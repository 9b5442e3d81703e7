//! What an engine loaded when it was started, and versions that lack some of it: files that an index hides, files that no one here reads, and
//! tensors that the user names.

use serde_json::{Value, json};

use crate::model::Model;
use crate::world::{Actor, World, installed, until};

const HEAD: &str = "lm_head.weight";

/// A small model with more tensors.
fn with(seed: u64, more: &[&str]) -> Model {
    let usual = (0..4).map(|layer| format!("model.layers.{layer}.mlp.weight"));
    Model::of(seed, usual.chain(more.iter().map(|name| (*name).to_owned())).map(|name| (name, 1 << 10)))
}

/// What the members note, of all replicas.
fn notes(result: &Value) -> String {
    result["notes"].to_string()
}

/// Message of a member, as the coordinator shows it.
async fn message(world: &World, member: usize) -> String {
    let state: Value = world.http.get(format!("{}state", world.web_page())).send().await.unwrap().json().await.unwrap();
    let members = state["objects"][0]["members"].as_array().cloned().unwrap_or_default();
    let name = format!("rollouts/actor-{member}");
    members.iter().find(|member| member["name"] == json!(name)).map(|member| member["message"].to_string()).unwrap_or_default()
}

/// vLLM loads all tensors of a file that its index names (`python/tests/test_loaded_files.py`).
#[tokio::test(flavor = "multi_thread")]
async fn first_version_lacking_what_an_index_hides_is_refused() {
    let start = with(0, &[HEAD]);
    let world = World::start_with(&start, json!({}), [Actor::new()]).await;
    world.until_ready(1).await;
    let map: Value =
        with(0, &[]).specs().into_iter().map(|spec| (spec.name, json!("model.safetensors"))).collect::<serde_json::Map<_, _>>().into();
    let index = json!({"weight_map": map}).to_string();
    std::fs::write(world.folder().join("start/model.safetensors.index.json"), index).unwrap();

    let error = world.publish(&with(1, &[]).save(&world.folder().join("v1")), 1, &["--timeout", "20"]).await.failed();
    let text = error["message"].as_str().unwrap();
    assert!(text.contains("lacks lm_head.weight") && text.contains("spec.rollouts[].engine.tensors.ignore"), "{text}");
    assert!(world.serves(0, &start).await, "nothing was changed");

    let whole = with(2, &[HEAD]);
    let result = world.publish(&whole.save(&world.folder().join("v2")), 2, &[]).await.done();
    assert_eq!((installed(&result), notes(&result).as_str()), (vec!["actor-0"], "null"));
    assert!(world.serves(0, &whole).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_of_pickle_alone_says_nothing_was_compared() {
    let mut world = World::start_with(&with(0, &[HEAD]), json!({}), [Actor::new().absent()]).await;
    let file = |name: &str| world.folder().join("start").join(name);
    std::fs::rename(file("model.safetensors"), file("pytorch_model.bin")).unwrap();
    world.start_engine(0);
    let why = "compared with nothing: the engine's checkpoint";
    let event = world.reported_saying("EngineUnproven", "actor-0", why).await;
    assert!(event.contains("holds no safetensors file (pickle is never read)"), "{event}");
    world.until_ready(1).await;
    until("status to say so", || async { message(&world, 0).await.contains(why) }).await;

    let first = with(1, &[HEAD]);
    let result = world.publish(&first.save(&world.folder().join("v1")), 1, &[]).await.done();
    assert!(notes(&result).contains(why) && notes(&result).contains("rollouts/actor-0"), "{result}");
    assert!(world.serves(0, &first).await);
    let log = std::fs::read_to_string(world.folder().join("state/actor-0-agent.log")).unwrap();
    assert!(log.contains("do not quite agree"), "{log}");

    // From now on the version before is there to compare with.
    let error = world.publish(&with(2, &[]).save(&world.folder().join("v2")), 2, &["--timeout", "20"]).await.failed();
    let text = error["message"].as_str().unwrap();
    assert!(text.contains("of version 1") && text.contains("lacks lm_head.weight"), "{text}");
    let result = world.publish(&with(3, &[HEAD]).save(&world.folder().join("v3")), 3, &[]).await.done();
    assert!(notes(&result).contains("compared with those of version 1 only"), "{result}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ignored_tensors_let_a_version_in() {
    let start = with(0, &["model.layers.0.extra.scale"]);
    let (version, other) = (with(1, &[]), with(2, &["model.layers.1.extra.bias"]));
    let strict = World::start_with(&start, json!({}), [Actor::new()]).await;
    strict.until_ready(1).await;
    let error = strict.publish(&version.clone().save(&strict.folder().join("v1")), 1, &["--timeout", "20"]).await.failed();
    let text = error["message"].as_str().unwrap();
    assert!(text.contains("lacks model.layers.0.extra.scale") && text.contains("spec.rollouts[].engine.tensors.ignore"), "{text}");
    drop(strict);

    // SGLang passes over a tensor that it does not know.
    let tensors = json!({"tensors": {"ignore": ["*.extra.*"]}});
    let world = World::start_with(&start, tensors, [Actor::sglang()]).await;
    world.until_ready(1).await;
    let result = world.publish(&version.clone().save(&world.folder().join("v1")), 1, &[]).await.done();
    assert!(notes(&result).contains("engine.tensors.ignore names, so the engine keeps its own: model.layers.0.extra.scale"), "{result}");
    let mut wanted = version.digests();
    wanted["model.layers.0.extra.scale"] = start.digests()["model.layers.0.extra.scale"].clone();
    assert_eq!(world.simulator(0, "digest").await["tensors"], wanted);
    let result = world.publish(&other.save(&world.folder().join("v2")), 2, &[]).await.done();
    assert_eq!(installed(&result), ["actor-0"]);
}
