//! vLLM's weight transfer with the `ipc` backend (`distributed/weight_transfer/ipc_engine.py`, `packed_tensor.py`): tensors in memory of
//! another process on the same GPU.
//!
//! Rules kept on purpose: a handle that is not of this GPU is an error that names those that are; the memory of packed buckets is opened once
//! for the arguments that name it, and read again with each call; tensors that are not packed are buffered unread, so that what is in
//! their memory when the session ends is what is served.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};

use super::group::{Announced, announced};
use super::memory::GpuMemory;
use super::tensors::{Rebuilt, Taken};
use super::unpickle;
use weightsync_core::weights::Dtype;
use weightsync_torch::pickle::Value as Pickled;

/// What the worker keeps between calls.
#[derive(Default)]
pub(super) struct Ipc {
    packed: bool,
    /// The packed buffer, by the arguments that named it, each rank its own.
    opened: Vec<Option<(Vec<Pickled>, Rebuilt)>>,
}

impl Ipc {
    pub(super) fn init(&mut self, info: &Map<String, Value>) -> Result<(), String> {
        let class = "IPCWeightTransferInitInfo";
        if let Some(unknown) = info.keys().find(|key| *key != "packed") {
            return Err(format!(
                "Invalid init_info for IPCWeightTransferEngine: {class}.__init__() got an unexpected keyword argument '{unknown}'"
            ));
        }
        self.packed = info.get("packed").and_then(Value::as_bool).unwrap_or(false);
        Ok(())
    }

    pub(super) fn close(&mut self) {
        self.opened.clear();
    }

    pub(super) fn receive(&mut self, info: &Value, gpus: &[String], memory: &GpuMemory) -> Result<Vec<Taken>, String> {
        let pickled = info.get("ipc_handles_pickled").and_then(Value::as_str);
        let pickled = pickled.ok_or("Either `ipc_handles` or `ipc_handles_pickled` must be provided")?;
        let pickled = STANDARD.decode(pickled).map_err(|error| error.to_string())?;
        let handles = unpickle::read(&pickled).ok_or("UnpicklingError")?;
        let tensors = announced(info, "dtype_names")?;
        let names = info.get("names").and_then(Value::as_array).map_or(0, Vec::len);
        if tensors.len() != names {
            return Err(format!("`dtype_names` should be of the same size as `names`: got {} and {names}", tensors.len()));
        }
        self.opened.resize_with(gpus.len(), || None);
        let mut ranks = Vec::new();
        for (rank, gpu) in gpus.iter().enumerate() {
            let gpu = gpu.strip_prefix("GPU-").unwrap_or(gpu);
            ranks.push(if self.packed {
                let sizes = info.get("tensor_sizes").and_then(Value::as_array).ok_or("`tensor_sizes` is required when packed=True")?;
                let sizes: Vec<u64> = sizes.iter().filter_map(Value::as_u64).collect();
                self.packed(rank, gpu, &handles, &tensors, &sizes, memory)?
            } else {
                unpacked(gpu, &handles, &tensors, memory)?
            });
        }
        Ok(super::group::merged(ranks))
    }

    fn packed(
        &mut self,
        rank: usize,
        gpu: &str,
        handles: &Pickled,
        tensors: &[Announced],
        sizes: &[u64],
        memory: &GpuMemory,
    ) -> Result<Vec<Taken>, String> {
        let arguments = of_this_gpu(handles, gpu)?;
        let slot = self.opened.get_mut(rank).ok_or("no such rank")?;
        // The mapping aliases the producer's memory: the same arguments read what is there now.
        if !slot.as_ref().is_some_and(|(known, _)| known == arguments) {
            *slot = Some((arguments.to_vec(), Rebuilt::from_arguments(arguments, memory)?));
        }
        let Some((_, buffer)) = slot else { return Err("no buffer".to_owned()) };
        if buffer.dtype != Dtype::U8 {
            return Err("the packed buffer is not uint8".to_owned());
        }
        let mut at = 0;
        tensors
            .iter()
            .zip(sizes)
            .map(|(tensor, size)| {
                if *size != tensor.bytes {
                    return Err(format!("shape '{:?}' is invalid for input of size {size}", tensor.shape));
                }
                let taken = buffer.tensor(&tensor.name, tensor.dtype, tensor.shape.clone(), at);
                at += size;
                taken
            })
            .collect()
    }
}

fn unpacked(gpu: &str, handles: &Pickled, tensors: &[Announced], memory: &GpuMemory) -> Result<Vec<Taken>, String> {
    let Pickled::List(handles) = handles else { return Err("AssertionError".to_owned()) };
    if handles.len() != tensors.len() {
        return Err(format!("`ipc_handles` should be of the same size as `names`: got {} and {}", handles.len(), tensors.len()));
    }
    let take = |(tensor, handle): (&Announced, &Pickled)| {
        let rebuilt = Rebuilt::from_arguments(of_this_gpu(handle, gpu)?, memory)?;
        if rebuilt.dtype != tensor.dtype {
            return Err(format!("{} is {:?} and not {:?}", tensor.name, rebuilt.dtype, tensor.dtype));
        }
        rebuilt.tensor(&tensor.name, tensor.dtype, tensor.shape.clone(), 0)
    };
    tensors.iter().zip(handles).map(take).collect()
}

/// The arguments for a GPU, in a dict by UUID.
fn of_this_gpu<'a>(handles: &'a Pickled, gpu: &str) -> Result<&'a [Pickled], String> {
    let Pickled::Dict(items) = handles else { return Err("AssertionError".to_owned()) };
    let mine = items.iter().find(|(uuid, _)| *uuid == Pickled::text(gpu)).map(|(_, arguments)| arguments);
    match mine {
        Some(Pickled::Tuple(arguments)) => Ok(arguments),
        Some(_) => Err("not a tuple".to_owned()),
        None => {
            let known: Vec<String> =
                items.iter().map(|(uuid, _)| if let Pickled::Text(text) = uuid { format!("'{text}'") } else { "?".to_owned() }).collect();
            Err(format!("IPC handle not found for GPU UUID {gpu}. Available UUIDs: [{}]", known.join(", ")))
        }
    }
}
