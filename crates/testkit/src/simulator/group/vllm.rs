//! vLLM's weight transfer with the `nccl` backend, 0.32 and 0.33: endpoints, order rules, replies (`distributed/weight_transfer/nccl_engine.py`,
//! `nccl_common.py`, `packed_tensor.py`, `v1/worker/gpu_worker.py`).
//!
//! Rules kept on purpose: the communicator is made and an all-reduce of one element entered inside the init call, which therefore comes back
//! when every rank is there and waits without an end; a second init forgets the old communicator; a bucket is cut when it is longer than
//! the agreed size, the tensor that overflows included; an error ends the session; between start and finish layers hold no memory, so that
//! a request that runs then ends the core; and `/health` says nothing about all this.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::future::join_all;
use serde_json::{Map, Value, json};
use tokio::sync::Mutex;

use super::super::backend::NO_DRAFT;
use super::super::front::Front;
use super::super::tensors::Taken;
use super::super::vllm_reply::{dead, invalid, worker_failed};
use super::{Announced, FOR_EVER, Member, Ranks, Trouble, announced, detached, merged};

/// vLLM's `DEFAULT_PACKED_BUFFER_SIZE_BYTES`.
const PACKED_BYTES: u64 = 1 << 30;

/// State of the worker ranks.
pub(in super::super) struct Transfer {
    pub(in super::super) ranks: Arc<Ranks>,
    /// Whether the backend is `ipc`, and not `nccl`.
    ipc: bool,
    session: Mutex<Session>,
}

#[derive(Default)]
struct Session {
    active: bool,
    /// It is the draft model's.
    draft: bool,
    members: Option<Vec<Member>>,
    /// Bytes of a packed bucket; per tensor without.
    packed: Option<u64>,
    /// What was announced last: three empty lists mean it again.
    announced: Vec<Announced>,
    ipc: super::super::ipc::Ipc,
}

type Shared = Extension<Arc<Transfer>>;

impl Transfer {
    /// With `nccl` or `ipc` as backend.
    pub(in super::super) fn new(ranks: Arc<Ranks>, backend: &str) -> Arc<Self> {
        Arc::new(Self { ranks, ipc: backend == "ipc", session: Mutex::default() })
    }
}

pub(in super::super) fn routes(transfer: Arc<Transfer>) -> Router<Arc<Front>> {
    Router::new()
        .route("/init_weight_transfer_engine", post(init))
        .route("/shutdown_weight_transfer_engine", post(shutdown))
        .route("/start_weight_update", post(start))
        .route("/start_draft_weight_update", post(start_draft))
        .route("/update_weights", post(update))
        .route("/finish_weight_update", post(finish))
        .layer(Extension(transfer))
}

fn message(text: &str) -> Response {
    Json(json!({"message": text})).into_response()
}

/// What follows from a step of a worker.
async fn answer(front: &Front, done: Result<(), Trouble>, well: &str) -> Response {
    match done {
        Ok(()) => message(well),
        Err(Trouble::Raised(cause)) => worker_failed(&cause),
        Err(Trouble::Dead(_)) => {
            front.core.change(|state| state.dead = true);
            front.crash.cancel();
            std::future::pending().await
        }
    }
}

fn wrong(text: &str) -> Trouble {
    Trouble::Raised(text.to_owned())
}

impl Transfer {
    async fn init(&self, info: &Map<String, Value>) -> Result<(), Trouble> {
        if self.ipc {
            return self.session.lock().await.ipc.init(info).map_err(Trouble::Raised);
        }
        self.init_nccl(info).await
    }

    async fn init_nccl(&self, info: &Map<String, Value>) -> Result<(), Trouble> {
        const KNOWN: [&str; 8] = [
            "master_address",
            "master_port",
            "rank_offset",
            "world_size",
            "nccl_unique_id_b64",
            "packed",
            "packed_buffer_size_bytes",
            "packed_num_buffers",
        ];
        let bad = |cause: String| Trouble::Raised(format!("Invalid init_info for NCCLWeightTransferEngine: {cause}"));
        let class = "NCCLWeightTransferInitInfo";
        if let Some(unknown) = info.keys().find(|key| !KNOWN.contains(&key.as_str())) {
            return Err(bad(format!("{class}.__init__() got an unexpected keyword argument '{unknown}'")));
        }
        let number = |name: &str| info.get(name).and_then(Value::as_u64).and_then(|number| u32::try_from(number).ok());
        let needed =
            |name: &str| number(name).ok_or_else(|| bad(format!("{class}.__init__() missing 1 required keyword-only argument: '{name}'")));
        let (offset, world) = (needed("rank_offset")?, needed("world_size")?);
        let id = unique_id(info, class).map_err(Trouble::Raised)?;
        let join = (0..self.ranks.count()).map(|local| {
            let rank = offset.saturating_add(u32::try_from(local).unwrap_or(u32::MAX));
            Member::join(&self.ranks, local, id, (rank, world))
        });
        let members = join_all(join).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        let packed = info.get("packed").and_then(Value::as_bool).unwrap_or(false);
        let bytes = info.get("packed_buffer_size_bytes").and_then(Value::as_u64).unwrap_or(PACKED_BYTES);
        let mut session = self.session.lock().await;
        session.packed = packed.then_some(bytes);
        session.announced = Vec::new();
        session.members = Some(members);
        Ok(())
    }

    async fn update(&self, info: &Value) -> Result<Vec<Taken>, Trouble> {
        let mut session = self.session.lock().await;
        if !session.active {
            return Err(wrong("start_weight_update must be called before update_weights."));
        }
        let received = if self.ipc {
            session.ipc.receive(info, &self.ranks.gpus, &self.ranks.memory).map_err(Trouble::Raised)
        } else {
            receive(&mut session, info).await
        };
        session.active = received.is_ok();
        received
    }
}

/// The id that all ranks share, of one of the two rendezvous that vLLM knows.
fn unique_id(info: &Map<String, Value>, class: &str) -> Result<[u8; 128], String> {
    let text = info.get("nccl_unique_id_b64").and_then(Value::as_str).filter(|text| !text.is_empty());
    let address = info.contains_key("master_address") || info.contains_key("master_port");
    let text = match (text, address) {
        (Some(_), true) => return Err(format!("{class}: pass nccl_unique_id_b64 OR master_address/master_port, not both")),
        (Some(text), false) => text,
        (None, false) => {
            return Err(format!(
                "{class}: need nccl_unique_id_b64, or both master_address and master_port (got master_address=None, master_port=None)"
            ));
        }
        (None, true) => return Err("the simulator meets by nccl_unique_id_b64 only".to_owned()),
    };
    let decoded = STANDARD
        .decode(text)
        .map_err(|_| format!("{class}: nccl_unique_id_b64 is not valid standard base64 (URL-safe base64 is not accepted)"))?;
    let length = decoded.len();
    decoded.try_into().map_err(|_| format!("{class}: nccl_unique_id_b64 must decode to 128 bytes, got {length}"))
}

/// Takes part in the broadcasts of what is announced.
async fn receive(session: &mut Session, info: &Value) -> Result<Vec<Taken>, Trouble> {
    let lists = |info: &Value| ["names", "dtype_names", "shapes"].map(|name| info.get(name).and_then(Value::as_array).map(Vec::len));
    let [Some(names), Some(dtypes), Some(shapes)] = lists(info) else {
        return Err(wrong("Invalid update_info for NCCLWeightTransferEngine: missing required positional arguments"));
    };
    for (field, length) in [("dtype_names", dtypes), ("shapes", shapes)] {
        if length != names {
            return Err(Trouble::Raised(format!("`{field}` should be of the same size as `names`: got {length} and {names}")));
        }
    }
    if names > 0 {
        session.announced = announced(info, "dtype_names").map_err(Trouble::Raised)?;
    }
    let (tensors, packed) = (session.announced.clone(), session.packed);
    let Some(members) = &mut session.members else {
        return Err(wrong("NCCL weight transfer not initialized. Call init_transfer_engine() first."));
    };
    let ranks = members.iter_mut().map(async |member| {
        let mut taken = Vec::new();
        for bucket in buckets(&tensors, packed) {
            let received = member.broadcast(bucket.iter().map(|tensor| tensor.bytes).sum(), FOR_EVER).await?;
            let mut at = 0;
            for tensor in bucket {
                if !at_multiple(at, tensor) {
                    return Err(wrong("self.storage_offset() must be divisible by the element size to view Byte as a larger type"));
                }
                taken.push(received.tensor(tensor, at).map_err(Trouble::Raised)?);
                at += tensor.bytes;
            }
        }
        Ok(taken)
    });
    let ranks = join_all(ranks).await.into_iter().collect::<Result<Vec<_>, Trouble>>()?;
    Ok(merged(ranks))
}

fn at_multiple(offset: u64, tensor: &Announced) -> bool {
    offset.is_multiple_of((tensor.dtype.bits() / 8).max(1))
}

/// Packed, a bucket ends with the tensor that makes it longer than the agreed size; else each tensor is one.
fn buckets(tensors: &[Announced], packed: Option<u64>) -> Vec<&[Announced]> {
    let Some(most) = packed else { return tensors.chunks(1).collect() };
    let mut sum = 0;
    let ends = |tensor: &Announced| {
        sum += tensor.bytes;
        let full = sum > most;
        if full {
            sum = 0;
        }
        full
    };
    tensors.split_inclusive(ends).collect()
}

async fn init(State(front): State<Arc<Front>>, Extension(state): Shared, bytes: Bytes) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&bytes) else { return invalid("body.0", "JSON decode error") };
    let Some(info) = body.get("init_info").and_then(Value::as_object).cloned() else { return invalid("body.init_info", "Field required") };
    let held = Arc::clone(&front);
    detached(&front, async move {
        let _turn = match held.core.turn().await {
            Ok(turn) => turn,
            Err(cause) => return dead(cause),
        };
        answer(&held, state.init(&info).await, "Weight transfer initialized").await
    })
    .await
}

async fn shutdown(State(front): State<Arc<Front>>, Extension(state): Shared) -> Response {
    let held = Arc::clone(&front);
    detached(&front, async move {
        let _turn = match held.core.turn().await {
            Ok(turn) => turn,
            Err(cause) => return dead(cause),
        };
        let mut session = state.session.lock().await;
        if session.active {
            return worker_failed("Cannot release a trainer connection during a weight update");
        }
        let members = session.members.take().unwrap_or_default();
        session.ipc.close();
        let left = join_all(members.into_iter().map(Member::abort)).await.into_iter().collect();
        answer(&held, left, "Weight transfer shut down").await
    })
    .await
}

async fn start(State(front): State<Arc<Front>>, Extension(state): Shared) -> Response {
    started(&front, &state, false, "Weight update started").await
}

async fn start_draft(State(front): State<Arc<Front>>, Extension(state): Shared) -> Response {
    started(&front, &state, true, "Draft weight update started").await
}

async fn started(front: &Front, state: &Transfer, draft: bool, done: &str) -> Response {
    let _turn = match front.core.turn().await {
        Ok(turn) => turn,
        Err(cause) => return dead(cause),
    };
    let mut session = state.session.lock().await;
    if session.active {
        return worker_failed("start_weight_update called while a weight update is already active. Call finish_weight_update first.");
    }
    if draft && front.core.state().draft.is_none() {
        return worker_failed(NO_DRAFT);
    }
    (session.active, session.draft) = (true, draft);
    front.core.take_apart();
    message(done)
}

async fn update(State(front): State<Arc<Front>>, Extension(state): Shared, bytes: Bytes) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&bytes) else { return invalid("body.0", "JSON decode error") };
    let Some(info) = body.get("update_info").cloned() else { return invalid("body.update_info", "Field required") };
    let held = Arc::clone(&front);
    detached(&front, async move {
        let _turn = match held.core.turn().await {
            Ok(turn) => turn,
            Err(cause) => return dead(cause),
        };
        // One for all ranks, or one for each; the simulator's ranks take the same.
        let mine = info.as_array().map_or(Some(&info), |ranks| ranks.first());
        let Some(mine) = mine else { return worker_failed("list index out of range") };
        let taken = match state.update(mine).await {
            Ok(taken) => taken,
            Err(trouble) => return answer(&held, Err(trouble), "").await,
        };
        let draft = state.session.lock().await.draft;
        let loaded = if draft { held.core.take_draft(taken) } else { held.core.take(taken).await };
        if let Err(cause) = loaded {
            state.session.lock().await.active = false;
            return worker_failed(&cause);
        }
        message("Weights updated")
    })
    .await
}

async fn finish(State(front): State<Arc<Front>>, Extension(state): Shared, bytes: Bytes) -> Response {
    let body = if bytes.is_empty() { Value::Null } else { serde_json::from_slice::<Value>(&bytes).unwrap_or(Value::Bool(false)) };
    if body == Value::Bool(false) {
        return invalid("body.0", "JSON decode error");
    }
    let _turn = match front.core.turn().await {
        Ok(turn) => turn,
        Err(cause) => return dead(cause),
    };
    let mut session = state.session.lock().await;
    if !session.active {
        return worker_failed("finish_weight_update called without a matching start_weight_update.");
    }
    session.active = false;
    session.ipc.close();
    front.core.put_together();
    if let Some(version) = body.get("weight_version").and_then(Value::as_str) {
        front.core.change(|core| version.clone_into(&mut core.version));
    }
    message("Weight update finished")
}
