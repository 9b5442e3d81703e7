//! How weights leave and enter a simulated FastDeploy: sleep and wake-up, the snapshot, the library's streams, and the asynchronous
//! message.
//!
//! Decides what remains after a failure in the middle, as in the sources. A snapshot and the stream of checkpoint tensors (GDR) replace
//! parameter by parameter; the RDMA stream compares everything first. A draft model without weights is detected after the main model was
//! loaded. Only the legacy route searches for parameters that are still empty, and not for the asynchronous message.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use zeromq::{RepSocket, Socket, SocketRecv, SocketSend};

use super::{Fastdeploy, RankSeen};
use crate::simulator::faults::LoadFault;
use crate::simulator::feed::{Arrived, Feed};
use crate::simulator::front::Front;
use crate::simulator::served::{Served, read_file};
use crate::simulator::tensors::{Taken, field, number, shape, text};
use crate::simulator::unpickle;
use weightsync_core::weights::Dtype;
use weightsync_torch::paddle::dtype_name;
use weightsync_torch::paddle::{is_legacy_snapshot, snapshot_name};
use weightsync_torch::pickle::Value as Pickled;

/// The files of rank 0's snapshot in the order in which the server looks for them.
pub(in crate::simulator) fn start_from(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(|error| format!("{}: {error}", directory.display()))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some((base, part)) = snapshot_name(&name) {
            // Parts, then the whole file, then the legacy name.
            found.push((part.is_none(), is_legacy_snapshot(&base), part, entry.path()));
        }
    }
    found.sort();
    match found.first().cloned() {
        Some((false, ..)) => Ok(found.into_iter().filter(|(whole, ..)| !whole).map(|(.., path)| path).collect()),
        Some((.., path)) => Ok(vec![path]),
        None => {
            let shown = directory.display();
            Err(format!(
                "No snapshot found for model_state.tp0.0: checked {shown} (new/legacy) and /shared_ipc_meta/model_state.tp0.0.pdparams"
            ))
        }
    }
}

/// Offloads; ends at the first tag that sleeps already.
pub(super) fn sleep(front: &Front, state: &Fastdeploy, tags: &[&str]) {
    if tags.contains(&"weight") {
        if state.memory.lock().weight_sleeps {
            return;
        }
        let names = front.core.change_served(|served| {
            served.clear();
            served.tensors().into_keys().collect()
        });
        let mut memory = state.memory.lock();
        (memory.weight_sleeps, memory.graphs, memory.empty) = (true, false, names);
    }
    if tags.contains(&"kv_cache") {
        if state.memory.lock().cache_sleeps {
            return;
        }
        front.core.reset_cache();
        let mut memory = state.memory.lock();
        (memory.cache_sleeps, memory.mtp_cache) = (true, false);
    }
}

/// Brings back; ends at the first tag that is awake already.
pub(super) async fn wakeup(front: &Front, state: &Fastdeploy, tags: &[String]) -> Result<(), String> {
    let named = |tag: &str| tags.iter().any(|each| each == tag);
    if !named("kv_cache") && named("weight") && state.options.graphs && state.memory.lock().cache_sleeps {
        return Err(
            "Waking up [weight] alone is not supported when CUDA Graph is enabled, as recapturing the graph requires the KV cache to be \
                    rebuilt first. Please wake up [kv_cache] first."
                .into(),
        );
    }
    if named("kv_cache") {
        if !state.memory.lock().cache_sleeps {
            return Ok(());
        }
        rebuild_cache(state);
    }
    if named("weight") {
        if !state.memory.lock().weight_sleeps {
            return Ok(());
        }
        reload(front, state).await?;
        recapture(state);
        state.memory.lock().weight_sleeps = false;
    }
    Ok(())
}

fn rebuild_cache(state: &Fastdeploy) {
    let mtp = state.options.mtp;
    let mut memory = state.memory.lock();
    (memory.cache_sleeps, memory.mtp_cache) = (false, mtp);
    memory.rebuilt += 1;
}

fn recapture(state: &Fastdeploy) {
    if state.options.graphs {
        let mut memory = state.memory.lock();
        memory.graphs = true;
        memory.recaptured += 1;
    }
}

/// `reload_model_weights`: by the strategy, whatever `FD_USE_GDR_CHECKPOINT_TRANSFER` says; asks for no completeness.
async fn reload(front: &Front, state: &Fastdeploy) -> Result<(), String> {
    match state.options.load_strategy.as_str() {
        "ipc_snapshot" => snapshot(front, state).await,
        "ipc" => Err("[Errno 2] No such file or directory: '/shared_ipc_meta/ipc_metas_0'".into()),
        other => Err(format!("Unsupported strategy: {other}")),
    }
}

/// The legacy route: by the strategy, and all parameters must be there in the end.
pub(super) async fn update_parameters(front: &Arc<Front>, state: &Fastdeploy) -> Result<(), String> {
    let message = state.options.async_ipc.as_deref().filter(|_| state.options.load_strategy == "ipc");
    match message {
        Some(address) => update_ipc_async(front, state, address).await?,
        None if state.options.gdr => drop(by_gdr(front, state, None).await?),
        None => reload(front, state).await?,
    }
    rebuild_cache(state);
    recapture(state);
    // The posted change of #7472 comments `_verify_parameters("update")` out.
    if message.is_none() {
        verify(state)?;
    }
    state.memory.lock().weight_sleeps = false;
    Ok(())
}

/// `_verify_parameters("update")`.
fn verify(state: &Fastdeploy) -> Result<(), String> {
    match state.memory.lock().empty.iter().next() {
        None => Ok(()),
        Some(name) => Err(format!("Model Parameter update verification failed: Param {name} initialized=False (expected True)")),
    }
}

async fn snapshot(front: &Front, state: &Fastdeploy) -> Result<(), String> {
    let fault = slow(front).await;
    if fault == Some(LoadFault::AcknowledgeUnread) {
        return Ok(());
    }
    let tensors = read(start_from(&state.model_directory)?).await?;
    take(front, state, tensors, fault)
}

/// Time that a load takes, and what goes wrong with it.
async fn slow(front: &Front) -> Option<LoadFault> {
    let (wait, fault) = {
        let mut core = front.core.state();
        let fault = core.faults.load;
        if fault == Some(LoadFault::FailHalfwayOnce) {
            core.faults.load = None;
        }
        (core.faults.load_ms, fault)
    };
    tokio::time::sleep(Duration::from_millis(wait)).await;
    fault
}

async fn read(files: Vec<PathBuf>) -> Result<Vec<Taken>, String> {
    let reading = tokio::task::spawn_blocking(move || {
        let mut all = Vec::new();
        for file in files {
            all.extend(read_file(&file)?);
        }
        Ok(all)
    });
    reading.await.map_err(|error| error.to_string())?
}

/// Parameter by parameter; one that does not match ends it where it is.
fn take(front: &Front, state: &Fastdeploy, tensors: Vec<Taken>, fault: Option<LoadFault>) -> Result<(), String> {
    if tensors.is_empty() {
        return Err("No parameter found in state dict {}".into());
    }
    let half = tensors.len() / 2;
    front.core.change_served(|served| {
        for (index, tensor) in tensors.into_iter().enumerate() {
            if index == half && matches!(fault, Some(LoadFault::FailHalfway | LoadFault::FailHalfwayOnce)) {
                return Err("ResourceExhaustedError: Out of memory error on GPU 0".to_owned());
            }
            let name = tensor.name.clone();
            served.matches(&tensor)?;
            served.take(tensor, fault, index == 0)?;
            state.memory.lock().empty.remove(&name);
        }
        Ok(())
    })
}

/// `update_weights` of the workers: by the flag alone. One answer a rank.
pub(super) async fn update_weights(front: &Front, state: &Fastdeploy, version: Option<String>) -> Result<Value, String> {
    let answer = if state.options.gdr { by_gdr(front, state, version).await? } else { by_rdma(front, state, version).await? };
    let of_rank = |rank| {
        let mut answer = answer.clone();
        if let Some(answer) = answer.as_object_mut() {
            answer.insert("rank".to_owned(), json!(rank));
        }
        answer
    };
    Ok((0..state.gpus.uuids.len()).map(of_rank).collect())
}

/// `_resolve_weight_update_version`.
fn resolve(state: &Fastdeploy, version: Option<String>) -> Result<String, String> {
    version.filter(|version| !version.is_empty()).or_else(|| step(&state.model_directory)).ok_or_else(|| {
        "rsync model version not set, please set it in 1) {model_version}/version.yaml or 2) interface arguments 'version'".into()
    })
}

/// What the library streams, played from a folder. It is not public; what it says of an unknown version is made up.
async fn stream(state: &Fastdeploy, version: &str) -> Result<Vec<Taken>, String> {
    if let Some(place) = version.strip_prefix("weightsync-memory:1:") {
        return from_memory(state, place).await;
    }
    let Some(published) = &state.options.transfer else { return Err("No module named 'checkpoint_transfer'".into()) };
    let plain = Path::new(version).components().count() == 1 && !version.starts_with('.');
    let checkpoint = published.join(version);
    if !plain || !checkpoint.is_dir() {
        return Err(format!("version mismatch: {version} was not published"));
    }
    let entries = std::fs::read_dir(&checkpoint).map_err(|error| format!("{}: {error}", checkpoint.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|end| end == "safetensors"));
    files.sort();
    read(files).await
}

/// A step that the agent shares from its memory (`python/weightsync/fastdeploy/checkpoint_transfer/memory.py`), taken by every rank. What the
/// server serves is the first rank's.
async fn from_memory(state: &Fastdeploy, place: &str) -> Result<Vec<Taken>, String> {
    let place = place.split_once(':').ok_or("ValueError: not enough values to unpack")?;
    let ranks = u32::try_from(state.gpus.uuids.len()).map_err(|error| error.to_string())?;
    let digests = ["xxh3-128".to_owned()];
    let connect = |rank| Feed::connect(place, (rank, ranks), &digests, false, None);
    let feeds = (0..ranks).map(connect).collect::<Result<Vec<_>, _>>()?;
    let taken = feeds.into_iter().map(|feed| take_all(state, feed));
    let mut taken = futures::future::try_join_all(taken).await?;
    Ok(taken.swap_remove(0))
}

async fn take_all(state: &Fastdeploy, mut feed: Feed) -> Result<Vec<Taken>, String> {
    feed.did("started");
    let mut all = Vec::new();
    loop {
        match feed.next(false).await {
            Arrived::Bucket(bucket) => {
                for place in &bucket.tensors {
                    if state.options.stops_after == Some(all.len()) {
                        let why = "the server's loader stopped taking tensors before the end";
                        feed.say(&json!({"failed": why}))?;
                        return Err("ResourceExhaustedError: Out of memory error on GPU 0".into());
                    }
                    all.push(feed.read(place)?);
                }
                feed.say(&json!({"taken": bucket.sequence}))?;
            }
            Arrived::End => break,
            Arrived::Failed(cause) => return Err(cause),
        }
    }
    feed.did("updated");
    feed.did("finished");
    Ok(all)
}

/// `update_weights_by_rdma`: the server's own parameters, all compared before the first is set.
async fn by_rdma(front: &Front, state: &Fastdeploy, version: Option<String>) -> Result<Value, String> {
    let version = resolve(state, version)?;
    let fault = slow(front).await;
    let tensors = stream(state, &version).await?;
    let known = |served: &mut Served| tensors.iter().try_for_each(|tensor| served.knows(tensor));
    front.core.change_served(known).map_err(|_| "Invalid new_state_dict, update parameters failed".to_owned())?;
    take(front, state, tensors, fault)?;
    state.memory.lock().version = Some(version.clone());
    Ok(json!({"sync_cost": 0.0, "update_cost": 0.0, "total_cost": 0.0, "version": version}))
}

/// `update_weights_by_gdr`: checkpoint tensors through the models' own loaders. With a strategy other than rsync no version is looked for. The
/// handle is made once and destroyed by a failure.
async fn by_gdr(front: &Front, state: &Fastdeploy, version: Option<String>) -> Result<Value, String> {
    let version = match state.options.load_strategy.as_str() {
        "rsync" => resolve(state, version)?,
        _ => version.filter(|version| !version.is_empty()).unwrap_or_else(|| "0".to_owned()),
    };
    {
        let mut memory = state.memory.lock();
        if memory.handle.is_none() {
            memory.handles += 1;
            memory.handle = Some(memory.handles);
        }
    }
    match load_models(front, state, &version).await {
        Ok((update_count, mtp_cache_count)) => {
            state.memory.lock().version = Some(version.clone());
            Ok(json!({"update_cost": 0.0, "total_cost": 0.0, "version": version, "update_count": update_count,
                "mtp_cache_count": mtp_cache_count}))
        }
        Err(cause) => {
            state.memory.lock().handle = None;
            Err(cause)
        }
    }
}

/// `_load_models_from_weight_iterator`: everything into the main model, and the draft model's own in chunks next to it.
async fn load_models(front: &Front, state: &Fastdeploy, version: &str) -> Result<(usize, usize), String> {
    let fault = slow(front).await;
    let tensors = stream(state, version).await?;
    let (count, drafts) = (tensors.len(), tensors.iter().filter(|tensor| is_drafts(state, &tensor.name)).count());
    take(front, state, tensors, fault)?;
    if !state.options.mtp {
        return Ok((count, 0));
    }
    let chunk = state.options.mtp_chunk.max(1);
    let rest = Some(drafts % chunk).filter(|rest| *rest > 0);
    state.memory.lock().mtp_chunks = std::iter::repeat_n(chunk, drafts / chunk).chain(rest).collect();
    if drafts == 0 {
        return Err("No MTP weights were cached from the GDR stream for auxiliary model loading.".into());
    }
    Ok((count, drafts))
}

/// Whether a name holds one of the tokens of the draft model's weights: `mtp_`, or a layer of its.
fn is_drafts(state: &Fastdeploy, name: &str) -> bool {
    let (first, count) = state.options.mtp_layers;
    name.contains("mtp_") || (first..first.saturating_add(count)).any(|layer| name.contains(&format!("layers.{layer}.")))
}

/// `step` of `version.yaml` in the model directory.
fn step(directory: &Path) -> Option<String> {
    let text = std::fs::read_to_string(directory.join("version.yaml")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("step:")).map(|step| step.trim().to_owned()).filter(|step| !step.is_empty())
}

/// `_update_ipc_async` of all ranks: each connects, and ends by itself.
async fn update_ipc_async(front: &Arc<Front>, state: &Fastdeploy, address: &str) -> Result<(), String> {
    let ranks = state.gpus.uuids.len();
    state.memory.lock().ranks = vec![RankSeen::default(); ranks];
    let workers = (0..ranks).map(|rank| receive_all_buckets(front, state, address.replace("{rank}", &rank.to_string()), rank));
    futures::future::join_all(workers).await.into_iter().collect()
}

/// The worker of the asynchronous message: connects, clones bucket after bucket, and ends with the empty message.
async fn receive_all_buckets(front: &Arc<Front>, state: &Fastdeploy, address: String, rank: usize) -> Result<(), String> {
    let mut socket = RepSocket::new();
    socket.connect(&address).await.map_err(|error| error.to_string())?;
    let mut first = true;
    loop {
        let message = socket.recv().await.map_err(|error| error.to_string())?;
        let bytes: Vec<u8> = message.into_vec().into_iter().flatten().collect();
        let bucket = unpickle::read(&bytes).ok_or("UnpicklingError")?;
        let answer = match &bucket {
            Pickled::None => Ok(()),
            bucket => match field(bucket, "error") {
                Ok(error) => return Err(format!("the sender gave up: {error:?}")),
                Err(_) => clone_bucket(front, state, bucket, rank, std::mem::take(&mut first)).await,
            },
        };
        let text = Bytes::from(answer.clone().err().unwrap_or_default());
        let late = Duration::from_millis(front.core.state().faults.last_answer_ms);
        if bucket == Pickled::None && !late.is_zero() {
            tokio::spawn(async move {
                tokio::time::sleep(late).await;
                let _gone = socket.send(text.into()).await;
            });
            return answer;
        }
        socket.send(text.into()).await.map_err(|error| error.to_string())?;
        if bucket == Pickled::None {
            return answer;
        }
    }
}

/// The number of the device is overwritten by the worker's own (`FLAGS_selected_gpus`), so it is not looked at.
async fn clone_bucket(front: &Arc<Front>, state: &Fastdeploy, bucket: &Pickled, rank: usize, first: bool) -> Result<(), String> {
    let Pickled::List(meta) = field(bucket, "buffer_meta")? else { return Err("TypeError: buffer_meta is no list".into()) };
    let [
        Pickled::Text(handle),
        Pickled::Int(offset),
        Pickled::Int(size),
        Pickled::Int(2),
        Pickled::List(dims),
        Pickled::List(_),
        Pickled::Int(_),
    ] = meta.as_slice()
    else {
        return Err("ValueError: buffer_meta is not the seven of a uint8 tensor".into());
    };
    if *dims != [Pickled::Int(*size)] {
        return Err("ValueError: the dimensions are not those of the buffer".into());
    }
    // `encode("latin-1")`.
    let handle: Option<Vec<u8>> = handle.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect();
    let handle = handle.ok_or("UnicodeEncodeError: 'latin-1' codec can't encode character")?;
    let memory = state.gpus.memory.open(&handle)?;
    let Pickled::List(params) = field(bucket, "params")? else { return Err("TypeError: params is no list".into()) };
    let wait = front.core.state().faults.load_ms;
    tokio::time::sleep(Duration::from_millis(wait)).await;
    let mut taken = Vec::new();
    for param in params {
        let named = text(param, "dtype")?;
        let dtype = Dtype::ALL.into_iter().find(|dtype| dtype_name(*dtype) == Some(named)).ok_or_else(|| format!("KeyError: '{named}'"))?;
        let shape = shape(field(param, "shape")?)?;
        let bytes = dtype.tensor_bytes(&shape).map_err(|_| "a shape".to_owned())?;
        let begin = number(param, "offset")?;
        if begin.saturating_add(bytes) > *size {
            return Err(format!("ValueError: shape {shape:?} does not fit the buffer"));
        }
        let read = memory.read(offset.saturating_add(begin), bytes)?;
        taken.push(Taken::of(text(param, "name")?.to_owned(), dtype, shape, &read));
    }
    let name: String = handle.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect();
    if let Some(seen) = state.memory.lock().ranks.get_mut(rank) {
        seen.handles.insert(name);
        seen.tensors.extend(taken.iter().map(|tensor| (tensor.name.clone(), format!("{:032x}", tensor.digest))));
    }
    if rank > 0 {
        // What the server serves is the first rank's.
        return Ok(());
    }
    let fault = front.core.state().faults.load;
    let half = front.core.state().served.tensors().len() / 2;
    front.core.change_served(|served| {
        for (index, tensor) in taken.into_iter().enumerate() {
            let left = state.memory.lock().empty.len();
            if left <= half && matches!(fault, Some(LoadFault::FailHalfway | LoadFault::FailHalfwayOnce)) {
                return Err("ResourceExhaustedError: Out of memory error on GPU 0".to_owned());
            }
            let name = tensor.name.clone();
            served.take(tensor, fault, first && index == 0)?;
            state.memory.lock().empty.remove(&name);
        }
        Ok(())
    })
}
