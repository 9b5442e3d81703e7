//! The protocol of checkpoint-engine 0.4.2, which unmodified vLLM, SGLang and LMDeploy support, from the side of its parameter server.
//!
//! One ZeroMQ request socket for each GPU: this side binds, the engine's worker connects and replies. First comes the memory (once), then
//! for each bucket a list of its tensors, then two empty messages. After the first one the memory is free, after the second the engine has
//! finished (`checkpoint_engine/worker.py`). Replies are empty or the text of an error. The engine's own call must be in progress all the
//! time, and its end is watched: otherwise both sides would wait for each other after an early refusal. Decides nothing about the engine's
//! state; never reads a pickle.

use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{BoxFuture, try_join_all};
use tokio::task::JoinHandle;
use zeromq::{ReqSocket, Socket, SocketRecv, SocketSend, ZmqError};

use super::EngineError;
use super::device::{DeviceBucket, DevicePlace};
use super::http::Until;
use weightsync_core::protocol::worker::IpcHandle;
use weightsync_core::weights::Dtype;
use weightsync_torch::pickle::Value;
use weightsync_torch::{Device, Piece, SharedTensor, checkpoint_engine_bucket};

/// Longest path of a unix socket, with its final zero.
const LONGEST_PATH: usize = 108;
/// Interval at which it checks whether the worker has connected.
const CONNECTING: Duration = Duration::from_millis(2);
/// Longest wait for the engine's error text after it refused.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Part of an engine's error that ours shows, in characters, from its end: a traceback has the cause in its last line.
const SHOWN: usize = 512;

/// The memory of one GPU, for the engine's worker there.
struct Channel {
    gpu: String,
    /// Removes its path when it is dropped.
    socket: ReqSocket,
}

/// The call that makes an engine's workers connect; ends when they are done.
pub(super) type Call = BoxFuture<'static, Result<(), EngineError>>;

/// What follows a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    More,
    /// The end of the engine's call: its last replies and the response to its call come at once.
    End,
}

pub(super) struct ParameterServer {
    url: String,
    channels: Vec<Channel>,
    /// The engine's call, once it was made; its result, once it ended.
    call: Option<JoinHandle<Result<(), EngineError>>>,
    /// The memory that the workers received, in the order of channels.
    memory: Option<Vec<(IpcHandle, u64)>>,
}

impl ParameterServer {
    /// Binds one socket for each GPU in `folder`, and returns the address of each for the engine.
    pub(super) async fn bind(
        url: &str,
        gpus: &[String],
        folder: &Path,
        in_engine: &Path,
    ) -> Result<(Self, serde_json::Map<String, serde_json::Value>), EngineError> {
        let cannot = |what: String| EngineError::Unsupported {
            what,
            next_step: "give the agent and the engine one directory with a short path that both may use".into(),
        };
        // Any process that knows the name may connect, because the engine may run as another user; the name cannot be listed.
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o711).create(folder);
        made.map_err(|error| cannot(format!("{} cannot be made: {error}", folder.display())))?;
        let (mut channels, mut handles) = (Vec::new(), serde_json::Map::new());
        for gpu in gpus {
            // Short, because socket paths are limited.
            let name: String = uuid::Uuid::new_v4().simple().to_string().chars().take(16).collect();
            let (path, seen) = (folder.join(&name), in_engine.join(&name));
            if path.as_os_str().len().max(seen.as_os_str().len()) >= LONGEST_PATH {
                return Err(cannot(format!("{} is too long for a socket", path.display())));
            }
            let mut socket = ReqSocket::new();
            let bound = socket.bind(&format!("ipc://{}", path.display())).await;
            bound.map_err(|error| cannot(format!("no socket can be made at {}: {error}", path.display())))?;
            let opened = std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666));
            opened.map_err(|error| cannot(format!("{} cannot be opened to the engine: {error}", path.display())))?;
            handles.insert(gpu.clone(), format!("ipc://{}", seen.display()).into());
            channels.push(Channel { gpu: gpu.clone(), socket });
        }
        Ok((Self { url: url.to_owned(), channels, call: None, memory: None }, handles))
    }

    /// Makes the engine's call. It must be in progress before the first bucket.
    pub(super) fn call(&mut self, call: Call) {
        self.call = Some(tokio::spawn(call));
    }

    /// Passes one bucket; returns when every worker has loaded it and its device is idle.
    pub(super) async fn bucket(&mut self, bucket: &DeviceBucket, pieces: &[Piece<'_>], until: Until) -> Result<(), EngineError> {
        let places: Vec<&DevicePlace> = self.channels.iter().map(|channel| bucket.on(&channel.gpu)).collect::<Result<_, _>>()?;
        let memory: Vec<(IpcHandle, u64)> = places.iter().map(|place| (place.handle, place.allocation_bytes)).collect();
        let lists: Vec<Value> = places
            .iter()
            .map(|place| checkpoint_engine_bucket(pieces, place.offset))
            .collect::<Result<_, _>>()
            .map_err(|error| EngineError::no_form(&error))?;
        match &self.memory {
            None => {
                let shared = |(handle, bytes): &(IpcHandle, u64)| SharedTensor {
                    handle: handle.0,
                    storage_offset: 0,
                    storage_bytes: *bytes,
                    elements: *bytes,
                    dtype: Dtype::U8,
                    device: Device::Readers,
                    counter: None,
                };
                let tensors: Vec<Value> = memory
                    .iter()
                    .map(|each| shared(each).unbuilt())
                    .collect::<Result<_, _>>()
                    .map_err(|error| EngineError::no_form(&error))?;
                self.exchange(&tensors, Then::More, until).await?;
                self.memory = Some(memory);
            }
            Some(known) if *known != memory => {
                let what = format!("bucket {} lies in other memory than those before it", bucket.bucket.sequence);
                return Err(EngineError::BadReply { url: self.url.clone(), what });
            }
            Some(_) => {}
        }
        self.exchange(&lists, Then::More, until).await
    }

    /// Whether a worker may have begun to load.
    pub(super) fn touched(&self) -> bool {
        self.memory.is_some()
    }

    /// Ends it: the workers release the memory, and finish.
    pub(super) async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        let nothing = vec![Value::None; self.channels.len()];
        if self.memory.is_some() {
            self.exchange(&nothing, Then::More, until).await?;
            self.exchange(&nothing, Then::End, until).await?;
        }
        // After the last reply, only the response to the call is left.
        self.ended(until).await
    }

    /// Makes the workers give up. They respond by the end of their call.
    pub(super) async fn fail(&mut self, reason: &str, until: Until) {
        let reason: String = reason.chars().take(SHOWN).collect();
        let error = Value::Call(Box::new(Value::Global("builtins", "RuntimeError")), vec![Value::text(reason)]).pickle();
        let notified = self.channels.iter_mut().map(|channel| async {
            // A worker in the middle of a bucket must reply before it can receive another message.
            let _answer = channel.socket.recv().await;
            let _sent = channel.socket.send(Bytes::from(error.clone()).into()).await;
        });
        let notified = futures::future::join_all(notified);
        let _late = tokio::time::timeout(LAST_WORDS.min(until.left() / 4), notified).await;
        let _ended = self.ended(until.at_most(LAST_WORDS.min(until.left() / 4))).await;
        if let Some(call) = self.call.take() {
            call.abort();
        }
    }

    /// Sends one message to each worker and waits for all replies, unless the engine's call ends first.
    async fn exchange(&mut self, messages: &[Value], then: Then, until: Until) -> Result<(), EngineError> {
        let timeout = EngineError::Timeout { url: self.url.clone(), deadline: until.total() };
        let Some(call) = self.call.as_mut() else {
            return Err(EngineError::BadReply { url: self.url.clone(), what: "its workers were not called".into() });
        };
        let asked = try_join_all(self.channels.iter_mut().zip(messages).map(|(channel, message)| channel.ask(message)));
        let refused = tokio::select! {
            biased;
            ended = call => {
                self.call = None;
                return Err(match ended {
                    Ok(Err(error)) => error,
                    Ok(Ok(())) if then == Then::End => return Ok(()),
                    Ok(Ok(())) => self.not_success("it reported that all was loaded before all buckets were sent"),
                    Err(ended) => self.not_success(&format!("its call ended: {ended}")),
                });
            }
            answered = tokio::time::timeout(until.left(), asked) => match answered {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(refused)) => refused,
                Err(_) => return Err(timeout),
            },
        };
        Err(self.not_success(&refused))
    }

    async fn ended(&mut self, until: Until) -> Result<(), EngineError> {
        let Some(call) = self.call.as_mut() else { return Ok(()) };
        let ended = tokio::time::timeout(until.left(), call).await;
        match ended {
            Ok(Ok(outcome)) => {
                self.call = None;
                outcome
            }
            Ok(Err(ended)) => {
                self.call = None;
                Err(self.not_success(&format!("its call ended: {ended}")))
            }
            Err(_) => Err(EngineError::Timeout { url: self.url.clone(), deadline: until.total() }),
        }
    }

    fn not_success(&self, what: &str) -> EngineError {
        EngineError::NotSuccess { url: self.url.clone(), body: what.to_owned() }
    }
}

impl Drop for ParameterServer {
    fn drop(&mut self) {
        if let Some(call) = &self.call {
            call.abort();
        }
    }
}

impl Channel {
    /// One request and its reply; waits for a worker that has not connected yet. The error is the worker's text.
    async fn ask(&mut self, message: &Value) -> Result<(), String> {
        let message = Bytes::from(message.pickle());
        while let Err(error) = self.socket.send(message.clone().into()).await {
            match error {
                ZmqError::ReturnToSender { .. } => tokio::time::sleep(CONNECTING).await,
                error => return Err(format!("the worker on {} cannot be asked: {error}", self.gpu)),
            }
        }
        let answer = self.socket.recv().await.map_err(|error| format!("the worker on {} was lost: {error}", self.gpu))?;
        let text: Vec<u8> = answer.into_vec().into_iter().flatten().collect();
        if text.is_empty() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&text);
        let shown: String =
            text.chars().skip(text.chars().count().saturating_sub(SHOWN)).map(|c| if c.is_control() { ' ' } else { c }).collect();
        Err(format!("the worker on {}: {shown}", self.gpu))
    }
}
