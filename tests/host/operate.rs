//! Numbers and logs of agents that run: every series is defined, and what is logged changes while they run.

use std::time::Duration;

use serde_json::{Value, json};
use weightsync_agent::process::METRICS;
use weightsync_net::metrics::differences;

use crate::model::Model;
use crate::world::{Actor, World, spoiled, unavailable, until};

/// Value of a series, by the beginning of its line.
fn value(text: &str, series: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.strip_prefix(series).is_some_and(|rest| rest.starts_with(' ')))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_count_transfers_steps_pauses_and_outcomes_of_updates() {
    let world = World::start(json!({"minReady": 1}), [Actor::new(), Actor::sglang()]).await;
    world.until_ready(2).await;
    let checkpoint = Model::small(1).save(&world.folder().join("v1"));
    let result = world.publish(&checkpoint, 1, &[]).await.done();
    let bytes = result["bytes"].as_f64().unwrap();

    let seen = |pod: &'static str, series: &'static str, wanted: f64| {
        let world = &world;
        until(series, move || async move { value(&world.page(pod, "/metrics").await.1, series) == Some(wanted) })
    };
    seen("trainer", r#"weightsync_agent_updates_total{role="source",outcome="done"}"#, 1.0).await;
    seen("trainer", r#"weightsync_agent_transferred_bytes_total{transport="tcp",role="source"}"#, bytes).await;
    seen("actor-0", r#"weightsync_agent_updates_total{role="rollout",outcome="done"}"#, 1.0).await;
    seen("actor-0", r#"weightsync_agent_transferred_bytes_total{transport="tcp",role="rollout"}"#, bytes).await;
    seen("actor-0", r#"weightsync_agent_transfer_duration_seconds_count{transport="tcp",role="rollout"}"#, 1.0).await;
    seen("actor-0", r#"weightsync_agent_engine_pause_duration_seconds_count{engine="vllm"}"#, 1.0).await;
    seen("actor-1", r#"weightsync_agent_engine_pause_duration_seconds_count{engine="sglang"}"#, 1.0).await;
    for step in ["receive", "verify", "pause", "load", "check", "resume"] {
        let text = world.page("actor-0", "/metrics").await.1;
        let series = format!("weightsync_agent_step_duration_seconds_count{{step=\"{step}\"}}");
        assert_eq!(value(&text, &series), Some(1.0), "{series}: {text}");
    }

    // One that refuses to load is counted as failed, and as dirty for as long as it is.
    world.spoil(0, &spoiled("/collective_rpc", &unavailable())).await;
    let checkpoint = Model::small(2).save(&world.folder().join("v2"));
    world.publish(&checkpoint, 2, &[]).await.done();
    seen("actor-0", r#"weightsync_agent_updates_total{role="rollout",outcome="failed"}"#, 1.0).await;

    for pod in ["trainer", "actor-0", "actor-1"] {
        let text = world.page(pod, "/metrics").await.1;
        assert_eq!(differences(&text, METRICS), Vec::<String>::new(), "{pod}");
        assert!(value(&text, "weightsync_process_resident_memory_bytes").unwrap() > 1e6, "{text}");
        assert!(value(&text, "weightsync_process_open_files").unwrap() > 3.0, "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn web_page_of_local_shows_transfers_updates_and_events() {
    let world = World::start(json!({}), [Actor::new(), Actor::new()]).await;
    world.until_ready(2).await;
    world.publish(&Model::small(1).save(&world.folder().join("v1")), 1, &[]).await.done();
    let page = world.web_page();
    let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(5)).build().unwrap();
    let ask = |path: &str| http.get(format!("{page}{path}")).send();
    assert!(ask("").await.unwrap().text().await.unwrap().contains("app.js"));
    let arrived = || async {
        let state: Value = ask("state").await.unwrap().json().await.unwrap();
        let object = &state["objects"][0];
        let members = object["members"].as_array().unwrap();
        let measured = members.iter().filter(|member| member["from"].is_string() && member["rate"].as_u64() > Some(0)).count();
        let update = &object["updates"][0];
        measured == 2
            && object["ready"] == 2
            && (&update["phase"], update["received"].as_array().map(Vec::len)) == (&json!("Done"), Some(2))
            && object["events"].as_array().unwrap().iter().any(|event| event["reason"] == "GroupFormed")
    };
    until("the page to show the update", arrived).await;
    // A web site that resolves its name to this address does not see it.
    let stranger = http.get(format!("{page}state")).header("host", "evil.example").send().await.unwrap();
    assert_eq!(stranger.status(), 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_logs_changes_while_it_runs_and_goes_back() {
    let world = World::start(json!({}), [Actor::new()]).await;
    world.until_ready(1).await;
    let url = format!("http://127.0.0.1:{}/loglevel", world.status_port("actor-0"));
    let log = || std::fs::read_to_string(world.folder().join("state/actor-0-agent.log")).unwrap();
    let ask = |body: &'static str| {
        let put = world.http.put(&url).body(body);
        async move {
            let answer = put.send().await.unwrap();
            (answer.status().as_u16(), answer.text().await.unwrap())
        }
    };
    let shown = || async { world.http.get(&url).send().await.unwrap().json::<Value>().await.unwrap() };
    let started = shown().await["started"].as_str().unwrap().to_owned();
    assert_eq!(shown().await["filter"], started);
    assert!(!log().contains("DEBUG"), "{}", log());

    assert_eq!(ask("hyper_util=debug,reqwest=debug,weightsync=debug").await.0, 200);
    assert_eq!(shown().await["filter"], "hyper_util=debug,reqwest=debug,weightsync=debug");
    // The engine is probed all the time, over new connections or pooled ones.
    until("a line of the new level", || async { log().contains("DEBUG") }).await;

    for (wrong, status) in [("weightsync=loud", 422), ("trace", 422)] {
        let (code, message) = ask(wrong).await;
        assert_eq!(code, status, "{message}");
    }
    assert_eq!(shown().await["filter"], "hyper_util=debug,reqwest=debug,weightsync=debug", "a refused filter changes nothing");
    assert_eq!(ask("").await.0, 200);
    assert_eq!(shown().await["filter"], started);
}

/// The next user of the name found a folder of somebody else.
#[tokio::test(flavor = "multi_thread")]
async fn group_on_one_host_removes_the_folders_that_it_made() {
    let mut world = World::start(json!({"minReady": 1}), [Actor::new()]).await;
    world.until_ready(1).await;
    let checkpoint = Model::small(1).save(&world.folder().join("v1"));
    world.publish(&checkpoint, 1, &[]).await.done();
    let versions = world.folder().join("versions");
    assert!(versions.join("actor-0").exists());
    world.stop();
    assert!(
        !versions.exists(),
        "{:?}",
        std::fs::read_dir(&versions).map(|all| all.flatten().map(|entry| entry.path()).collect::<Vec<_>>())
    );
}
