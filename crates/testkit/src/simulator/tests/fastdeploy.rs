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

    async fn digest(&self) -> Value {
        let all: Value = serde_json::from_str(&self.call("GET /simulator/digest", None).await.1).unwrap();
        all["digest"].clone()
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

/// Started with `--load_strategy rsync` on a model that is published as `step_2`.
async fn rsync_server(gdr: bool, more: impl FnOnce(&mut SimulatorOptions)) -> Server {
    Server::start(|options, folder| {
        "rsync".clone_into(&mut options.fastdeploy.load_strategy);
        options.fastdeploy.gdr = gdr;
        options.fastdeploy.transfer = Some(folder.join("published"));
        options.model = folder.join("published/step_2");
        more(options);
    })
    .await
}

#[tokio::test]
async fn update_weights_resolves_and_refuses_versions() {
    for gdr in [false, true] {
        let server = rsync_server(gdr, |_| {}).await;
        server
            .play(&[
                ("POST /v1/pause", None, 200, ""),
                (UPDATE, Some(json!({"version": 2})), 400, r#""message":"version must be a string""#),
                (UPDATE, Some(json!({"verify_checksum": "yes"})), 400, r#""message":"verify_checksum must be a boolean""#),
                (UPDATE, Some(json!({"version": "step_9"})), 500, "version mismatch"),
                (UPDATE, Some(json!({"version": "../model"})), 500, "version mismatch"),
                (UPDATE, None, 500, "rsync model version not set"),
                (UPDATE, Some(json!({"version": ""})), 500, "rsync model version not set"),
                (UPDATE, Some(json!({"version": "step_2", "verify_checksum": true})), 200, r#""version":"step_2""#),
                // The field of the thread's first form is passed over, as every field that it does not know.
                (
                    UPDATE,
                    Some(json!({"version": "step_2", "transfer_mode": "smoke"})),
                    200,
                    if gdr { r#""update_count":4"# } else { r#""sync_cost""# },
                ),
                ("GET /v1/is_paused", None, 200, r#""is_paused":true"#),
                // A wake-up knows no such strategy, whatever the flag.
                ("POST /v1/sleep", None, 200, ""),
                ("POST /v1/wakeup", None, 500, "Unsupported strategy: rsync"),
            ])
            .await;
        std::fs::write(server.folder.path().join("published/step_2/version.yaml"), "step: step_2\n").unwrap();
        server.play(&[("POST /v1/pause", None, 200, ""), (UPDATE, None, 200, r#""version":"step_2""#)]).await;
    }
}

#[tokio::test]
async fn the_rdma_stream_compares_before_it_sets() {
    let server = rsync_server(false, |_| {}).await;
    write_checkpoint(&server.folder.path().join("published/step_3"), &[("stranger", &[1])], 3);
    let before = server.digest().await;
    let update = Some(json!({"version": "step_3"}));
    server.play(&[("POST /v1/pause", None, 200, ""), (UPDATE, update, 500, "Invalid new_state_dict")]).await;
    assert_eq!(server.digest().await, before);
}

#[tokio::test]
async fn the_gdr_handle_is_kept_until_an_update_fails() {
    let server = rsync_server(true, |options| options.world_size = 2).await;
    let good = || (UPDATE, Some(json!({"version": "step_2"})), 200, r#""rank":1"#);
    server.play(&[("POST /v1/pause", None, 200, ""), good(), good()]).await;
    assert_eq!((&server.memory().await["handle"], &server.memory().await["handles"]), (&json!(1), &json!(1)));
    server.play(&[(UPDATE, Some(json!({"version": "step_9"})), 500, "version mismatch")]).await;
    assert_eq!(server.memory().await["handle"], json!(null));
    server.play(&[good()]).await;
    assert_eq!((&server.memory().await["handle"], &server.memory().await["handles"]), (&json!(2), &json!(2)));
}

#[tokio::test]
async fn gdr_without_rsync_takes_step_0_where_none_is_named() {
    let server = Server::start(|options, folder| {
        "ipc".clone_into(&mut options.fastdeploy.load_strategy);
        options.fastdeploy.gdr = true;
        options.fastdeploy.transfer = Some(folder.join("published"));
        write_checkpoint(&folder.join("published/0"), &TENSORS, 3);
        options.model = folder.join("published/0");
    })
    .await;
    let zero = server.digest().await;
    server.play(&[("POST /v1/pause", None, 200, ""), (UPDATE, Some(json!({"version": "step_2"})), 200, r#""version":"step_2""#)]).await;
    assert_ne!(server.digest().await, zero);
    server.play(&[(UPDATE, None, 200, r#""version":"0""#)]).await;
    assert_eq!(server.digest().await, zero);
    // The legacy route restores what was cleared, and brings the same step.
    server
        .play(&[("GET /clear_load_weight", None, 200, ""), ("GET /update_model_weight", None, 200, ""), ("GET /health", None, 200, "")])
        .await;
    assert_eq!(server.digest().await, zero);
}

#[tokio::test]
async fn a_draft_models_weights_come_in_chunks_of_the_same_stream() {
    let tensors: [(&str, &[u64]); 4] = [
        ("model.layers.2.q.weight", &[2]),
        ("ernie.mtp_linear_proj.0.weight", &[2]),
        ("model.layers.2.o.weight", &[2]),
        ("model.layers.20.q.weight", &[2]),
    ];
    let server = Server::start(|options, folder| {
        "rsync".clone_into(&mut options.fastdeploy.load_strategy);
        options.fastdeploy.gdr = true;
        options.fastdeploy.mtp = true;
        options.fastdeploy.mtp_layers = (2, 1);
        options.fastdeploy.mtp_chunk = 2;
        options.fastdeploy.transfer = Some(folder.join("published"));
        write_checkpoint(&folder.join("published/step_3"), &tensors, 3);
        options.model = folder.join("published/step_3");
    })
    .await;
    let update = |version: &str| Some(json!({"version": version}));
    server.play(&[("POST /v1/pause", None, 200, ""), (UPDATE, update("step_3"), 200, r#""mtp_cache_count":3"#)]).await;
    assert_eq!(server.memory().await["mtpChunks"], json!([2, 1]));
    server.play(&[(UPDATE, update("step_2"), 500, "No MTP weights were cached")]).await;
}

#[tokio::test]
async fn update_longer_than_the_engine_waits_continues_after_error() {
    let server = rsync_server(true, |options| {
        options.model = options.model.with_file_name("step_1");
        write_checkpoint(&options.model, &TENSORS, 1);
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
async fn legacy_routes_clear_and_reload_only_without_weights() {
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
async fn part_files_precede_whole_file_and_legacy_name() {
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
