//! vLLM 0.32 with WeightSync's own back end in it: the four routes of a weight-transfer session, and the work of the workers
//! (`python/weightsync/vllm.py` and `_feed.py`).
//!
//! Rules kept on purpose: a session must be started and can be started once; while it is open nothing can be computed; our back end fails no
//! call but says on its socket what became of it; and a tensor that is not copied is read when all of its layer is there, not when it is
//! handed over (layerwise reload keeps views), so a place that is used again too early gives other weights with status 200.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use futures::future::join_all;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::GpuOptions;
use super::core::Core;
use super::feed::{Arrived, Feed, Place};
use super::front::Front;
use super::memory::GpuMemory;
use super::vllm_reply::{dead, worker_failed};

#[derive(Debug, Clone)]
pub struct WeightTransfer {
    /// `backend` of `--weight-transfer-config`: `weightsync`, or vLLM's own `nccl` or `ipc`.
    pub backend: String,
    /// Digests that its workers can compute.
    pub digests: Vec<String>,
}

impl WeightTransfer {
    /// Our back end, whose workers have what vLLM brings.
    pub fn weightsync() -> Self {
        Self { backend: "weightsync".to_owned(), digests: vec!["blake3".to_owned()] }
    }

    /// One of vLLM's own, `nccl` or `ipc`.
    pub fn of(backend: &str) -> Self {
        Self { backend: backend.to_owned(), digests: Vec::new() }
    }
}

/// The session of all workers.
#[derive(Default)]
struct Session {
    token: String,
    feeds: Vec<Feed>,
    /// Between start and finish.
    open: bool,
    /// Its model was loaded in full.
    whole: bool,
    /// It is the draft model's.
    draft: bool,
}

#[derive(Clone)]
struct Backend {
    digests: Vec<String>,
    /// The GPUs that its workers compute on, in the order of ranks; none where they compute on CPUs.
    gpus: Option<(Vec<String>, GpuMemory)>,
    session: Arc<Mutex<Session>>,
}

/// The routes of weight transfer; without a back end they are there and refuse.
pub(super) fn routes(transfer: Option<&WeightTransfer>, gpus: &GpuOptions) -> Router<Arc<Front>> {
    let ours = transfer.filter(|transfer| transfer.backend == "weightsync");
    let gpus = gpus.memory.is_there().then(|| (gpus.uuids.clone(), gpus.memory.clone()));
    let backend = ours.map(|transfer| Backend { digests: transfer.digests.clone(), gpus, session: Arc::default() });
    Router::new()
        .route("/init_weight_transfer_engine", post(init))
        .route("/start_weight_update", post(start))
        .route("/start_draft_weight_update", post(start_draft))
        .route("/update_weights", post(update))
        .route("/finish_weight_update", post(finish))
        .layer(Extension(backend))
}

impl Core {
    /// What a call of all workers is answered with, when each of them did what the first one did. The multiprocess executor of vLLM 0.32 reads
    /// the replies of workers one after the other and stops at the first failure, so from then on those of the others are taken for replies to
    /// later calls.
    pub(super) fn replied(&self, ranks: u32, first: Result<(), &str>) -> Result<(), String> {
        let mut state = self.state();
        let Some(late) = state.late.as_mut().filter(|_| ranks > 1) else { return first.map_err(str::to_owned) };
        late.push_back(first.map_err(str::to_owned));
        first.map_err(str::to_owned)?;
        late.pop_front().unwrap_or(Ok(()))
    }
}

/// The reply of all workers to a call that the first one took so.
fn reply(front: &Front, outcome: Result<(), &str>, message: &str) -> Response {
    match front.core.replied(front.world_size(), outcome) {
        Ok(()) => Json(json!({"message": message})).into_response(),
        Err(cause) => worker_failed(&cause),
    }
}

/// What a vLLM without one says to the start of its draft model's session.
pub(super) const NO_DRAFT: &str = "Draft model weight update requested, but no draft model is configured.";
const NOT_CONFIGURED: &str = "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer.";

async fn init(State(front): State<Arc<Front>>, Extension(backend): Extension<Option<Backend>>, body: Bytes) -> Response {
    const DONE: &str = "Weight transfer initialized";
    let _turn = match front.core.turn().await {
        Ok(turn) => turn,
        Err(error) => return dead(error),
    };
    let Some(backend) = backend else { return reply(&front, Err(NOT_CONFIGURED), DONE) };
    let info = serde_json::from_slice::<Value>(&body).unwrap_or_default();
    let field = |name: &str| info.pointer(&format!("/init_info/{name}")).and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut session = backend.session.lock();
    session.feeds.clear();
    if info.pointer("/init_info/protocol") == Some(&json!(1)) {
        let (socket, token, ranks) = (field("socket"), field("token"), front.world_size);
        let gpu = |rank: u32| {
            let (gpus, memory) = backend.gpus.as_ref()?;
            Some((gpus.get(usize::try_from(rank).ok()?)?.clone(), memory.clone()))
        };
        let feeds = (0..ranks).map(|rank| Feed::connect((&socket, &token), (rank, ranks), &backend.digests, session.open, gpu(rank)));
        // The waiting caller detects a worker that cannot connect.
        session.feeds = feeds.filter_map(Result::ok).collect();
        session.token = token;
    }
    reply(&front, Ok(()), DONE)
}

async fn start(State(front): State<Arc<Front>>, Extension(backend): Extension<Option<Backend>>) -> Response {
    started(&front, backend, false, "Weight update started").await
}

async fn start_draft(State(front): State<Arc<Front>>, Extension(backend): Extension<Option<Backend>>) -> Response {
    started(&front, backend, true, "Draft weight update started").await
}

async fn started(front: &Front, backend: Option<Backend>, draft: bool, done: &str) -> Response {
    let _turn = match front.core.turn().await {
        Ok(turn) => turn,
        Err(error) => return dead(error),
    };
    let Some(backend) = backend else { return reply(front, Err(NOT_CONFIGURED), done) };
    let mut session = backend.session.lock();
    if session.open {
        let refused = "start_weight_update called while a weight update is already active. Call finish_weight_update first.";
        return reply(front, Err(refused), done);
    }
    if draft && front.core.state().draft.is_none() {
        return reply(front, Err(NO_DRAFT), done);
    }
    (session.open, session.whole, session.draft) = (true, false, draft);
    front.core.take_apart();
    session.feeds.iter().for_each(|feed| feed.did("started"));
    reply(front, Ok(()), done)
}

async fn update(State(front): State<Arc<Front>>, Extension(backend): Extension<Option<Backend>>, body: Bytes) -> Response {
    const DONE: &str = "Weights updated";
    let _turn = match front.core.turn().await {
        Ok(turn) => turn,
        Err(error) => return dead(error),
    };
    let Some(backend) = backend else { return reply(&front, Err(NOT_CONFIGURED), DONE) };
    let info = serde_json::from_slice::<Value>(&body).unwrap_or_default();
    let token = info.pointer("/update_info/token").and_then(Value::as_str).unwrap_or_default();
    let (mut feeds, draft) = {
        let mut session = backend.session.lock();
        if !session.open {
            return reply(&front, Err("start_weight_update must be called before update_weights."), DONE);
        }
        let feeds = if session.token == token { std::mem::take(&mut session.feeds) } else { Vec::new() };
        (feeds, session.draft)
    };
    let ranks = feeds.iter_mut().enumerate().map(|(rank, feed)| take(&front, rank, feed, draft));
    let taken: Vec<Result<(), String>> = join_all(ranks).await;
    let mut session = backend.session.lock();
    session.whole = !taken.is_empty() && taken.iter().all(Result::is_ok);
    if !session.whole {
        front.core.put_together();
    }
    for (feed, taken) in feeds.iter().zip(taken) {
        match taken {
            Ok(()) => feed.did("updated"),
            // Ignore workers that are gone.
            Err(cause) => drop(feed.say(&json!({"failed": cause}))),
        }
    }
    session.feeds = feeds;
    reply(&front, Ok(()), DONE)
}

/// One worker takes its feed; the first one's weights are those that are served.
async fn take(front: &Front, rank: usize, feed: &mut Feed, draft: bool) -> Result<(), String> {
    let load = async |tensors| match (rank, draft) {
        (0, false) => front.core.take(tensors).await,
        (0, true) => front.core.take_draft(tensors),
        _ => Ok(()),
    };
    let mut views = Vec::new();
    loop {
        match feed.next(draft).await {
            Arrived::Bucket(bucket) => {
                if let Some(copied) = feed.copy(&bucket)? {
                    feed.say(&json!({"taken": bucket.sequence}))?;
                    load(copied).await?;
                    continue;
                }
                let (copied, kept): (Vec<Place>, Vec<Place>) = bucket.tensors.into_iter().partition(|_| bucket.copy);
                let copied = copied.iter().map(|place| feed.read(place)).collect::<Result<Vec<_>, _>>()?;
                views.extend(kept);
                load(copied).await?;
                feed.say(&json!({"taken": bucket.sequence}))?;
            }
            Arrived::End => break,
            Arrived::Failed(cause) => return Err(cause),
        }
    }
    let read = views.iter().map(|place| feed.read(place)).collect::<Result<Vec<_>, _>>()?;
    load(read).await
}

async fn finish(State(front): State<Arc<Front>>, Extension(backend): Extension<Option<Backend>>) -> Response {
    const DONE: &str = "Weight update finished";
    let _turn = match front.core.turn().await {
        Ok(turn) => turn,
        Err(error) => return dead(error),
    };
    let Some(backend) = backend else { return reply(&front, Err(NOT_CONFIGURED), DONE) };
    let mut session = backend.session.lock();
    if !session.open {
        return reply(&front, Err("finish_weight_update called without a matching start_weight_update."), DONE);
    }
    front.core.put_together();
    let step = if session.whole { "finished" } else { "ended" };
    session.feeds.iter().for_each(|feed| feed.did(step));
    if session.whole && session.feeds.iter().all(Feed::over) {
        session.feeds.clear();
    }
    (session.open, session.whole) = (false, false);
    reply(&front, Ok(()), DONE)
}
