//! Whether the draft model of a version can be loaded into an engine by a route.
//!
//! A draft model with old weights makes no answer wrong, only slow, so no engine complains about one. So this is checked before a byte
//! moves. A version with a draft model counts on an engine that accepted both models; otherwise it is refused, with the remedy.

use super::EngineError;

/// How the tensors of a draft model would reach the engine's workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftWay {
    /// From a group that the engine joined by itself.
    Group,
    /// From shared memory of the host that the workers read.
    HostMemory,
    /// From a directory, or from GPU memory of the agent's workers: no engine has a call that names the model of a tensor.
    Other,
}

/// The refusal of an engine of this kind that cannot take one by that route.
pub fn untaken(kind: &str, way: DraftWay) -> EngineError {
    let way = match way {
        DraftWay::Group => "from a group",
        DraftWay::HostMemory => "from shared memory",
        DraftWay::Other => "from a directory or from GPU memory",
    };
    EngineError::Unsupported {
        what: format!("the version has a draft model, which {kind} does not take {way}"),
        next_step: match kind {
            "vllm" => "start vLLM with --weight-transfer-config '{\"backend\": \"weightsync\"}', or set spec.delivery to Engine".into(),
            "sglang" => "set spec.delivery to Engine".into(),
            _ => "publish without weightsync.with_draft: tensors that belong to the model's own checkpoint go with the model".into(),
        },
    }
}

/// The refusal of a server without a draft model.
pub(super) fn none_there(option: &str) -> EngineError {
    EngineError::Unsupported {
        what: "the version has a draft model, and the server was started without one".into(),
        next_step: format!("start it with {option}, or publish without weightsync.with_draft"),
    }
}
