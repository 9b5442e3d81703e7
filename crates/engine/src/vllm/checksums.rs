//! vLLM's own checksums: SHA-256 of each parameter by rank (`/weight_checker`; `model_executor/model_loader/weight_checksum.py` of 0.32.0).
//!
//! Each rank copies its weights to the host and hashes them on one core, and the engine's core answers nothing else meanwhile. So they are not
//! asked for where that would take too long. Of the same route, `reset` overwrites all weights: it is never called.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::EngineError;
use crate::checksums::Checksums;
use crate::http::{EngineHttp, Until};

/// Most bytes of weights for each rank: about four seconds (1.1 GB/s of SHA-256 on one core, measured).
const MOST_BYTES: u64 = 4 << 30;

/// None where the server has no such route, where it would take too long, and for experts, which vLLM may move between its ranks.
pub(super) async fn ask(http: &EngineHttp, (bytes, ranks): (u64, u32), until: Until) -> Result<Option<Checksums>, EngineError> {
    if bytes / u64::from(ranks.max(1)) > MOST_BYTES {
        return Ok(None);
    }
    let reply = http.post("/weight_checker", Some(&json!({"action": "checksum"})), until).await?;
    if matches!(reply.status(), 404 | 405) {
        return Ok(None);
    }
    let answer = reply.json()?;
    let said = answer.value().get("checksums").and_then(Value::as_object);
    let by_name: Option<BTreeMap<String, String>> =
        said.and_then(|said| said.iter().map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect());
    let by_name = by_name.ok_or_else(|| answer.bad("it reports no checksums".to_owned()))?;
    if by_name.keys().any(|name| name.contains(".experts.")) {
        return Ok(None);
    }
    let version = http.get("/version", until).await?.json()?.string("version")?;
    Ok(Some(Checksums { version, by_name }))
}
