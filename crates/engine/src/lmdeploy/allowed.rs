//! Which LMDeploy server may be fed by which route: a list of what was proven, and nothing else.
//!
//! From runs on H100 and H200 machines (docs/benchmarks): LMDeploy 0.18.0, one rank and two (`--tp 2`, dense models), bfloat16, Qwen3 dense
//! and fused MoE, eager and with CUDA graphs, by `/update_weights`: text equal to a fresh server's, two updates in a row. That route does
//! not reset captured graphs, while fused MoE may replace parameters (`pytorch/engine/model_agent/agent.py`). So what was not tried is not
//! allowed. Pure.

use serde_json::Value;

use crate::process::EngineProcess;
use weightsync_core::protocol::KvCachePolicy;

/// Model classes for `/update_weights`, as `config.json` names them, and the most ranks of a server that were proven with each.
const TENSOR_ROUTE: [(&str, usize); 2] = [("Qwen3ForCausalLM", 2), ("Qwen3MoeForCausalLM", 1)];

#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen<'a> {
    /// `/openapi.json`: LMDeploy does not report its version, but its interface identifies it.
    pub(crate) interface: Option<&'a Value>,
    pub(crate) ranks: usize,
    /// `config.json` of the model that it serves.
    pub(crate) config: Option<&'a Value>,
    pub(crate) process: Option<&'a EngineProcess>,
    pub(crate) kv_cache: KvCachePolicy,
}

/// Whether its interface for weights is that of 0.18.0, field by field.
pub(crate) fn is_0_18(interface: &Value) -> bool {
    let fields = |schema: &str| {
        let properties = interface.pointer(&format!("/components/schemas/{schema}/properties")).and_then(Value::as_object);
        let mut names: Vec<&str> = properties.into_iter().flat_map(|fields| fields.keys().map(String::as_str)).collect();
        names.sort_unstable();
        names
    };
    fields("UpdateParamsRequest") == ["finished", "load_format", "serialized_named_tensors"]
        && fields("UpdateWeightsFromIPCRequest") == ["zmq_handles"]
        && fields("UpdateWeightsFromIPCStatus")
            == [
                "backend",
                "checkpoint_engine_version",
                "device_type",
                "device_uuids",
                "is_sleeping",
                "message",
                "ready",
                "sleeping_tags",
                "worker_ranks",
            ]
}

/// Whether any route may be used for this model.
pub(crate) fn any_route(config: Option<&Value>) -> Result<(), String> {
    match config {
        Some(config) if config.get("quantization_config").is_some_and(|quantised| !quantised.is_null()) => {
            Err("updates of a quantised model are not proven with LMDeploy 0.18".into())
        }
        _ => Ok(()),
    }
}

/// Whether `/update_weights` may be used, or the obstacle. Sends no request: the caller must probe the executor.
pub(crate) fn tensor_route(seen: &Seen<'_>) -> Result<(), String> {
    any_route(seen.config)?;
    match seen.interface {
        Some(interface) if is_0_18(interface) => {}
        Some(_) => return Err("its interface is not that of LMDeploy 0.18.0, the version that was proven".into()),
        None => return Err("its interface cannot be read (/openapi.json), so its version is not known".into()),
    }
    let Some(config) = seen.config else { return Err("the model's config.json cannot be read from here".into()) };
    let class = config.pointer("/architectures/0").and_then(Value::as_str).unwrap_or("unknown");
    let Some((_, most)) = TENSOR_ROUTE.iter().find(|(proven, _)| *proven == class) else {
        return Err(format!("the model class {class} was not proven, only {}", TENSOR_ROUTE.map(|(proven, _)| proven).join(" and ")));
    };
    if seen.ranks > *most {
        return Err(format!("it has {} ranks, and at most {most} were proven with {class}", seen.ranks));
    }
    let dtype = config.get("dtype").or_else(|| config.get("torch_dtype")).and_then(Value::as_str).unwrap_or("unknown");
    if dtype != "bfloat16" {
        return Err(format!("models in {dtype} were not proven, only bfloat16"));
    }
    let Some(process) = seen.process else { return Err("its process cannot be seen from here, so its options are not known".into()) };
    if process.has("--speculative-algorithm") {
        return Err("its draft model would not be updated".into());
    }
    if process.has("--quant-policy") || process.has("--model-format") {
        return Err("quantised caches and formats were not proven".into());
    }
    if seen.kv_cache == KvCachePolicy::Reset && process.has("--enable-prefix-caching") {
        return Err("it keeps a prefix cache (--enable-prefix-caching) that only sleeping empties, and kvCache is Reset".into());
    }
    Ok(())
}
