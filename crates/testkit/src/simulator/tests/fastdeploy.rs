//! The simulated FastDeploy by itself: one script of calls, errors included, for each rule that its sources show.

use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;

use crate::simulator::{Faults, Simulator, SimulatorOptions};
use crate::support::{TENSORS, client, write_checkpoint};

struct Server {
    simulator: Simulator,
    folder: TempDir,
}

impl Server {
    async fn start(more: impl FnOnce(&mut SimulatorOptions, &std::path::Path)) -> Self {
        let folder = TempDir::new().unwrap();
        write_checkpoint(&folder.path().join("model"), &TENSORS, 1);
        write_checkpoint(&folder.path().join("published/step_2"), &TENSORS, 2);
        std::fs::rename(folder.path().join("model/model.safetensors"), folder.path().join("model/model_state.tp0.0.pdparams")).unwrap();
        let mut options = SimulatorOptions::new("fastdeploy", folder.path().join("model"));
        more(&mut options, folder.path());
        let simulator = Simulator::start(options, TcpListener::bind("127.0.0.1:0").await.unwrap()).await.unwrap();
        Self { simulator, folder }
    }

    /// Status and body of a call like `POST /v1/pause`.
    async fn call(&self, call: &str, body: Option<Value>) -> (u16, String) {
        let (method, path) = call.split_once(' ').unwrap();
        let mut request = client().request(method.parse().unwrap(), format!("{}{path}", self.simulator.url()));
        if let Some(body) = body {
            request = request.json(&body);
        }
        let reply = request.send().await.unwrap();
        (reply.status().as_u16(), reply.text().await.unwrap_or_default())
    }

    /// Plays calls; each must have that status, and those words in its body.
    async fn play(&self, script: &[(&str, Option<Value>, u16, &str)]) {
        for (index, (call, body, status, words)) in script.iter().enumerate() {
            let (found, text) = self.call(call, body.clone()).await;
            assert_eq!(found, *status, "{index}: {call} {body:?}: {text}");
            assert!(text.contains(words), "{index}: {call}: {text}");
        }
    }

    async fn memory(&self) -> Value {
        serde_json::from_str(&self.call("GET /simulator/memory", None).await.1).unwrap()
    }
}

const UPDATE: &str = "POST /v1/update_weights";

#[tokio::test]
async fn control_calls_keep_their_order_and_their_errors_say_why() {
    let server = Server::start(|_, _| {}).await;
    server
        .play(&[
            ("GET /health", None, 200, ""),
            ("GET /v1/is_paused", None, 200, r#""is_paused":false"#),
            ("GET /v1/pause", None, 405, ""),
            ("POST /v1/resume", None, 200, r#""status":"success""#),
            (UPDATE, None, 500, "Pause LLM Engine first before calling updating weights"),
            ("POST /v1/pause", None, 200, r#""status":"success""#),
            ("POST /v1/pause", None, 200, r#""status":"success""#),
            ("GET /v1/is_paused", None, 200, r#""is_paused":true"#),
            (UPDATE, Some(json!({"version": "step_2"})), 500, "No module named 'checkpoint_transfer'"),
            ("POST /v1/resume", None, 200, ""),
            ("GET /v1/is_paused", None, 200, r#""is_paused":false"#),
            ("POST /v1/sleep?tags=weights", None, 400, "Invalid tag: weights"),
            ("GET /nonsense", None, 404, ""),
        ])
        .await;
    let old = Server::start(|options, _| options.fastdeploy.v1_scheduler = false).await;
    old.play(&[("POST /v1/pause", None, 500, "pause only supported in ENABLE_V1_KVCACHE_SCHEDULER")]).await;
}

#[tokio::test]
async fn update_weights_takes_every_option_and_refuses_a_wrong_version() {
    let server = Server::start(|options, folder| {
        "rsync".clone_into(&mut options.fastdeploy.load_strategy);
        options.fastdeploy.transfer = Some(folder.join("published"));
        options.model = folder.join("published/step_2");
    })
    .await;
    server
        .play(&[
            ("POST /v1/pause", None, 200, ""),
            (UPDATE, Some(json!({"version": 2})), 400, "expected a string for version"),
            (UPDATE, Some(json!({"verify_checksum": "yes"})), 400, "expected a boolean"),
            (UPDATE, Some(json!([])), 400, "not a JSON object"),
            (UPDATE, Some(json!({"version": "step_2", "transfer_mode": "smoke"})), 500, "Unsupported weight transfer_mode: smoke"),
            (UPDATE, Some(json!({"version": "step_9"})), 500, "version mismatch"),
            (UPDATE, Some(json!({"version": "../model"})), 500, "version mismatch"),
            (UPDATE, None, 500, "rsync model version not set"),
            (UPDATE, Some(json!({"version": "step_2", "verify_checksum": true})), 200, r#""version":"step_2""#),
            (UPDATE, Some(json!({"version": "step_2", "transfer_mode": "gdr"})), 200, r#""transfer_mode":"gdr""#),
            (UPDATE, Some(json!({"version": "step_2", "transfer_mode": "rdma"})), 200, r#""sync_cost""#),
            ("GET /v1/is_paused", None, 200, r#""is_paused":true"#),
        ])
        .await;
    std::fs::write(server.folder.path().join("published/step_2/version.yaml"), "step: step_2\n").unwrap();
    server.play(&[(UPDATE, None, 200, r#""version":"step_2""#)]).await;
    // The stream that compares first leaves everything as it was.
    write_checkpoint(&server.folder.path().join("published/step_3"), &[("stranger", &[1])], 3);
    let before = server.call("GET /simulator/digest", None).await;
    server.play(&[(UPDATE, Some(json!({"version": "step_3"})), 500, "Invalid new_state_dict")]).await;
    assert_eq!(server.call("GET /simulator/digest", None).await, before);
}

#[tokio::test]
async fn the_gpu_direct_stream_releases_and_rebuilds_caches_where_asked_and_wants_the_draft_models_weights() {
    for release in [false, true] {
        let server = Server::start(|options, folder| {
            options.fastdeploy.transfer = Some(folder.join("published"));
            "gdr".clone_into(&mut options.fastdeploy.transfer_mode);
            options.fastdeploy.release_cache = release;
        })
        .await;
        server.play(&[("POST /v1/pause", None, 200, ""), (UPDATE, Some(json!({"version": "step_2"})), 200, "update_count")]).await;
        let memory = server.memory().await;
        let built = u32::from(release);
        assert_eq!((&memory["rebuilt"], &memory["recaptured"]), (&json!(built), &json!(built)));
        assert_eq!((&memory["kvCache"], &memory["graphs"]), (&json!(true), &json!(true)));
    }
    let draft = Server::start(|options, folder| {
        options.fastdeploy.transfer = Some(folder.join("published"));
        options.fastdeploy.mtp = true;
    })
    .await;
    let gdr = Some(json!({"version": "step_2", "transfer_mode": "gdr"}));
    draft.play(&[("POST /v1/pause", None, 200, ""), (UPDATE, gdr, 500, "No MTP weights were cached")]).await;
}

#[tokio::test]
async fn an_update_that_takes_longer_than_the_engine_waits_goes_on_behind_its_error() {
    let server = Server::start(|options, folder| {
        options.fastdeploy.transfer = Some(folder.join("published"));
        options.fastdeploy.worker_timeout = Duration::from_millis(30);
        options.faults = Faults { load_ms: 300, ..Faults::default() };
    })
    .await;
    let before = server.call("GET /simulator/digest", None).await;
    server.play(&[("POST /v1/pause", None, 200, ""), (UPDATE, Some(json!({"version": "step_2"})), 500, "Timeouted")]).await;
    let changed = async {
        while server.call("GET /simulator/digest", None).await == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), changed).await.unwrap();
}

#[tokio::test]
async fn sleep_and_wake_up_keep_the_rules_of_their_tags() {
    let server = Server::start(|options, _| options.fastdeploy.mtp = true).await;
    let ask = Some(json!({"model": "model", "prompt": "x", "max_tokens": 1}));
    server
        .play(&[
            ("POST /v1/sleep", None, 200, "success"),
            ("GET /v1/is_paused", None, 200, r#""is_paused":true"#),
            ("GET /health", None, 304, ""),
            ("GET /v1/models", None, 304, ""),
            ("POST /v1/completions", ask.clone(), 304, ""),
            ("POST /v1/wakeup?tags=weight", None, 500, "Please wake up [kv_cache] first"),
            ("POST /v1/wakeup?tags=kv_cache", None, 200, "success"),
            // It runs by itself, without weights.
            ("GET /v1/is_paused", None, 200, r#""is_paused":false"#),
            ("GET /health", None, 304, ""),
            // The first tag has nothing to do, so the second is never looked at.
            ("POST /v1/wakeup?tags=weight,kv_cache", None, 200, "success"),
            ("GET /health", None, 304, ""),
            ("POST /v1/wakeup?tags=weight", None, 200, "success"),
            ("GET /health", None, 200, ""),
            ("POST /v1/completions", ask, 200, "usage"),
            ("POST /v1/wakeup", None, 200, "success"),
        ])
        .await;
    let memory = server.memory().await;
    assert_eq!((&memory["rebuilt"], &memory["recaptured"], &memory["mtpCache"]), (&json!(1), &json!(1), &json!(true)));
}

#[tokio::test]
async fn the_legacy_routes_clear_and_reload_and_do_nothing_where_weights_are_there() {
    for v1 in [false, true] {
        let server = Server::start(|options, _| options.fastdeploy.v1_update_weights = v1).await;
        let before = server.call("GET /simulator/digest", None).await;
        server
            .play(&[
                ("GET /update_model_weight", None, 200, ""),
                ("GET /clear_load_weight", None, 200, ""),
                ("GET /clear_load_weight", None, 200, ""),
                ("GET /health", None, 304, ""),
                ("GET /v1/is_paused", None, 200, if v1 { "true" } else { "false" }),
                ("GET /update_model_weight", None, 200, ""),
                ("GET /health", None, 200, ""),
                ("GET /v1/is_paused", None, 200, "false"),
            ])
            .await;
        assert_eq!(server.call("GET /simulator/digest", None).await, before);
        // What lacks a parameter is found here, and by no wake-up.
        write_checkpoint(&server.folder.path().join("less"), &TENSORS[..3], 2);
        std::fs::rename(server.folder.path().join("less/model.safetensors"), server.folder.path().join("model/model_state.tp0.0.pdparams"))
            .unwrap();
        server
            .play(&[
                ("GET /clear_load_weight", None, 200, ""),
                ("GET /update_model_weight", None, 404, "timeout"),
                ("GET /health", None, 304, ""),
            ])
            .await;
        server
            .play(&[
                ("POST /v1/sleep?tags=kv_cache", None, 200, ""),
                ("POST /v1/wakeup", None, 200, "success"),
                ("GET /health", None, 200, ""),
            ])
            .await;
        assert_eq!(server.memory().await["empty"], json!(["norm.weight"]), "it serves a parameter that holds nothing");
    }
    let disabled = Server::start(|options, _| options.fastdeploy.dynamic_load_weight = false).await;
    for path in ["GET /clear_load_weight", "GET /update_model_weight"] {
        disabled.play(&[(path, None, 404, "Dynamic Load Weight Disabled.")]).await;
    }
}

#[tokio::test]
async fn part_files_come_before_the_whole_one_and_that_before_the_legacy_name() {
    let digest = |server: Server| async move { server.call("GET /simulator/digest", None).await.1 };
    let whole = digest(Server::start(|_, _| {}).await).await;
    let with = |name: &'static str, seed: u8| async move {
        let server = Server::start(|_, folder| {
            write_checkpoint(&folder.join("other"), &TENSORS, seed);
            std::fs::rename(folder.join("other/model.safetensors"), folder.join("model").join(name)).unwrap();
        });
        digest(server.await).await
    };
    assert_eq!(with("model_state.tp00.pdparams", 2).await, whole, "the legacy name is the last");
    assert_ne!(with("model_state.tp0.0.part0.pdparams", 2).await, whole, "a part is the first");
    let none = TempDir::new().unwrap();
    write_checkpoint(none.path(), &TENSORS, 1);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let error = Simulator::start(SimulatorOptions::new("fastdeploy", none.path().into()), listener).await.err().unwrap().to_string();
    assert!(error.contains("No snapshot found"), "{error}");
}
