//! The asynchronous IPC message of FastDeploy #7472: buckets in our own GPU memory, named one by one over ZeroMQ and cloned by the worker.
//!
//! We bind, the worker connects when the legacy route `/update_model_weight` has it load, which it does only after `/clear_load_weight`: from
//! there on the server has no weights until the last bucket came. Each message is answered: empty text when the bucket was cloned and the
//! device is idle, else the text of an error. An empty message (`None`) ends it, and the worker then looks whether *every* parameter is
//! initialised (the check that the thread found commented out). The device is in the message, never left to an environment variable.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::task::JoinHandle;
use zeromq::{ReqSocket, Socket, SocketRecv, SocketSend, ZmqError};

use super::unsupported;
use crate::EngineError;
use crate::checkpoint_engine::Then;
use crate::device::{DeviceBucket, Released};
use crate::feed::{Feed, FeedJob, no_form, pieces};
use crate::http::{EngineHttp, Until};
use weightsync_core::weights::{Layout, TensorSpec};
use weightsync_torch::Piece;
use weightsync_torch::paddle::{self, SharedBuffer};
use weightsync_torch::pickle::Value;

/// Between two looks whether the worker has connected.
const CONNECTING: Duration = Duration::from_millis(2);
/// Longest wait for the server's own words after it said no.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Part of a worker's error that ours shows, in characters.
const SHOWN: usize = 512;

pub(super) struct AsyncIpc {
    http: Arc<EngineHttp>,
    layout: Arc<Layout>,
    /// The only GPU of the server.
    gpu: String,
    device: u64,
    socket: ReqSocket,
    /// The server's own call, once it was made.
    call: Option<JoinHandle<Result<(), EngineError>>>,
    touched: bool,
    whole: Until,
}

impl AsyncIpc {
    /// Binds; asks nothing of the server yet.
    pub(super) async fn open(
        http: Arc<EngineHttp>,
        feed: &FeedJob<'_>,
        address: &str,
        device: u64,
        until: Until,
    ) -> Result<Self, EngineError> {
        let cannot = |cause: String| {
            unsupported(format!("no socket can be made at {address}: {cause}"), "give the server an ipc_address that the agent may bind")
        };
        let [gpu] = feed.gpus.as_slice() else {
            let what = format!("the agent has {} GPUs, and one rank of FastDeploy is fed so", feed.gpus.len());
            return Err(unsupported(what, "give the agent the engine's GPU and no other"));
        };
        // What an earlier life of the agent left behind.
        if let Some(path) = address.strip_prefix("ipc://")
            && Path::new(path).is_absolute()
        {
            let _absent = std::fs::remove_file(path);
        }
        let mut socket = ReqSocket::new();
        let bound = tokio::time::timeout(until.left(), socket.bind(address)).await;
        bound.map_err(|_| cannot("it took too long".into()))?.map_err(|error| cannot(error.to_string()))?;
        let whole = Until::new(feed.job.terms.timeout);
        Ok(Self { http, layout: feed.job.layout.clone(), gpu: gpu.clone(), device, socket, call: None, touched: false, whole })
    }

    /// Takes the weights out and has the worker wait for new ones.
    async fn begin(&mut self, until: Until) -> Result<(), EngineError> {
        self.touched = true;
        self.http.get("/clear_load_weight", until).await?.ok()?;
        let (http, whole) = (self.http.clone(), self.whole);
        self.call = Some(tokio::spawn(async move { http.get("/update_model_weight", whole).await?.ok() }));
        Ok(())
    }

    /// Gives the address up before anybody binds it again. A dropped socket removes its file a moment later (zeromq 0.7), and that would be
    /// the next update's: no worker could find it, and the update would end in silence.
    async fn unbind(&mut self, within: Duration) {
        let _errors = tokio::time::timeout(within, self.socket.unbind_all()).await;
    }

    /// One message and its answer, unless the server's call ends first.
    async fn exchange(&mut self, message: &Value, then: Then, until: Until) -> Result<(), EngineError> {
        let url = self.http.url().to_owned();
        let Some(call) = self.call.as_mut() else {
            return Err(EngineError::BadReply { url, what: "its worker was not called".into() });
        };
        let asked = tokio::time::timeout(until.left(), ask(&mut self.socket, message));
        let refused = tokio::select! {
            biased;
            answered = asked => match answered {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(refused)) => refused,
                Err(_) => return Err(EngineError::Timeout { url, deadline: until.total() }),
            },
            ended = call => {
                self.call = None;
                match ended {
                    Ok(Err(error)) => return Err(error),
                    Ok(Ok(())) if then == Then::End => return Ok(()),
                    Ok(Ok(())) => "it said that it was done while buckets were still to come".to_owned(),
                    Err(ended) => format!("its call ended: {ended}"),
                }
            }
        };
        Err(EngineError::NotSuccess { url, body: refused })
    }
}

async fn ask(socket: &mut ReqSocket, message: &Value) -> Result<(), String> {
    let message = Bytes::from(message.pickle());
    while let Err(error) = socket.send(message.clone().into()).await {
        match error {
            ZmqError::ReturnToSender { .. } => tokio::time::sleep(CONNECTING).await,
            error => return Err(format!("the worker cannot be asked: {error}")),
        }
    }
    let answer = socket.recv().await.map_err(|error| format!("the worker was lost: {error}"))?;
    let text: Vec<u8> = answer.into_vec().into_iter().flatten().collect();
    let shown: String = String::from_utf8_lossy(&text).chars().map(|c| if c.is_control() { ' ' } else { c }).take(SHOWN).collect();
    if text.is_empty() { Ok(()) } else { Err(shown) }
}

#[async_trait]
impl Feed for AsyncIpc {
    async fn bucket(&mut self, bucket: &DeviceBucket, until: Until) -> Result<Released, EngineError> {
        let place = bucket.on(&self.gpu)?;
        let buffer = SharedBuffer { handle: place.handle.0, offset: place.offset, bytes: bucket.bucket.bytes, device: self.device };
        let mut all = pieces(&self.layout, bucket);
        // No bucket holds those without bytes, and the worker's last look wants every parameter.
        let first = self.call.is_none();
        let empty: Vec<TensorSpec> = self.layout.tensors().filter(|tensor| first && tensor.shape.contains(&0)).cloned().collect();
        all.extend(empty.iter().map(|tensor| Piece { name: &tensor.name, dtype: tensor.dtype, shape: &tensor.shape, offset: 0, bytes: 0 }));
        let message = paddle::bucket(&all, &buffer).map_err(|error| no_form(&error))?;
        if self.call.is_none() {
            self.begin(until).await?;
        }
        self.exchange(&message, Then::More, until).await?;
        Ok(Released::Now)
    }

    fn touched(&self) -> bool {
        self.touched
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        if self.call.is_some() {
            self.exchange(&Value::None, Then::End, until).await?;
        }
        if let Some(call) = self.call.as_mut() {
            let url = self.http.url().to_owned();
            let ended = tokio::time::timeout(until.left(), call).await;
            let outcome = ended.map_err(|_| EngineError::Timeout { url: url.clone(), deadline: until.total() })?;
            self.call = None;
            outcome.unwrap_or_else(|ended| Err(EngineError::NotSuccess { url, body: format!("its call ended: {ended}") }))?;
        }
        self.unbind(until.left()).await;
        // With FD_ENABLE_V1_UPDATE_WEIGHTS the route lets the engine run by itself.
        super::success(self.http.url(), self.http.post("/v1/pause", None, until).await?)
    }

    async fn fail(&mut self, reason: &str, until: Until) {
        let within = LAST_WORDS.min(until.left() / 4);
        let Some(mut call) = self.call.take() else { return self.unbind(within).await };
        let reason: String = reason.chars().take(SHOWN).collect();
        let told = async {
            // A worker in the middle of a bucket must answer before it can be told anything.
            let _answer = tokio::time::timeout(within / 2, self.socket.recv()).await;
            let _sent = self.socket.send(Bytes::from(paddle::failure(&reason).pickle()).into()).await;
        };
        let _late = tokio::time::timeout(within, told).await;
        let _ended = tokio::time::timeout(within, &mut call).await;
        call.abort();
        self.unbind(within).await;
    }
}

impl Drop for AsyncIpc {
    fn drop(&mut self) {
        if let Some(call) = &self.call {
            call.abort();
        }
    }
}
