//! By which route a vLLM server takes buckets from GPU memory, by its start-up configuration.
//!
//! Decides between our own back end, checkpoint-engine's worker extension, and vLLM's `ipc` back end, and refuses untested routes. Uses
//! only the server's configuration: a call that its workers refuse would spoil their replies to later ones.

use std::path::Path;

use serde_json::{Value, json};

use super::{DIRECTORY, Vllm, buckets, gpus, of_all_workers, session, unsupported};
use crate::EngineError;
use crate::checkpoint_engine::Call;
use crate::device::DeviceRoute;
use crate::feed::{self, CheckpointEngine, Feed, FeedJob};
use crate::http::Until;
use weightsync_core::protocol::PausePolicy;

const CHECKPOINT_ENGINE: &str = "checkpoint-engine";
/// The class of checkpoint-engine 0.4.2 that extends a server's workers.
const EXTENSION_CLASS: &str = "checkpoint_engine.worker.VllmColocateWorkerExtension";
/// Method of checkpoint-engine 0.4.2's `VllmColocateWorkerExtension`.
const EXTENSION: &str = "update_weights_from_ipc";

/// The route, or why there is none. By our own back end, vLLM loads as in its own reload, for any model. The others are used only for a
/// model that is known not to be quantised.
pub(super) async fn route(server: &Vllm, pause: PausePolicy, served: Option<&Path>, until: Until) -> Result<DeviceRoute, EngineError> {
    if pause == PausePolicy::External {
        return Err(unsupported("without a pause vLLM computes with half of the buckets".into(), DIRECTORY));
    }
    let info = server.http.get("/server_info?config_format=json", until).await?;
    let info = if info.status() == 200 { info.json()?.value().clone() } else { Value::Null };
    let configured = |pointer: &str| info.pointer(pointer).and_then(Value::as_str);
    let backend = configured("/vllm_config/weight_transfer_config/backend");
    let way = |name| Ok(DeviceRoute { name, gpus: Vec::new(), gated: true, why_not_faster: None });
    if backend == Some(session::WAY) {
        return way(session::WAY);
    }
    if feed::is_quantised(served) != Some(false) {
        return Err(unsupported("only a model that is known not to be quantised is fed from GPU memory".into(), DIRECTORY));
    }
    if configured("/vllm_config/parallel_config/worker_extension_cls") == Some(EXTENSION_CLASS) {
        return way(CHECKPOINT_ENGINE);
    }
    if backend != Some(buckets::WAY) {
        let next = "start vLLM with --worker-extension-cls checkpoint_engine.worker.VllmColocateWorkerExtension";
        return Err(unsupported("vLLM was not started with checkpoint-engine's workers".into(), next));
    }
    let version = server.get("/version", until).await?.string("version")?;
    buckets::UNPROVEN.allowed(&version, server.unproven_routes).map_err(|why| unsupported(why, DIRECTORY))?;
    let ranks = server.get("/get_world_size?include_dp=true", until).await?;
    if ranks.value().get("world_size") != Some(&json!(1)) {
        // The others' replies to a call that one refuses would be taken for replies to a later call.
        return Err(unsupported("the ipc backend is used with one worker only".into(), DIRECTORY));
    }
    way(buckets::WAY)
}

pub(super) async fn open(server: &Vllm, job: FeedJob<'_>, until: Until) -> Result<Box<dyn Feed>, EngineError> {
    match job.route.name {
        session::WAY => {
            let ranks = server.size(until).await?;
            Ok(Box::new(gpus::Gpus::open(server.http.clone(), &job, ranks, until).await?))
        }
        buckets::WAY => {
            buckets::agree(&server.http, until).await?;
            Ok(Box::new(buckets::Buckets::new(server.http.clone(), job.job.layout.clone())))
        }
        _ => {
            let (http, whole) = (server.http.clone(), Until::new(job.job.terms.timeout));
            let call = move |handles| -> Call {
                Box::pin(async move { of_all_workers(&http, &json!({"method": EXTENSION, "args": [Value::Object(handles)]}), whole).await })
            };
            Ok(Box::new(CheckpointEngine::open(server.http.url(), &job, call).await?))
        }
    }
}
