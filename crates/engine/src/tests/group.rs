//! Engines as members of groups, against servers that follow the session rules of each kind and record every call. Whole groups with
//! receiving ranks are in `tests/host/gpu/engines.rs`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::IntoResponse;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::support::{SOON, adapter, held, recorded};
use crate::{DeviceBucket, DeviceInstall, DeviceJob, Engine, GroupJoin, InstallError, InstallReport, InstallTerms, Left};
use weightsync_core::protocol::worker::Opaque;
use weightsync_core::protocol::{EngineChecksum, GroupPlace, KvCachePolicy, PausePolicy, Rendezvous};
use weightsync_core::weights::{Dtype, Layout, TensorSpec};

/// State of a server.
#[derive(Default)]
struct Inside {
    calls: Vec<(String, Value)>,
    version: String,
    paused: bool,
    open: bool,
    /// Replies that replace its own: path, number of calls that pass before, status, body.
    instead: HashMap<String, (u32, u16, Value)>,
}

#[derive(Clone, Default)]
pub(super) struct Server(Arc<Mutex<Inside>>);

impl Server {
    fn with<T>(&self, read: impl FnOnce(&mut Inside) -> T) -> T {
        read(&mut self.0.lock())
    }

    fn instead(&self, path: &str, after: u32, status: u16, body: Value) {
        self.with(|inside| inside.instead.insert(path.into(), (after, status, body)));
    }

    /// Paths of POST calls that are about groups and updates.
    pub(super) fn posts(&self) -> Vec<String> {
        let plain = [
            "/pause_generation",
            "/continue_generation",
            "/flush_cache",
            "/update_weight_version",
            "/pause",
            "/resume",
            "/reset_prefix_cache",
        ];
        self.with(|inside| {
            inside
                .calls
                .iter()
                .map(|(path, _)| path.clone())
                .filter(|path| path.starts_with('/') && !plain.contains(&path.as_str()))
                .collect()
        })
    }

    pub(super) fn bodies(&self, path: &str) -> Vec<Value> {
        self.with(|inside| inside.calls.iter().filter(|(called, _)| called == path).map(|(_, body)| body.clone()).collect())
    }

    async fn start(self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().fallback(answer).with_state(self);
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        url
    }
}

async fn answer(State(server): State<Server>, method: Method, uri: Uri, body: Bytes) -> axum::response::Response {
    let path = uri.path().to_owned();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (status, reply) = server.with(|inside| {
        let noted = if method == Method::POST { path.clone() } else { format!("GET {path}") };
        inside.calls.push((noted, body.clone()));
        match inside.instead.get_mut(&path) {
            Some((0, status, reply)) => return (*status, reply.clone()),
            Some((after, ..)) => *after -= 1,
            None => {}
        }
        inside.reply(&method, &path, &body)
    });
    (StatusCode::from_u16(status).unwrap(), axum::Json(reply)).into_response()
}

impl Inside {
    fn session(&mut self, opens: bool, done: Value, refused: (u16, Value)) -> (u16, Value) {
        if self.open == opens {
            return refused;
        }
        self.open = opens;
        (200, done)
    }

    fn reply(&mut self, method: &Method, path: &str, body: &Value) -> (u16, Value) {
        let ok = || json!({"success": true, "message": ""});
        let no = |why: &str| (400, json!({"success": false, "message": why}));
        let failed = |why: &str| (500, json!({"error": {"message": why, "code": 500}}));
        match path {
            // SGLang 0.5.23.
            "/server_info" => (200, json!({"version": "0.5.23", "tp_size": 2, "startup_time": 1})),
            "/model_info" => (200, json!({"weight_version": self.version})),
            "/update_weight_version" => {
                self.version = body["new_version"].as_str().unwrap().to_owned();
                (200, json!({"success": true, "new_version": self.version}))
            }
            "/pause_generation" | "/continue_generation" => {
                self.paused = path == "/pause_generation";
                (200, json!({"status": "ok"}))
            }
            "/ready" => (if self.paused { 503 } else { 200 }, Value::Null),
            "/begin_weight_update" if method == Method::GET => (405, Value::Null),
            "/begin_weight_update" => self.session(true, ok(), no("a session is open: end it first")),
            "/end_weight_update" => self.session(false, ok(), no("no session is open")),
            "/update_weights_from_distributed" if body.get("finished").is_none() && !self.open => no("must run between begin and end"),
            "/init_weights_update_group" | "/destroy_weights_update_group" | "/update_weights_from_distributed" => (200, ok()),
            // vLLM 0.32.
            "/get_world_size" => (200, json!({"world_size": 2})),
            "/version" => (200, json!({"version": "0.32.0"})),
            "/weight_info" => (200, json!({"weight_version": self.version})),
            "/is_paused" => (200, json!({"is_paused": self.paused})),
            "/pause" | "/resume" => {
                self.paused = path == "/pause";
                (200, json!({"status": if self.paused { "paused" } else { "resumed" }}))
            }
            "/init_weight_transfer_engine" if body["init_info"]["nccl_unique_id_b64"] == json!("*") => failed("not valid standard base64"),
            "/init_weight_transfer_engine" => (200, json!({"message": "Weight transfer initialized"})),
            "/shutdown_weight_transfer_engine" if self.open => failed("Cannot release a trainer connection during a weight update"),
            "/shutdown_weight_transfer_engine" => (200, json!({"message": "Weight transfer shut down"})),
            "/start_weight_update" => {
                let active = failed("start_weight_update called while a weight update is already active. Call finish_weight_update first.");
                self.session(true, json!({"message": "Weight update started"}), active)
            }
            "/start_draft_weight_update" => {
                self.session(true, json!({"message": "Draft weight update started"}), failed("a session is active"))
            }
            "/finish_weight_update" => {
                self.session(false, json!({"message": "Weight update finished"}), failed("without a matching start"))
            }
            "/update_weights" => (200, json!({"message": "Weights updated"})),
            "/reset_prefix_cache" => (200, json!({"success": true})),
            "/metrics" => (404, Value::Null),
            "/v1/models" => (200, json!({"data": [{"id": "m", "root": "m"}]})),
            "/generate" => (200, json!({"meta_info": {"output_token_logprobs": [[-0.5, 0, null]]}})),
            "/v1/completions" => (
                200,
                json!({"choices": [{"finish_reason": "length", "text": "a", "logprobs": {"token_logprobs": [-0.5]}}], "usage": {"completion_tokens": 1}}),
            ),
            _ => (200, json!({"success": true, "status": "ok"})),
        }
    }
}

pub(super) async fn engine(kind: &str) -> (Server, Arc<dyn Engine>) {
    let server = Server::default();
    server.with(|inside| inside.version = "default".into());
    let url = server.clone().start().await;
    (server, adapter(kind, &url, None, None))
}

fn join(epoch: u64, rendezvous: Rendezvous) -> GroupJoin {
    let place = match rendezvous {
        Rendezvous::Store => GroupPlace::Store { address: "10.0.0.1".into(), port: 4711 },
        Rendezvous::UniqueId => GroupPlace::UniqueId { id: Opaque([7; 128]) },
    };
    GroupJoin { name: format!("weightsync-uid-1-1-{epoch}-0"), place, offset: 3, world: 5 }
}

/// Two buckets; the first has two element types.
fn job() -> DeviceJob {
    let tensor = |name: &str, dtype, shape: &[u64]| TensorSpec::new(name.into(), dtype, shape.to_vec());
    let tensors = vec![tensor("a", Dtype::BF16, &[3, 5]), tensor("scale", Dtype::F32, &[1]), tensor("b", Dtype::BF16, &[64])];
    DeviceJob {
        terms: InstallTerms {
            version: InstallTerms::mark(4, None),
            pause: PausePolicy::Abort,
            kv_cache: KvCachePolicy::Reset,
            canary: None,
            timeout: SOON,
            cancel: CancellationToken::new(),
        },
        layout: Arc::new(Layout::new("model", tensors, 128).unwrap().cut_between_tensors()),
        silence: SOON,
        sockets: "/nowhere".into(),
        sockets_in_engine: "/nowhere".into(),
    }
}

async fn begun(engine: &Arc<dyn Engine>, rendezvous: Rendezvous) -> Box<dyn DeviceInstall> {
    let group = engine.group().unwrap();
    group.join(&join(1, rendezvous), SOON).await.unwrap();
    group.begin(&job(), watch::Sender::new(None).subscribe()).await.unwrap()
}

async fn received(engine: &Arc<dyn Engine>, rendezvous: Rendezvous) -> Result<InstallReport, InstallError> {
    received_of(engine, rendezvous, Layout::clone(&job().layout)).await
}

/// Joins a group and takes a version of that layout.
pub(super) async fn received_of(engine: &Arc<dyn Engine>, rendezvous: Rendezvous, layout: Layout) -> Result<InstallReport, InstallError> {
    let group = engine.group().unwrap();
    group.join(&join(1, rendezvous), SOON).await.unwrap();
    let job = DeviceJob { layout: Arc::new(layout), ..job() };
    let mut install = group.begin(&job, watch::Sender::new(None).subscribe()).await.unwrap();
    install.open().await?;
    for bucket in job.layout.buckets() {
        install.bucket(DeviceBucket { bucket, places: Vec::new(), sums: Vec::new() }).await?;
    }
    install.finish(held(4)).await
}

/// Story F93.
#[tokio::test]
async fn sglang_adapter_sends_one_element_type_per_bucket() {
    let (server, engine) = engine("sglang").await;
    assert_eq!(engine.group().unwrap().facts(SOON).await.unwrap().why_not, "");
    received(&engine, Rendezvous::Store).await.unwrap();
    let posts =
        ["/init_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed", "/update_weights_from_distributed"];
    assert_eq!(server.posts()[..4], posts);
    let buckets = server.bodies("/update_weights_from_distributed");
    let sent: Vec<_> = buckets.iter().map(|body| (body["names"].clone(), body["dtypes"].clone())).collect();
    let expected = [(json!(["scale"]), json!(["float32"])), (json!(["a"]), json!(["bfloat16"])), (json!(["b"]), json!(["bfloat16"]))];
    assert_eq!(sent, expected);
    assert!(buckets.iter().all(|body| body["weight_version"].is_null() && body["flush_cache"] == json!(false)), "{buckets:?}");
    let init = &server.bodies("/init_weights_update_group")[0];
    assert_eq!((&init["rank_offset"], &init["world_size"], &init["master_port"]), (&json!(3), &json!(5), &json!(4711)));
    let versions = server.bodies("/update_weight_version");
    assert!(versions.last().unwrap()["new_version"].as_str().unwrap().starts_with("4+"), "{versions:?}");
    assert!(!server.with(|inside| inside.paused || inside.open));
}

#[tokio::test]
async fn store_at_an_ipv6_address_is_sent_in_brackets() {
    for kind in ["sglang", "lmdeploy"] {
        let (server, engine) = engine(kind).await;
        let place = GroupPlace::Store { address: "fd00::7".into(), port: 4711 };
        engine.group().unwrap().join(&GroupJoin { place, ..join(1, Rendezvous::Store) }, SOON).await.unwrap();
        let init = server.bodies("/init_weights_update_group").pop().unwrap();
        assert_eq!(init["master_address"], "[fd00::7]", "{kind}");
    }
}

#[tokio::test]
async fn vllm_adapter_joins_by_id_and_takes_whole_requests() {
    let (server, engine) = engine("vllm").await;
    let facts = engine.group().unwrap().facts(SOON).await.unwrap();
    assert_eq!((facts.rendezvous, facts.size, facts.why_not.as_str()), (Rendezvous::UniqueId, 2, ""));
    received(&engine, Rendezvous::UniqueId).await.unwrap();
    let init = server.bodies("/init_weight_transfer_engine").pop().unwrap();
    assert_eq!((&init["init_info"]["packed"], &init["init_info"]["rank_offset"]), (&json!(true), &json!(3)));
    assert!(init["init_info"]["packed_buffer_size_bytes"].as_u64().unwrap() > 1 << 39);
    assert_eq!(server.bodies("/update_weights").len(), 3);
    assert_eq!(server.bodies("/finish_weight_update").len(), 1);
}

/// What the checker of that kind answers for one rank.
fn checker(kind: &str, weights: &[(&str, &str)]) -> (&'static str, Value) {
    let named = |place: &str| -> Value { weights.iter().map(|(name, digest)| (format!("{place}{name}"), json!(digest))).collect() };
    if kind == "vllm" {
        return ("/weight_checker", json!({"checksums": named("dp0:pp0:pcp0:tp0:")}));
    }
    let place = json!({"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1});
    let rank = json!({"checksums": named(""), "per_gpu_checksum": "x", "parallelism_info": place});
    ("/weights_checker", json!({"success": true, "message": "Success.", "ranks": [rank]}))
}

/// Takes all buckets, its last step, and checksums.
async fn sealed(engine: &Arc<dyn Engine>, rendezvous: Rendezvous) -> (Box<dyn DeviceInstall>, Option<EngineChecksum>) {
    let mut install = begun(engine, rendezvous).await;
    install.open().await.unwrap();
    for bucket in job().layout.buckets() {
        install.bucket(DeviceBucket { bucket, places: Vec::new(), sums: Vec::new() }).await.unwrap();
    }
    let checksum = install.seal().await.unwrap();
    (install, checksum)
}

#[tokio::test]
async fn sealed_engine_stays_paused_and_is_finished_once() {
    let digest = "ab".repeat(32);
    for (kind, rendezvous, last) in
        [("sglang", Rendezvous::Store, "/end_weight_update"), ("vllm", Rendezvous::UniqueId, "/finish_weight_update")]
    {
        let (server, engine) = engine(kind).await;
        let (path, reply) = checker(kind, &[("model.norm.weight", &digest)]);
        server.instead(path, 0, 200, reply);
        let (install, checksum) = sealed(&engine, rendezvous).await;
        let checksum = checksum.unwrap();
        assert!(checksum.of.starts_with(kind) && checksum.of.contains("1 weights"), "{checksum:?}");
        let (paused, version) = server.with(|inside| (inside.paused, inside.version.clone()));
        assert!(paused && version.starts_with("installing:"), "{kind}: {version}");
        assert_eq!(server.bodies(path)[0]["action"], json!("checksum"), "no other action is harmless");
        install.finish(held(4)).await.unwrap();
        assert_eq!(server.bodies(last).len(), 1, "{kind}");
        assert!(!server.with(|inside| inside.paused), "{kind}");
    }
}

#[tokio::test]
async fn sealed_engine_that_is_given_up_holds_a_mixture() {
    for (kind, rendezvous) in [("sglang", Rendezvous::Store), ("vllm", Rendezvous::UniqueId)] {
        let (server, engine) = engine(kind).await;
        let (install, _) = sealed(&engine, rendezvous).await;
        assert_eq!(install.abandon("its checksums are those of no other").await, Left::Mixture);
        let (paused, version) = server.with(|inside| (inside.paused, inside.version.clone()));
        assert!(paused && version.starts_with("installing:"), "{kind}: {version}");
    }
}

#[tokio::test]
async fn checker_that_proves_nothing_stops_no_install() {
    let digest = "ab".repeat(32);
    let nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let experts = "model.layers.0.mlp.experts.w13_weight";
    let cases = [
        ("vllm", 404, json!({})),
        ("vllm", 500, json!({"detail": "Duplicate weight checksum keys"})),
        ("vllm", 200, json!({"success": true})),
        ("vllm", 200, checker("vllm", &[("model.norm.weight", &digest), ("model.qkv_proj.weight", nothing)]).1),
        ("vllm", 200, checker("vllm", &[("model.norm.weight", &digest), (experts, &digest)]).1),
        ("sglang", 400, json!({"success": false, "message": "Unsupported action='checksum'"})),
        ("sglang", 200, json!({"success": true, "message": "Success."})),
        ("sglang", 200, checker("sglang", &[("model.norm.weight", &nothing[..16])]).1),
        ("sglang", 404, json!({})),
    ];
    for (kind, status, reply) in cases {
        let (server, engine) = engine(kind).await;
        server.instead(checker(kind, &[]).0, 0, status, reply.clone());
        let rendezvous = if kind == "vllm" { Rendezvous::UniqueId } else { Rendezvous::Store };
        let (install, checksum) = sealed(&engine, rendezvous).await;
        assert_eq!(checksum, None, "{kind}: {status} {reply}");
        install.finish(held(4)).await.unwrap();
    }
}

#[tokio::test]
async fn ranks_of_one_place_or_moving_experts_prove_nothing() {
    let digest = "ab".repeat(32);
    let (path, mut reply) = checker("sglang", &[("model.norm.weight", &digest)]);
    let (server, one) = engine("sglang").await;
    server.instead("/server_info", 0, 200, json!({"version": "0.5.23", "tp_size": 2, "startup_time": 1, "enable_eplb": true}));
    server.instead(path, 0, 200, reply.clone());
    assert_eq!(sealed(&one, Rendezvous::Store).await.1, None);
    let rank = reply["ranks"][0].clone();
    reply["ranks"].as_array_mut().unwrap().push(rank);
    let (server, other) = engine("sglang").await;
    server.instead(path, 0, 200, reply);
    assert_eq!(sealed(&other, Rendezvous::Store).await.1, None);
}

/// Story F92.
#[tokio::test]
async fn dead_trainers_session_is_closed_and_engine_is_touched() {
    for (kind, rendezvous) in [("sglang", Rendezvous::Store), ("vllm", Rendezvous::UniqueId)] {
        let (server, engine) = engine(kind).await;
        let mut install = begun(&engine, rendezvous).await;
        server.with(|inside| inside.open = true);
        install.open().await.unwrap();
        assert_eq!(install.abandon("the source went away").await, Left::Mixture, "{kind}: it may hold what somebody else sent");
        let (open, paused, version) = server.with(|inside| (inside.open, inside.paused, inside.version.clone()));
        assert!(!open && paused && version.starts_with("installing:"), "{kind}: {open} {paused} {version}");
        received(&engine, rendezvous).await.unwrap();
        assert!(!server.with(|inside| inside.paused), "{kind}");
    }
}

#[tokio::test]
async fn install_given_up_before_a_bucket_leaves_engine_unchanged() {
    let (server, engine) = engine("sglang").await;
    let mut install = begun(&engine, Rendezvous::Store).await;
    install.open().await.unwrap();
    assert_eq!(install.abandon("another engine refused").await, Left::AsBefore);
    let (open, paused, version) = server.with(|inside| (inside.open, inside.paused, inside.version.clone()));
    assert_eq!((open, paused, version.as_str()), (false, false, "default"));
}

/// Story F50.
#[tokio::test]
async fn bucket_refused_midway_leaves_engine_marked_paused() {
    let (server, engine) = engine("sglang").await;
    server.instead("/update_weights_from_distributed", 2, 400, json!({"success": false, "message": "partially updated"}));
    let error = received(&engine, Rendezvous::Store).await.unwrap_err();
    assert!(error.is_dirty() && error.to_string().contains("partially updated"), "{error}");
    let (open, paused, version) = server.with(|inside| (inside.open, inside.paused, inside.version.clone()));
    assert!(!open && paused && version.starts_with("installing:"), "{open} {paused} {version}");
}

/// Story F49.
#[tokio::test]
async fn engine_without_a_confirmed_last_step_holds_nothing() {
    let (server, engine) = engine("vllm").await;
    server.instead("/finish_weight_update", 0, 500, json!({"error": {"message": "boom"}}));
    let error = received(&engine, Rendezvous::UniqueId).await.unwrap_err();
    assert!(error.is_dirty(), "{error}");
    assert!(server.with(|inside| inside.version.starts_with("installing:")));
}

#[tokio::test]
async fn success_must_be_the_value_true_and_nothing_like_it() {
    for body in
        [json!({"success": "true"}), json!({"message": "ok"}), json!({"success": true, "error": {"code": 500}}), json!({"success": 1})]
    {
        let (server, engine) = engine("sglang").await;
        server.instead("/init_weights_update_group", 0, 200, body.clone());
        let joined = engine.group().unwrap().join(&join(1, Rendezvous::Store), SOON).await;
        assert!(joined.is_err(), "{body}");
    }
}

/// Stories F27 and F30.
#[tokio::test]
async fn old_group_is_left_before_another_is_joined() {
    for (kind, rendezvous) in [("sglang", Rendezvous::Store), ("vllm", Rendezvous::UniqueId)] {
        let (server, engine) = engine(kind).await;
        let group = engine.group().unwrap();
        group.join(&join(1, rendezvous), SOON).await.unwrap();
        server.with(|inside| inside.calls.clear());
        group.join(&join(2, rendezvous), SOON).await.unwrap();
        let posts = server.posts();
        let (leave, init) = match rendezvous {
            Rendezvous::Store => ("/destroy_weights_update_group", "/init_weights_update_group"),
            Rendezvous::UniqueId => ("/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"),
        };
        assert_eq!(posts, [leave, init]);
        if kind == "sglang" {
            assert_eq!(server.bodies(leave)[0]["group_name"], json!("weightsync-uid-1-1-1-0"));
        }
    }
}

#[tokio::test]
async fn restarted_agent_leaves_its_predecessors_group() {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("engine-1.json");
    let server = Server::default();
    server.with(|inside| "default".clone_into(&mut inside.version));
    let url = server.clone().start().await;
    let life = || recorded("sglang", &url, record.clone());
    life().group().unwrap().join(&join(1, Rendezvous::Store), SOON).await.unwrap();
    life().group().unwrap().join(&join(2, Rendezvous::Store), SOON).await.unwrap();
    let third = life();
    third.group().unwrap().leave(SOON).await.unwrap();
    let left: Vec<_> = server.bodies("/destroy_weights_update_group").iter().map(|body| body["group_name"].clone()).collect();
    assert_eq!(left, ["weightsync-uid-1-1-1-0", "weightsync-uid-1-1-2-0"]);
    // A group that was left is not left again, by any agent.
    life().group().unwrap().leave(SOON).await.unwrap();
    assert_eq!(server.bodies("/destroy_weights_update_group").len(), 2);
    // Invalid bytes are no name.
    std::fs::write(record.with_extension("group"), "a\nb").unwrap();
    life().group().unwrap().leave(SOON).await.unwrap();
    assert_eq!(server.bodies("/destroy_weights_update_group").len(), 2);
}

/// Story F60.
#[tokio::test]
async fn obstacle_to_joining_is_named_with_the_option() {
    let cases = [
        ("sglang", "/begin_weight_update", 404, json!({}), "SGLang 0.5.23 or newer"),
        ("sglang", "/server_info", 200, json!({"version": "0.5.23", "tp_size": 2, "pp_size": 2}), "--pp-size"),
        ("sglang", "/server_info", 200, json!({"version": "0.5.23", "tp_size": 2, "dp_size": 2}), "--enable-dp-attention"),
        ("vllm", "/get_world_size", 404, json!({}), "VLLM_SERVER_DEV_MODE=1"),
        ("vllm", "/init_weight_transfer_engine", 500, json!({"error": "Weight transfer not configured."}), "--weight-transfer-config"),
        ("vllm", "/init_weight_transfer_engine", 500, json!({"error": "unexpected keyword argument"}), "vLLM 0.32 or newer"),
        ("lmdeploy", "/destroy_weights_update_group", 500, json!({}), "--distributed-executor-backend ray"),
        ("lmdeploy", "/destroy_weights_update_group", 404, json!({}), "LMDeploy 0.18 or newer"),
    ];
    for (kind, path, status, body, says) in cases {
        let (server, engine) = engine(kind).await;
        server.instead("/update_weights_from_ipc", 0, 200, json!({"backend": "pytorch", "device_uuids": ["GPU-a"]}));
        server.instead("/distserve/engine_info", 0, 200, json!("{\"tp_size\": 1}"));
        server.instead(path, 0, status, body);
        let facts = engine.group().unwrap().facts(SOON).await.unwrap();
        assert!(facts.why_not.contains(says), "{kind} {path}: {facts:?}");
    }
}

#[tokio::test]
async fn stuck_engine_answers_health_and_computes_nothing() {
    let (_, engine) = engine("sglang").await;
    assert!(!engine.is_stuck(Duration::from_millis(500)).await);
    // A front that responds, before an engine that never does.
    let hanging = |path: axum::http::Uri| async move {
        if path.path() == "/ping" {
            return StatusCode::OK;
        }
        std::future::pending().await
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move { axum::serve(listener, Router::new().fallback(hanging)).await });
    let engine = adapter("sglang", &url, None, None);
    // Its front has that long for its answer, too.
    assert!(engine.is_stuck(Duration::from_secs(2)).await);
    serving.abort();
    let _ended = serving.await;
    assert!(!engine.is_stuck(Duration::from_millis(300)).await, "one that is gone is not stuck");
}
