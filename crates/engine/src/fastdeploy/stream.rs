//! A step that comes from the agent's memory: the workers of a FastDeploy server connect to their agent, map what it shares, check every
//! tensor's digest over the shared bytes, and give their loaders one tensor after the other. No file is written.
//!
//! Decides the step's name, which says where to connect (`python/weightsync/fastdeploy/checkpoint_transfer/stream.py` reads it), and whether
//! every rank took the whole version. Workers connect only inside `POST /v1/update_weights`, so the server is paused by then, and buckets
//! wait for them here. The engine waits 60 s for its workers: a version must be whole in memory before, so a ring that is smaller is refused.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::steps::Wanted;
use super::{success, unsupported};
use crate::EngineError;
use crate::host::{HostBucket, HostDigest, HostJob, HostMemory};
use crate::host_feed::HostFeed;
use crate::http::{EngineHttp, Until};
use crate::workers::hello::Rules;
use crate::workers::listening::Listening;
use crate::workers::{PROTOCOL, Workers};

/// Prefix of the names of such steps.
const PREFIX: &str = "weightsync-memory";
/// Longest wait for the end of a call that failed.
const LAST_WORDS: Duration = Duration::from_secs(5);
const OTHERWISE: &str = "look at the log of the server, or start it without \"updates\": \"memory\" in its --rsync_config";

type Updating = JoinHandle<Result<Value, EngineError>>;

/// The workers, before and after they are connected.
enum Ranks {
    Awaited(Listening),
    There(Workers),
    Gone,
}

pub(super) struct Stream {
    http: Arc<EngineHttp>,
    /// Its name in the server. Who knows it can be one of so many workers as the server has ranks, once.
    step: String,
    ranks: usize,
    /// Tensors of the version; none where the server does not count them.
    tensors: Option<usize>,
    memory: Arc<HostMemory>,
    rules: Rules,
    workers: Ranks,
    /// Descriptions of buckets, until the workers are there.
    lines: Vec<String>,
    reported: u32,
    ended: bool,
    updating: Option<Updating>,
}

impl Stream {
    /// Opens the socket for the workers; the server is not asked for anything yet.
    pub(super) fn open(http: Arc<EngineHttp>, job: &HostJob, ranks: usize, counts: bool) -> Result<Self, EngineError> {
        if job.memory.bytes < job.layout.total_bytes {
            return Err(unsupported(
                format!("FastDeploy waits 60 s for its workers, and {} bytes of memory do not hold the version", job.memory.bytes),
                "give the agent memory for a whole version, or start FastDeploy with a folder of steps",
            ));
        }
        let listening = Listening::new(http.url(), u32::try_from(ranks).unwrap_or(u32::MAX))?;
        let token = uuid::Uuid::new_v4().simple().to_string();
        let step = format!("{PREFIX}:{PROTOCOL}:{}:{token}", listening.name());
        Ok(Self {
            http,
            step,
            ranks,
            tensors: counts.then(|| job.layout.tensors().count()),
            memory: job.memory.clone(),
            rules: Rules { token, draft: false, otherwise: OTHERWISE, silence: job.silence },
            workers: Ranks::Awaited(listening),
            lines: Vec::new(),
            reported: 0,
            ended: false,
            updating: None,
        })
    }

    fn workers(&self) -> Result<&Workers, EngineError> {
        match &self.workers {
            Ranks::There(workers) => Ok(workers),
            Ranks::Awaited(_) | Ranks::Gone => {
                Err(EngineError::BadReply { url: self.http.url().to_owned(), what: "its workers are not connected".into() })
            }
        }
    }

    async fn say(&self, line: String, until: Until) -> Result<(), EngineError> {
        let workers = self.workers()?;
        workers.watching(until, workers.tell(line)).await
    }

    /// Waits until every worker checked all buckets and every rank answered with the whole step.
    async fn whole(&mut self, until: Until) -> Result<(), EngineError> {
        for each in 1..=self.reported {
            let workers = self.workers()?;
            workers.watching(until.at_most(self.rules.silence), workers.verified(each)).await?;
        }
        let Some(mut updating) = self.updating.take() else { return Err(EngineError::Cancelled) };
        let answered = async { (&mut updating).await.unwrap_or(Err(EngineError::Cancelled)) };
        let answered = self.workers()?.watching(until, answered).await;
        if !updating.is_finished() {
            self.updating = Some(updating);
        }
        let wanted = Wanted { name: Some(&self.step), tensors: self.tensors, ranks: self.ranks };
        wanted.was_taken(&answered?).map_err(|body| EngineError::NotSuccess { url: self.http.url().to_owned(), body })?;
        // The answer and the words of the workers come by different connections.
        let Some(all_but_one) = self.reported.checked_sub(1) else { return Ok(()) };
        let workers = self.workers()?;
        workers.watching(until.at_most(self.rules.silence), workers.taken(all_but_one)).await.map(drop)
    }

    /// The server's own word on a failure that a worker reported first, where it comes soon: it names the cause in the loader too.
    async fn explained(&mut self, error: EngineError, until: Until) -> EngineError {
        let Some(updating) = self.updating.take() else { return error };
        match tokio::time::timeout(until.at_most(LAST_WORDS).left(), updating).await {
            Ok(Ok(Err(said))) => said,
            _ => error,
        }
    }
}

#[async_trait]
impl HostFeed for Stream {
    /// Of the package xxhash: `checkpoint_transfer` wants it when the server starts.
    fn digest(&self) -> HostDigest {
        HostDigest::Xxh3_128
    }

    async fn bucket(&mut self, bucket: &HostBucket, until: Until) -> Result<(), EngineError> {
        self.reported = bucket.sequence.saturating_add(1);
        let line = Workers::line(bucket);
        if matches!(self.workers, Ranks::Awaited(_)) {
            self.lines.push(line);
            return Ok(());
        }
        self.say(line, until).await
    }

    async fn load(&mut self, until: Until) -> Result<(), EngineError> {
        let Ranks::Awaited(listening) = std::mem::replace(&mut self.workers, Ranks::Gone) else { return Ok(()) };
        let (http, body) = (self.http.clone(), json!({"version": self.step}));
        let updating = self.updating.insert(tokio::spawn(async move {
            let reply = http.post("/v1/update_weights", Some(&body), until).await?;
            Ok(success(http.url(), reply)?.value().clone())
        }));
        let connected = listening.with_memory(&self.rules, &self.memory, until.at_most(self.rules.silence));
        let (workers, digest) = tokio::select! {
            biased;
            connected = connected => connected?,
            ended = updating => {
                self.updating = None;
                let early = || EngineError::NotSuccess { url: self.http.url().to_owned(), body: "it ended before its workers connected".into() };
                return Err(ended.unwrap_or(Err(EngineError::Cancelled)).err().unwrap_or_else(early));
            }
        };
        self.workers = Ranks::There(workers);
        if digest != self.digest() {
            return Err(unsupported(
                "the server's workers cannot compute xxh3-128".into(),
                "install the package xxhash in its environment",
            ));
        }
        for line in std::mem::take(&mut self.lines) {
            self.say(line, until).await?;
        }
        if self.ended { self.workers()?.no_more(self.reported, until).await } else { Ok(()) }
    }

    async fn taken(&mut self, more_than: u32, until: Until) -> Result<u32, EngineError> {
        let workers = self.workers()?;
        workers.watching(until, workers.taken(more_than)).await
    }

    /// Before the workers are there, nothing can be checked: [`close`](Self::close) waits for it.
    async fn end(&mut self, silence: Duration, until: Until) -> Result<(), EngineError> {
        self.ended = true;
        match &self.workers {
            Ranks::There(workers) => workers.no_more(self.reported, until.at_most(silence)).await,
            Ranks::Awaited(_) | Ranks::Gone => Ok(()),
        }
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        match self.whole(until).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.explained(error, until).await),
        }
    }

    async fn fail(&mut self, _: &str, until: Until) {
        // Workers see it at once, and the call ends.
        self.workers = Ranks::Gone;
        if let Some(updating) = self.updating.take() {
            let _ended = tokio::time::timeout(until.at_most(LAST_WORDS).left(), updating).await;
        }
    }
}
