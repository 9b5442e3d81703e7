//! The draft model of a vLLM server: whether there is one, and whether tensors replace all of it.
//!
//! Facts are from the wheel of 0.32.0 (`v1/worker/gpu_worker.py`: `start_draft_weight_update` gives the session the speculator's model as
//! target; `config/speculative.py`) and were seen on the running server. vLLM reports nothing if a draft model lacks tensors.

use std::path::Path;

use serde_json::Value;

use crate::draft::{DraftWay, none_there, untaken};
use crate::http::{EngineHttp, Until};
use crate::{EngineError, fit};
use weightsync_core::weights::{IgnoredTensors, TensorSpec};

/// Refuses a draft model that the server would not load completely; `draft` are its tensors.
pub(super) async fn check(http: &EngineHttp, way: DraftWay, draft: Vec<TensorSpec>, until: Until) -> Result<(), EngineError> {
    if way == DraftWay::Other {
        return Err(untaken(super::KIND, way));
    }
    let info = http.get("/server_info?config_format=json", until).await?.json()?;
    let speculation = info.value().pointer("/vllm_config/speculative_config").filter(|config| config.is_object());
    let text = |name: &str| speculation.and_then(|config| config.get(name)).and_then(Value::as_str);
    // Proposers without a model: n-gram, suffix or custom.
    let Some(model) =
        text("model").filter(|_| speculation.and_then(|config| config.get("draft_model_config")).is_some_and(Value::is_object))
    else {
        return Err(none_there("a --speculative-config that names a draft model"));
    };
    // MTP layers are a part of the model's own checkpoint, and EAGLE's heads share tensors with it: names do not show what is complete.
    let path = Path::new(model).to_owned();
    if text("method") != Some("draft_model") || !path.is_absolute() || !path.is_dir() {
        return Ok(());
    }
    let compared = tokio::task::spawn_blocking(move || fit::check(&path, &draft, &IgnoredTensors::default())).await;
    compared.map_err(|_| EngineError::Cancelled)?.map(drop)
}
