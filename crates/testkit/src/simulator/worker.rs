//! The engine's side of checkpoint-engine 0.4.2 (`checkpoint_engine/worker.py`), step by step, with its traps.
//!
//! Kept on purpose: a memory that cannot be opened is answered with a traceback, and then one more message is awaited; a bucket that fails is
//! answered with a traceback and the worker goes on waiting; an error that the other side sends ends it without an answer; the first `None`
//! lets the memory go and the second runs the engine's own last step; and no wait has an end.

use std::sync::Arc;

use bytes::Bytes;
use zeromq::{RepSocket, Socket, SocketRecv, SocketSend};

use super::core::Core;
use super::memory::GpuMemory;
use super::tensors::{Rebuilt, Taken, element, field, number, shape, text};
use super::unpickle;
use weightsync_torch::pickle::Value;

/// Runs one worker to its end. `reject` is what the engine says to every bucket, where it was not made ready; `finish` is its last step.
pub(super) async fn run(core: &Arc<Core>, memory: &GpuMemory, address: &str, reject: Option<&str>) -> Result<(), String> {
    let mut socket = RepSocket::new();
    socket.connect(address).await.map_err(|error| error.to_string())?;
    let first = receive(&mut socket).await?;
    let buffer = match Rebuilt::from(&first, memory) {
        Ok(buffer) if buffer.dtype == weightsync_core::weights::Dtype::U8 => buffer,
        wrong => {
            let cause = wrong.err().unwrap_or_else(|| "AssertionError".to_owned());
            send(&mut socket, &traceback(&cause)).await?;
            let _acknowledged = socket.recv().await;
            return Err(cause);
        }
    };
    send(&mut socket, "").await?;
    let mut buffer = Some(buffer);
    loop {
        match (receive(&mut socket).await?, &buffer) {
            (Value::None, Some(_)) => {
                buffer = None;
                send(&mut socket, "").await?;
            }
            (Value::None, None) => {
                core.finalise();
                send(&mut socket, "").await?;
                return Ok(());
            }
            (_, None) => return Err("AssertionError: Should not receive any payload after released".into()),
            (Value::List(items), Some(buffer)) => {
                let loaded = match reject {
                    Some(reason) => Err(format!("RuntimeError: {reason}")),
                    None => load(core, &items, buffer).await,
                };
                let answer = loaded.err().map_or_else(String::new, |cause| traceback(&cause));
                send(&mut socket, &answer).await?;
            }
            (Value::Call(error, arguments), Some(_)) => return Err(format!("{error:?}{arguments:?}")),
            (other, Some(_)) => return Err(format!("TypeError: Unexpected payload type: {other:?}")),
        }
    }
}

async fn load(core: &Arc<Core>, items: &[Value], buffer: &Rebuilt) -> Result<(), String> {
    let take = |item: &Value| {
        let dtype = element(field(item, "dtype")?)?;
        buffer.tensor(text(item, "name")?, dtype, shape(field(item, "shape")?)?, number(item, "offset")?)
    };
    let taken: Vec<Taken> = items.iter().map(take).collect::<Result<_, String>>()?;
    core.take(taken).await
}

fn traceback(cause: &str) -> String {
    format!("Traceback (most recent call last):\n  File \"checkpoint_engine/worker.py\", line 94, in update_weights_from_ipc\n{cause}\n")
}

async fn receive(socket: &mut RepSocket) -> Result<Value, String> {
    let message = socket.recv().await.map_err(|error| error.to_string())?;
    let bytes: Vec<u8> = message.into_vec().into_iter().flatten().collect();
    unpickle::read(&bytes).ok_or_else(|| "UnpicklingError".to_owned())
}

async fn send(socket: &mut RepSocket, text: &str) -> Result<(), String> {
    socket.send(Bytes::from(text.to_owned()).into()).await.map_err(|error| error.to_string())
}
