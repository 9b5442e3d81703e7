//! An engine whose only rank is a worker of its own: it joins groups, enters broadcasts and serves what came out of them, by the rules of three kinds.
//!
//! The engine's core does one thing at a time and has no deadline, as the real ones: while it waits in a collective, only its front answers. What it
//! serves changes with the last step of an update, never before.

mod core;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{digest_hex, tensor_digest};

use self::core::Core;
use super::fixture::{Machine, Member};
use crate::world::SOON;

/// As good as for ever: engines have no deadline of their own.
const FOR_EVER: Duration = Duration::from_secs(600);

/// By whose rules.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Vllm,
    Sglang,
    Lmdeploy,
}

#[derive(Default)]
struct Inside {
    calls: Vec<String>,
    version: String,
    paused: bool,
    open: bool,
    serves: BTreeMap<String, String>,
    taken: BTreeMap<String, String>,
    /// Replies instead of its own: path, how many calls pass before, how many get them, status, body.
    instead: HashMap<String, (u32, u32, u16, Value)>,
    /// Its group does nothing and says success (torch 2.15 with nccl2).
    idle: bool,
    /// Number of buckets, counted over all updates, that are answered only after the request for the next one.
    lingers: u64,
    /// Takes this bucket, counted from 1 over all updates, and fails with it.
    spoils: Option<u64>,
    /// Loads so many updates from a group wrongly, and says success.
    corrupts: u32,
    /// Buckets that it took, and the most requests for buckets that it had at one time.
    answered: u64,
    most_at_once: u64,
}

/// An engine. Its server ends with it.
pub struct Joiner {
    shared: Arc<Shared>,
    serving: tokio::task::JoinHandle<()>,
}

struct Shared {
    kind: Kind,
    inside: Mutex<Inside>,
    core: tokio::sync::Mutex<Core>,
    /// Buckets that it was asked for.
    asked: watch::Sender<u64>,
}

impl Drop for Joiner {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Joiner {
    /// Starts on a port, with its rank on that GPU.
    pub async fn start(machine: &Machine, kind: Kind, gpu: u32, port: u16) -> Self {
        let member = Member::new(machine.worker(gpu).await).await;
        let inside = Inside { version: "default".into(), ..Inside::default() };
        let core = tokio::sync::Mutex::new(Core { member, group: None, next: 0 });
        let shared = Arc::new(Shared { kind, inside: Mutex::new(inside), core, asked: watch::Sender::new(0) });
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let router = Router::new().fallback(answer).with_state(shared.clone());
        let serving = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { shared, serving }
    }

    fn with<T>(&self, read: impl FnOnce(&mut Inside) -> T) -> T {
        self.shared.with(read)
    }

    /// Whether it serves exactly that model.
    pub fn serves(&self, model: &crate::model::Model) -> bool {
        json!(self.with(|inside| inside.serves.clone())) == model.digests()
    }

    /// Replies to some calls of a path.
    pub fn instead(&self, path: &str, (after, times): (u32, u32), status: u16, body: Value) {
        self.with(|inside| inside.instead.insert(path.into(), (after, times, status, body)));
    }

    /// Says success to all of an update, and enters nothing.
    pub fn idle(&self, idle: bool) {
        self.with(|inside| inside.idle = idle);
    }

    /// Answers none of the first so many buckets before it is asked for the next one, except the last of an update.
    pub fn lingers(&self, buckets: u64) {
        self.with(|inside| inside.lingers = buckets);
    }

    /// Takes a bucket, counted from 1 over all updates, and fails with it.
    pub fn spoils(&self, bucket: u64) {
        self.with(|inside| inside.spoils = Some(bucket));
    }

    /// Loads so many updates from its group wrongly, and says success.
    pub fn corrupts(&self, updates: u32) {
        self.with(|inside| inside.corrupts = updates);
    }

    /// The most requests for buckets that it had at one time.
    pub fn most_at_once(&self) -> u64 {
        self.with(|inside| inside.most_at_once)
    }

    /// How often a path was called.
    pub fn count(&self, path: &str) -> usize {
        self.with(|inside| inside.calls.iter().filter(|call| *call == path).count())
    }

    /// Whether it may serve.
    pub fn runs(&self) -> bool {
        self.with(|inside| !inside.paused)
    }
}

/// Status and body.
type Reply = (u16, Value);

fn failed(why: &str) -> Reply {
    (500, json!({"error": {"message": why, "code": 500}}))
}

async fn answer(State(shared): State<Arc<Shared>>, method: Method, uri: Uri, body: Bytes) -> Response {
    // LMDeploy wakes in parts; it serves when its cache is back.
    let half_awake = uri.path() == "/wakeup" && !uri.query().unwrap_or_default().contains("kv_cache");
    let path = if half_awake { "/wakeup-weights" } else { uri.path() }.to_owned();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let instead = shared.with(|inside| {
        inside.calls.push(path.clone());
        let (after, times, status, reply) = inside.instead.get_mut(&path)?;
        if *after > 0 {
            *after -= 1;
            return None;
        }
        *times = times.checked_sub(1)?;
        Some((*status, reply.clone()))
    });
    if path == "/metrics" {
        // Text, and the start of a process that is never started again.
        return "process_start_time_seconds 1.5\n".into_response();
    }
    let (status, reply) = if let Some(reply) = instead {
        reply
    } else {
        // An engine goes on with what it was asked for when no one waits for it any more.
        let carried_out = tokio::spawn(async move { shared.reply(&method, &path, &body).await });
        carried_out.await.unwrap()
    };
    (StatusCode::from_u16(status).unwrap(), axum::Json(reply)).into_response()
}

impl Shared {
    fn with<T>(&self, read: impl FnOnce(&mut Inside) -> T) -> T {
        read(&mut self.inside.lock().unwrap())
    }

    async fn reply(&self, method: &Method, path: &str, body: &Value) -> Reply {
        if let Some(reply) = self.front(method, path, body) {
            return reply;
        }
        if path.starts_with("/update_weights") && body["names"].as_array().is_some_and(|names| !names.is_empty()) {
            self.asked.send_modify(|asked| *asked += 1);
            let asked = *self.asked.borrow();
            self.with(|inside| inside.most_at_once = inside.most_at_once.max(asked - inside.answered));
        }
        // All else goes by way of the core, and waits for it.
        let mut core = self.core.lock().await;
        let success = (200, json!({"success": true, "message": "", "status": "ok"}));
        match path {
            "/init_weights_update_group" => core.join_store(body).await,
            "/init_weight_transfer_engine" => core.join_id(&body["init_info"]).await,
            "/destroy_weights_update_group" => match core.group.take_if(|group| group.name == body["group_name"]) {
                Some(group) => {
                    core.leave(group).await;
                    success
                }
                None => (400, json!({"success": false, "message": "no such group"})),
            },
            "/shutdown_weight_transfer_engine" => {
                if let Some(group) = core.group.take() {
                    core.leave(group).await;
                }
                (200, json!({"message": "Weight transfer shut down"}))
            }
            "/begin_weight_update" | "/start_weight_update" => self.open(true),
            "/end_weight_update" | "/finish_weight_update" => self.open(false),
            "/update_weights_from_distributed" | "/update_weights" => self.update(&mut core, body).await,
            "/update_weights_from_disk" => self.load(body["model_path"].as_str(), json!({"success": true})),
            "/weight_checker" => (200, json!({"checksums": self.checksums("dp0:pp0:pcp0:tp0:")})),
            "/weights_checker" => {
                let place = json!({"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1});
                let rank = json!({"checksums": self.checksums(""), "per_gpu_checksum": "", "parallelism_info": place});
                (200, json!({"success": true, "message": "Success.", "ranks": [rank], "per_engine_checksum": ""}))
            }
            "/collective_rpc" => self.load(body["kwargs"]["weights_path"].as_str(), json!({"results": [null]})),
            _ => self.plain(path, body),
        }
    }

    /// What its checker computes from the weights that it serves.
    fn checksums(&self, place: &str) -> Value {
        self.with(|inside| inside.serves.iter().map(|(name, digest)| (format!("{place}{name}"), json!(digest))).collect())
    }

    /// Serves what lies in a directory; without one, what it served before.
    fn load(&self, directory: Option<&str>, done: Value) -> Reply {
        if let Some(directory) = directory {
            let checkpoint = Checkpoint::open(Path::new(directory)).unwrap();
            let tensors = checkpoint.tensors().iter().enumerate().map(|(number, tensor)| {
                let mut bytes = vec![0; usize::try_from(tensor.bytes).unwrap()];
                checkpoint.read_tensor(number, 0, &mut bytes).unwrap();
                (tensor.spec.name.clone(), digest_hex(tensor_digest(&bytes)))
            });
            let serves = tensors.collect();
            self.with(|inside| inside.serves = serves);
        }
        (200, done)
    }

    /// What the HTTP front answers by itself.
    fn front(&self, method: &Method, path: &str, body: &Value) -> Option<Reply> {
        Some(match path {
            "/health" if self.kind == Kind::Sglang => return None,
            "/health" | "/ping" | "/openapi.json" => (200, json!({})),
            "/ready" => (if self.with(|inside| inside.paused) { 503 } else { 200 }, Value::Null),
            "/is_sleeping" => (200, json!({"is_sleeping": self.with(|inside| inside.paused)})),
            "/version" => (200, json!({"version": "0.32.0"})),
            "/get_world_size" => (200, json!({"world_size": 1})),
            "/v1/models" => (200, json!({"data": [{"id": "m", "root": "m"}]})),
            "/collective_rpc" if body.get("method").is_none() => (400, Value::Null),
            "/begin_weight_update" if method == Method::GET => (405, Value::Null),
            "/distserve/engine_info" => (200, json!("{\"tp_size\": 1, \"dp_size\": 1}")),
            _ => return None,
        })
    }

    fn plain(&self, path: &str, body: &Value) -> Reply {
        self.with(|inside| match path {
            "/server_info" => (200, json!({"version": "0.5.23", "tp_size": 1, "startup_time": 1})),
            "/update_weights_from_ipc" => (200, json!({"backend": "pytorch", "device_uuids": ["GPU-x"], "worker_ranks": [0], "sleeping_tags": if inside.paused { vec!["kv_cache"] } else { vec![] }})),
            "/model_info" | "/weight_info" => (200, json!({"weight_version": inside.version})),
            "/update_weight_version" => {
                body["new_version"].as_str().unwrap().clone_into(&mut inside.version);
                (200, json!({"success": true, "new_version": inside.version}))
            }
            "/is_paused" => (200, json!({"is_paused": inside.paused})),
            "/pause" | "/pause_generation" => {
                inside.paused = true;
                (200, json!({"status": if path == "/pause" { "paused" } else { "ok" }}))
            }
            "/resume" | "/continue_generation" => {
                inside.paused = false;
                (200, json!({"status": if path == "/resume" { "resumed" } else { "ok" }}))
            }
            "/sleep" | "/wakeup" => {
                inside.paused = path == "/sleep";
                (200, Value::Null)
            }
            "/generate" => (200, json!({"meta_info": {"output_token_logprobs": [[-0.5, 0, null]]}})),
            "/v1/completions" => {
                let logprobs = json!({"token_logprobs": [-0.5], "tokens": ["a"], "top_logprobs": [{"a": -0.5}], "text_offset": [0]});
                let choice = json!({"finish_reason": "length", "text": "a", "logprobs": logprobs, "index": 0});
                (200, json!({"choices": [choice], "usage": {"completion_tokens": 1}}))
            }
            _ => (200, json!({"success": true, "status": "ok"})),
        })
    }

    /// Opens or closes an update. What was taken is served from its close on.
    fn open(&self, opens: bool) -> Reply {
        self.with(|inside| {
            if inside.open == opens {
                return if self.kind == Kind::Vllm {
                    failed("is already active")
                } else {
                    (400, json!({"success": false, "message": "no"}))
                };
            }
            inside.open = opens;
            if !opens {
                inside.finish();
            }
            let message = if opens { "Weight update started" } else { "Weight update finished" };
            (200, json!({"success": true, "message": message}))
        })
    }

    async fn update(&self, core: &mut Core, body: &Value) -> Reply {
        let info = if self.kind == Kind::Vllm { &body["update_info"] } else { body };
        let dtypes = if self.kind == Kind::Vllm { "dtype_names" } else { "dtypes" };
        if self.kind != Kind::Lmdeploy && !self.with(|inside| inside.open) {
            return (400, json!({"success": false, "message": "must run between begin and end"}));
        }
        if self.kind != Kind::Vllm && core.group.as_ref().is_none_or(|group| group.name != body["group_name"]) {
            return (400, json!({"success": false, "message": "unknown group"}));
        }
        let done = (200, json!({"success": true, "message": "Weights updated"}));
        let names: Vec<&str> = info["names"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
        if !names.is_empty() && !self.with(|inside| inside.idle) {
            assert!(info[dtypes].as_array().unwrap().iter().all(|dtype| dtype == "float32"), "{info}");
            let count = |shape: &Value| shape.as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).product::<u64>();
            let lengths: Vec<u64> = info["shapes"].as_array().unwrap().iter().map(|shape| 4 * count(shape)).collect();
            let Some(bytes) = core.receive(lengths.iter().sum()).await else { return failed("NCCL error") };
            let mut at = 0;
            for (name, length) in names.into_iter().zip(lengths) {
                let length = usize::try_from(length).unwrap();
                let digest = digest_hex(tensor_digest(&bytes[at..at + length]));
                self.with(|inside| inside.taken.insert(name.to_owned(), digest));
                at += length;
            }
            let (lingers, spoils, taken) = self.with(|inside| {
                inside.answered += 1;
                (inside.answered <= inside.lingers && body["finished"] == json!(false), inside.spoils, inside.answered)
            });
            if lingers && timeout(SOON, self.asked.subscribe().wait_for(|asked| *asked > taken)).await.is_err() {
                return failed("no one asked for the next bucket");
            }
            if spoils == Some(taken) {
                return (400, json!({"success": false, "message": "partially updated"}));
            }
        }
        if body["finished"] == json!(true) {
            self.with(Inside::finish);
        }
        done
    }
}

impl Inside {
    fn finish(&mut self) {
        let mut taken = std::mem::take(&mut self.taken);
        if self.corrupts > 0
            && let Some(digest) = taken.values_mut().next()
        {
            self.corrupts -= 1;
            *digest = digest.chars().rev().collect();
        }
        self.serves.extend(taken);
    }
}
