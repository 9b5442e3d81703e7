//! SGLang's own checksums: one of each weight by rank (`/weights_checker`; `srt/utils/weight_checker.py` of 0.5.23).
//!
//! On a GPU they have 64 bits and are computed there. Of the same route, `reset_tensors` overwrites all weights: it is never called.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::EngineError;
use crate::checksums::Checksums;
use crate::http::{Answer, EngineHttp, Until};

/// None where the server has no such route, and where it moves experts between ranks (`--enable-eplb`).
pub(super) async fn ask(http: &EngineHttp, until: Until) -> Result<Option<Checksums>, EngineError> {
    let info = http.get("/server_info", until).await?.json()?;
    if info.value().get("enable_eplb").and_then(Value::as_bool) == Some(true) {
        return Ok(None);
    }
    let body = json!({"action": "checksum", "selector": "target"});
    let reply = http.post("/weights_checker", Some(&body), until).await?;
    if matches!(reply.status(), 404 | 405) {
        return Ok(None);
    }
    let answer = reply.json()?.must("success", &Value::Bool(true))?;
    let by_name = of_ranks(&answer).ok_or_else(|| answer.bad("it reports no checksums of its ranks".to_owned()))?;
    let version = format!("{} {}", info.string("version")?, info.value().get("dtype").and_then(Value::as_str).unwrap_or_default());
    Ok(Some(Checksums { version, by_name }))
}

/// Each name with its place: pipeline stage, tensor rank, data rank.
fn of_ranks(answer: &Answer) -> Option<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for rank in answer.value().get("ranks")?.as_array()? {
        let place = rank.get("parallelism_info")?;
        let number = |name: &str| place.get(name).and_then(Value::as_u64);
        let place = format!("pp{}:tp{}:dp{}", number("pp_rank")?, number("tp_rank")?, number("dp_rank")?);
        for (name, value) in rank.get("checksums")?.as_object()? {
            // Two ranks in one place: one of them would hide the other.
            if all.insert(format!("{place}:{name}"), value.as_str()?.to_owned()).is_some() {
                return None;
            }
        }
    }
    Some(all)
}
