//! The asynchronous IPC message of FastDeploy #7472: buckets in our own GPU memory, named one by one over ZeroMQ and cloned by each worker.
//!
//! This side binds one socket for each rank. The workers connect when the legacy route `/update_model_weight` makes them load, which works
//! only after `/clear_load_weight`: from there on, the server has no weights until the last bucket came. Each rank gets the handle of the
//! memory on its own GPU. The reply to a message is empty when the bucket was cloned and the device is idle; otherwise it is the text of an
//! error. An empty message (`None`) ends the load. This never trusts the server's last check of its parameters, which the posted change
//! comments out. A version is compared with the server's checkpoint before anything changes, and one that cannot be compared is refused.

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
use crate::feed::{Feed, FeedJob, pieces};
use crate::fit;
use crate::http::{EngineHttp, Until};
use weightsync_core::weights::{Layout, TensorSpec};
use weightsync_torch::Piece;
use weightsync_torch::paddle::{self, SharedBuffer};
use weightsync_torch::pickle::Value;

/// Interval at which it checks whether the worker has connected.
const CONNECTING: Duration = Duration::from_millis(2);
/// Longest wait for the server's error text after it refused.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Part of a worker's error that ours shows, in characters.
const SHOWN: usize = 512;

/// Placeholder for the number of a rank in an address.
pub(super) const RANK: &str = "{rank}";

/// Where the workers of a server connect, by its command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Workers {
    /// The address for all ranks; contains [`RANK`] if there are several.
    pub(super) address: String,
    /// The first rank's own number of its GPU; each further rank's is one more.
    pub(super) device: u64,
    pub(super) ranks: usize,
}

impl Workers {
    fn refuse(&self, gpus: usize) -> Result<(), EngineError> {
        if gpus != self.ranks {
            let what = format!("the agent has {gpus} GPUs and the server {} ranks, each of which opens memory on its own GPU", self.ranks);
            return Err(unsupported(what, "give the agent the engine's GPUs and no other, in the engine's order"));
        }
        if self.ranks > 1 && !self.address.contains(RANK) {
            let what = format!("{} ranks cannot all connect to {}", self.ranks, self.address);
            return Err(unsupported(what, "write {rank} into the server's ipc_address"));
        }
        Ok(())
    }
}

/// One worker: the GPU of its handle, its own number for that GPU, and its address.
struct Rank {
    gpu: String,
    device: u64,
    socket: ReqSocket,
}

impl Rank {
    async fn bind(address: &str, gpu: &str, device: u64, until: Until) -> Result<Self, EngineError> {
        let cannot = |cause: String| {
            unsupported(format!("no socket can be made at {address}: {cause}"), "give the server an ipc_address that the agent may bind")
        };
        // Left by an earlier incarnation of the agent.
        if let Some(path) = address.strip_prefix("ipc://")
            && Path::new(path).is_absolute()
        {
            let _absent = std::fs::remove_file(path);
        }
        let mut socket = ReqSocket::new();
        let bound = tokio::time::timeout(until.left(), socket.bind(address)).await;
        bound.map_err(|_| cannot("it took too long".into()))?.map_err(|error| cannot(error.to_string()))?;
        Ok(Self { gpu: gpu.to_owned(), device, socket })
    }

    /// Frees the address before it is bound again. A dropped socket removes its file a moment later (zeromq 0.7). That would be the next
    /// update's file: no worker could find it, and the update would end without a message.
    async fn unbind(&mut self, within: Duration) {
        let _errors = tokio::time::timeout(within, self.socket.unbind_all()).await;
    }

    /// Ends the worker's wait with the reason.
    async fn give_up(&mut self, last: &Bytes, within: Duration) {
        // A worker in the middle of a bucket must reply before it can receive anything.
        let _answer = tokio::time::timeout(within / 2, self.socket.recv()).await;
        let _sent = tokio::time::timeout(within / 2, self.socket.send(last.clone().into())).await;
    }
}

pub(super) struct AsyncIpc {
    http: Arc<EngineHttp>,
    layout: Arc<Layout>,
    ranks: Vec<Rank>,
    /// The server's own call, once it was made.
    call: Option<JoinHandle<Result<(), EngineError>>>,
    touched: bool,
    whole: Until,
}

impl AsyncIpc {
    /// Binds, and sends nothing to the server yet. `served` is the server's checkpoint as this process sees it.
    pub(super) async fn open(
        http: Arc<EngineHttp>,
        feed: &FeedJob<'_>,
        workers: &Workers,
        served: &Path,
        until: Until,
    ) -> Result<Self, EngineError> {
        workers.refuse(feed.gpus.len())?;
        let layout = feed.job.layout.clone();
        // The version was compared when its install was opened.
        if let Err(why) = fit::readable(served) {
            let what = format!("FastDeploy does not look whether all its parameters came, and the version cannot be compared here: {why}");
            return Err(unsupported(what, "give the agent the server's model directory with its safetensors files (--model-dir)"));
        }
        let mut ranks = Vec::new();
        for ((rank, gpu), device) in feed.gpus.iter().enumerate().zip(workers.device..) {
            let address = workers.address.replace(RANK, &rank.to_string());
            ranks.push(Rank::bind(&address, gpu, device, until).await?);
        }
        let whole = Until::new(feed.job.terms.timeout);
        Ok(Self { http, layout, ranks, call: None, touched: false, whole })
    }

    /// Removes the weights and makes the workers wait for new ones.
    async fn begin(&mut self, until: Until) -> Result<(), EngineError> {
        self.touched = true;
        self.http.get("/clear_load_weight", until).await?.ok()?;
        let (http, whole) = (self.http.clone(), self.whole);
        self.call = Some(tokio::spawn(async move { http.get("/update_model_weight", whole).await?.ok() }));
        Ok(())
    }

    async fn unbind(&mut self, within: Duration) {
        futures::future::join_all(self.ranks.iter_mut().map(|rank| rank.unbind(within))).await;
    }

    /// Sends one message to each rank and waits for its reply, unless the server's call ends first. All ranks copy at the same time.
    async fn exchange(&mut self, messages: Vec<Bytes>, then: Then, until: Until) -> Result<(), EngineError> {
        let url = self.http.url().to_owned();
        let Some(call) = self.call.as_mut() else {
            return Err(EngineError::BadReply { url, what: "its worker was not called".into() });
        };
        let all = self.ranks.iter_mut().zip(messages).map(|(rank, message)| ask(&mut rank.socket, message));
        let asked = tokio::time::timeout(until.left(), futures::future::try_join_all(all));
        let refused = tokio::select! {
            biased;
            answered = asked => match answered {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(refused)) => refused,
                Err(_) => return Err(EngineError::Timeout { url, deadline: until.total() }),
            },
            ended = call => {
                self.call = None;
                match ended {
                    Ok(Err(error)) => return Err(error),
                    Ok(Ok(())) if then == Then::End => return Ok(()),
                    Ok(Ok(())) => "it reported that it was done before all buckets were sent".to_owned(),
                    Err(ended) => format!("its call ended: {ended}"),
                }
            }
        };
        Err(EngineError::NotSuccess { url, body: refused })
    }
}

async fn ask(socket: &mut ReqSocket, message: Bytes) -> Result<(), String> {
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
        let mut all = pieces(&self.layout, bucket);
        // No bucket contains tensors without bytes, but the worker's last check requires every parameter.
        let first = self.call.is_none();
        let empty: Vec<TensorSpec> = self.layout.tensors().filter(|tensor| first && tensor.shape.contains(&0)).cloned().collect();
        all.extend(empty.iter().map(|tensor| Piece { name: &tensor.name, dtype: tensor.dtype, shape: &tensor.shape, offset: 0, bytes: 0 }));
        let message = |rank: &Rank| {
            let place = bucket.on(&rank.gpu)?;
            let buffer = SharedBuffer { handle: place.handle.0, offset: place.offset, bytes: bucket.bucket.bytes, device: rank.device };
            paddle::bucket(&all, &buffer).map(|message| Bytes::from(message.pickle())).map_err(|error| EngineError::no_form(&error))
        };
        let messages = self.ranks.iter().map(message).collect::<Result<Vec<_>, _>>()?;
        if self.call.is_none() {
            self.begin(until).await?;
        }
        self.exchange(messages, Then::More, until).await?;
        Ok(Released::Now)
    }

    fn touched(&self) -> bool {
        self.touched
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        if self.call.is_some() {
            let end = vec![Bytes::from(Value::None.pickle()); self.ranks.len()];
            self.exchange(end, Then::End, until).await?;
        }
        if let Some(call) = self.call.as_mut() {
            let url = self.http.url().to_owned();
            let ended = tokio::time::timeout(until.left(), call).await;
            let outcome = ended.map_err(|_| EngineError::Timeout { url: url.clone(), deadline: until.total() })?;
            self.call = None;
            outcome.unwrap_or_else(|ended| Err(EngineError::NotSuccess { url, body: format!("its call ended: {ended}") }))?;
        }
        self.unbind(until.left()).await;
        // With FD_ENABLE_V1_UPDATE_WEIGHTS the route resumes the engine by itself.
        super::success(self.http.url(), self.http.post("/v1/pause", None, until).await?).map(drop)
    }

    async fn fail(&mut self, reason: &str, until: Until) {
        let within = LAST_WORDS.min(until.left() / 4);
        let Some(mut call) = self.call.take() else { return self.unbind(within).await };
        let reason: String = reason.chars().take(SHOWN).collect();
        let last = Bytes::from(paddle::failure(&reason).pickle());
        futures::future::join_all(self.ranks.iter_mut().map(|rank| rank.give_up(&last, within))).await;
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
