//! SGLang's `/update_weights_from_tensor`: tensors in memory of another process, by a pickle for each rank.
//!
//! Rules kept on purpose: a GPU is named by the UUID that this server sees, or by its own number for it; the answer comes before anything was
//! read (trap 17), and what is read later is what is there then; a tensor that was let go is reported by torch's counter, where the server sees
//! the file; the end of the session comes after all reading; and what goes wrong in the worker is not caught there, and ends the server.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::super::front::Front;
use super::super::sglang_reply::{PauseCondition, bad_request, object};
use super::super::tensors::{Rebuilt, Taken, element, field, number, shape, text};
use super::super::unpickle;
use super::sglang::{SglangGroups, in_session};
use super::{Ranks, Trouble, detached, merged};
use weightsync_core::weights::Dtype;
use weightsync_torch::counter::SHARED_MEMORY;
use weightsync_torch::pickle::Value as Pickled;

/// How much later than the response the device reads.
const BEHIND: Duration = Duration::from_millis(20);

/// What one rank will read.
struct Named {
    memory: Rebuilt,
    tensors: Vec<(String, Dtype, Vec<u64>, u64)>,
    counter: Option<(PathBuf, u64)>,
}

pub(in super::super) async fn update(
    State(front): State<Arc<Front>>,
    Extension(state): Extension<Arc<SglangGroups>>,
    Extension(pause): Extension<PauseCondition>,
    bytes: Bytes,
) -> Response {
    let body = match object(&bytes) {
        Ok(body) => body,
        Err(refusal) => return *refusal,
    };
    if !body.get("serialized_named_tensors").is_some_and(Value::is_array) {
        return bad_request("serialized_named_tensors: Field required");
    }
    let (held, given) = (Arc::clone(&front), Value::Object(body.clone()));
    let within = Arc::clone(&front);
    detached(
        &front,
        in_session(held, state, pause, body, "update_weights_from_tensor", move |state| {
            std::future::ready(begin_to_read(within, &state, &given))
        }),
    )
    .await
}

/// Opens the memory for every rank, and leaves the reading to the device.
fn begin_to_read(front: Arc<Front>, state: &SglangGroups, body: &Value) -> Result<Vec<Taken>, Trouble> {
    let counted = !front.core.state().faults.blind_to_counters;
    let named = named(state.ranks(), body, counted).map_err(Trouble::Dead)?;
    let reading = tokio::spawn(async move {
        let late = Duration::from_millis(front.core.state().faults.late_ms).max(BEHIND);
        tokio::time::sleep(late).await;
        let read = read(&named);
        let taken = match read {
            Ok(taken) => front.core.take(taken).await,
            Err(cause) => Err(cause),
        };
        for (path, at) in named.iter().filter_map(|rank| rank.counter.as_ref()) {
            // No file, no word: torch passes over it.
            let _reported = let_go(path, *at);
        }
        if let Err(cause) = taken {
            tracing::debug!(%cause, "the simulated scheduler died");
            front.crash.cancel();
        }
    });
    state.read_later(reading);
    Ok(Vec::new())
}

fn read(named: &[Named]) -> Result<Vec<Taken>, String> {
    let rank = |rank: &Named| {
        let tensors = rank.tensors.iter();
        tensors.map(|(name, dtype, shape, start)| rank.memory.tensor(name, *dtype, shape.clone(), *start)).collect::<Result<Vec<_>, _>>()
    };
    named.iter().map(rank).collect::<Result<Vec<_>, _>>().map(merged)
}

fn let_go(path: &Path, at: u64) -> std::io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut number = [0; 8];
    file.read_exact_at(&mut number, at)?;
    file.write_all_at(&(i64::from_le_bytes(number) - 1).to_le_bytes(), at)
}

fn named(ranks: &Ranks, body: &Value, counted: bool) -> Result<Vec<Named>, String> {
    let given = body.get("serialized_named_tensors").and_then(Value::as_array).ok_or("no tensors")?;
    if body.get("load_format").and_then(Value::as_str) != Some("flattened_bucket") {
        return Err("the simulator takes flattened buckets".to_owned());
    }
    let rank = |(rank, gpu): (usize, &String)| {
        let text = given.get(rank).and_then(Value::as_str).ok_or("IndexError: list index out of range")?;
        let pickle = STANDARD.decode(text).map_err(|error| error.to_string())?;
        let bucket = unpickle::read(&pickle).ok_or("UnpicklingError")?;
        one(&bucket, ranks, rank, gpu, counted)
    };
    ranks.gpus.iter().enumerate().map(rank).collect()
}

fn one(bucket: &Pickled, ranks: &Ranks, rank: usize, gpu: &str, counted: bool) -> Result<Named, String> {
    let tensor = field(bucket, "flattened_tensor")?;
    let Pickled::Call(_, arguments) = tensor else { return Err("not a tensor".to_owned()) };
    match arguments.get(6) {
        Some(Pickled::Text(uuid)) if ranks.gpus.iter().any(|known| known.strip_prefix("GPU-").unwrap_or(known) == uuid) => {}
        Some(Pickled::Text(uuid)) => return Err(format!("Invalid device_uuid={uuid}")),
        // The server's own number: the memory of another GPU does not open there.
        Some(Pickled::Int(number)) if usize::try_from(*number) == Ok(rank) => {}
        other => return Err(format!("{gpu} is not the device {other:?}")),
    }
    let memory = Rebuilt::from(tensor, &ranks.memory)?;
    if memory.dtype != Dtype::U8 {
        return Err("a flattened tensor is uint8".to_owned());
    }
    let Pickled::List(metadata) = field(bucket, "metadata")? else { return Err("metadata".to_owned()) };
    let item = |item: &Pickled| {
        let (dtype, shape, start) = (element(field(item, "dtype")?)?, shape(field(item, "shape")?)?, number(item, "start_idx")?);
        let bytes = dtype.tensor_bytes(&shape).map_err(|_| "a shape".to_owned())?;
        if number(item, "end_idx")? != start.saturating_add(bytes) {
            return Err(format!("shape '{shape:?}' is invalid for input"));
        }
        Ok((text(item, "name")?.to_owned(), dtype, shape, start))
    };
    let tensors = metadata.iter().map(item).collect::<Result<_, String>>()?;
    let counter = match (arguments.get(11), arguments.get(12)) {
        (Some(Pickled::Bytes(name)), Some(Pickled::Int(slot))) if counted => {
            let name = String::from_utf8_lossy(name).trim_start_matches('/').to_owned();
            // 64 bytes come before the counters of 8 bytes each.
            Some((PathBuf::from(SHARED_MEMORY).join(name), 64 + 8 * slot))
        }
        _ => None,
    };
    Ok(Named { memory, tensors, counter })
}
