//! The workers of one server on the socket of their agent: messages to them, and the progress of each.
//!
//! Lines of JSON in both directions. Host memory is passed with the first one, so it needs no path that both can see. Decides what counts
//! as a worker's failure; its consequences are decided elsewhere. The other end is `python/weightsync/_feed.py`.

pub(crate) mod hello;
pub(crate) mod listening;
pub(crate) mod progress;

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use self::hello::{Hello, Parts, Rules};
use self::progress::{Progress, Rank, Step, reached};
use crate::EngineError;
use crate::host::{HostBucket, HostMemory};
use crate::http::Until;
use weightsync_core::weights::Section;

/// Version of the lines on the socket, and of what workers are given to find it.
pub(crate) const PROTOCOL: u32 = 1;
/// Longest line of a worker, in bytes.
const LONGEST_LINE: u64 = 64 << 10;
/// Most lines in a worker's queue.
const WAITING: usize = 64;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Said {
    Hello(Hello),
    /// The digests of this bucket agree.
    Verified(u32),
    /// This bucket's place is no longer needed.
    Taken(u32),
    Did(Step),
    Failed(String),
}

/// The first line to every worker.
pub(crate) struct Opening<'a> {
    pub(crate) line: String,
    /// Passed with it.
    pub(crate) memory: Option<&'a HostMemory>,
}

/// All workers of a server. Dropping it closes their sockets, which they see at once.
pub(crate) struct Workers {
    url: String,
    lines: Vec<mpsc::Sender<String>>,
    gpus: Vec<String>,
    progress: watch::Receiver<Progress>,
    left_open: bool,
    tasks: JoinSet<()>,
}

impl Workers {
    /// Sends the first line to all connected workers, with the memory if there is any.
    pub(crate) async fn open(
        url: String,
        there: BTreeMap<u32, (Hello, Parts)>,
        opening: Opening<'_>,
        rules: &Rules,
        until: Until,
    ) -> Result<Self, EngineError> {
        let (known, progress) =
            watch::channel(Progress { ranks: there.keys().map(|rank| (*rank, Rank::default())).collect(), failure: None });
        let left_open = there.values().any(|(hello, _)| hello.open);
        let (mut tasks, mut lines, mut gpus) = (JoinSet::new(), Vec::new(), Vec::new());
        for (rank, (hello, Parts { reader, mut writer })) in there {
            let opened = tokio::time::timeout(until.left(), opening.say(&mut writer)).await;
            opened.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(|cause| EngineError::BadReply {
                url: url.clone(),
                what: format!("rank {rank} did not take the first line: {cause}"),
            })?;
            let (to_writer, inbox) = mpsc::channel(WAITING);
            lines.push(to_writer);
            gpus.push(hello.gpu.unwrap_or_default());
            tasks.spawn(write(writer, inbox, rules.silence / 3));
            tasks.spawn(read(reader, rank, if rules.draft { 2 } else { 1 }, known.clone()));
        }
        Ok(Self { url, lines, gpus, progress, left_open, tasks })
    }

    pub(crate) fn line(bucket: &HostBucket) -> String {
        let tensor = |tensor: &crate::HostTensor| {
            json!([tensor.spec.name, tensor.spec.dtype.name(), tensor.spec.shape, tensor.offset, tensor.bytes, tensor.digest])
        };
        let tensors: Vec<_> = bucket.tensors.iter().map(tensor).collect();
        let (copy, draft) = (bucket.copy, bucket.section() == Section::Draft);
        let line = json!({"event": "bucket", "sequence": bucket.sequence, "copy": copy, "draft": draft, "tensors": tensors});
        format!("{line}\n")
    }

    /// Sends a line to every worker; waits while one has not taken earlier ones. The caller must add a deadline.
    pub(crate) fn tell(&self, line: String) -> impl Future<Output = Result<(), EngineError>> + Send + use<> {
        let lines = self.lines.clone();
        async move {
            for worker in lines {
                // The reader reports a lost worker.
                let _gone = worker.send(line.clone()).await;
            }
            Ok(())
        }
    }

    /// The same with a separate line for each worker, in the order of ranks.
    pub(crate) fn tell_each(&self, each: Vec<String>) -> impl Future<Output = Result<(), EngineError>> + Send + use<> {
        let lines = self.lines.clone();
        async move {
            for (worker, line) in lines.into_iter().zip(each) {
                let _gone = worker.send(line).await;
            }
            Ok(())
        }
    }

    /// UUIDs of their GPUs, in the order of ranks; empty texts for workers without one.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = &str> {
        self.gpus.iter().map(String::as_str)
    }

    /// Waits until every worker has checked so many buckets. The caller must add a deadline.
    pub(crate) fn verified(&self, buckets: u32) -> impl Future<Output = Result<(), EngineError>> + Send + use<> {
        let progress = self.progress.clone();
        async move {
            reached(progress, move |progress| progress.verified() >= buckets).await;
            Ok(())
        }
    }

    /// Waits until every worker took more than so many buckets. Returns the number. The caller must add a deadline.
    pub(crate) fn taken(&self, more_than: u32) -> impl Future<Output = Result<u32, EngineError>> + Send + use<> {
        let progress = self.progress.clone();
        async move {
            reached(progress.clone(), move |progress| progress.taken() > more_than).await;
            let taken = progress.borrow().taken();
            Ok(taken)
        }
    }

    /// Whether one of them is in a session that another client left open.
    pub(crate) fn left_open(&self) -> bool {
        self.left_open
    }

    /// Waits until every worker took that step of a session, counted from 1 (0: one that another client left open). The caller must add a
    /// deadline.
    pub(crate) fn did(&self, session: u32, step: Step) -> impl Future<Output = Result<(), EngineError>> + Send + use<> {
        let progress = self.progress.clone();
        async move {
            reached(progress, move |progress| progress.did(session, step)).await;
            Ok(())
        }
    }

    pub(crate) fn taken_by_all(&self) -> u32 {
        self.progress.borrow().taken()
    }

    /// Runs until it is done, or a worker reports a failure.
    pub(crate) async fn watching<T>(&self, until: Until, done: impl Future<Output = Result<T, EngineError>>) -> Result<T, EngineError> {
        tokio::select! {
            biased;
            done = done => done,
            why = self.failed() => Err(why),
            () = tokio::time::sleep(until.left()) => Err(EngineError::Timeout { url: self.url.clone(), deadline: until.total() }),
        }
    }

    /// Notifies every worker that no bucket follows the `reported` ones.
    pub(crate) async fn no_more(&self, reported: u32, until: Until) -> Result<(), EngineError> {
        let line = format!("{}\n", json!({"event": "end", "buckets": reported}));
        self.watching(until, self.tell(line)).await
    }

    /// Waits until a worker reports a failure, or is lost. Pending where all of them have closed after their last step.
    pub(crate) fn failed(&self) -> impl Future<Output = EngineError> + Send + use<> {
        let (mut progress, url) = (self.progress.clone(), self.url.clone());
        async move {
            let failed = progress.wait_for(|progress| progress.failure.is_some()).await;
            match failed.ok().and_then(|progress| progress.failure.clone()) {
                Some(body) => EngineError::NotSuccess { url, body },
                None => std::future::pending().await,
            }
        }
    }

    /// Converts a failure of theirs into our error.
    pub(crate) fn error(&self, body: String) -> EngineError {
        EngineError::NotSuccess { url: self.url.clone(), body }
    }

    pub(crate) fn close(&mut self) {
        self.lines.clear();
        self.tasks.abort_all();
    }
}

pub(crate) async fn next(reader: &mut BufReader<OwnedReadHalf>) -> Result<Said, String> {
    let mut line = Vec::new();
    let read = reader.take(LONGEST_LINE).read_until(b'\n', &mut line).await;
    match read {
        Ok(0) => Err("it closed its connection".into()),
        Ok(_) => serde_json::from_slice(&line).map_err(|error| format!("it sent an invalid message: {error}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Records a worker's messages until it is gone. A worker that closes after its last step has not failed.
async fn read(mut reader: BufReader<OwnedReadHalf>, rank: u32, sessions: u32, progress: watch::Sender<Progress>) {
    loop {
        let said = next(&mut reader).await;
        let over = said.is_err();
        progress.send_modify(|progress| {
            let finished = progress.ranks.get(&rank).is_some_and(|rank| rank.sessions == sessions && rank.did == Some(Step::Finished));
            if over && finished {
                return;
            }
            let failed = match said {
                Ok(Said::Verified(bucket)) => {
                    progress.ranks.entry(rank).or_default().verified = bucket.saturating_add(1);
                    return;
                }
                Ok(Said::Taken(bucket)) => {
                    progress.ranks.entry(rank).or_default().taken = bucket.saturating_add(1);
                    return;
                }
                Ok(Said::Did(step)) => {
                    let rank = progress.ranks.entry(rank).or_default();
                    rank.sessions += u32::from(step == Step::Started);
                    rank.did = Some(step);
                    return;
                }
                Ok(Said::Failed(why)) | Err(why) => why,
                Ok(Said::Hello(_)) => "it sent hello twice".into(),
            };
            progress.failure.get_or_insert(format!("worker of rank {rank}: {failed}"));
        });
        if over {
            return;
        }
    }
}

/// Writes lines as they come, and signs of life between them.
async fn write(mut writer: OwnedWriteHalf, mut lines: mpsc::Receiver<String>, quiet: Duration) {
    loop {
        let line = match tokio::time::timeout(quiet, lines.recv()).await {
            Ok(Some(line)) => line,
            Ok(None) => return,
            Err(_) => "{\"event\":\"alive\"}\n".to_owned(),
        };
        // Callers that wait for the worker's answer have a deadline; this write ends with the task.
        if writer.write_all(line.as_bytes()).await.is_err() {
            return;
        }
    }
}

impl Opening<'_> {
    async fn say(&self, writer: &mut OwnedWriteHalf) -> io::Result<()> {
        let line = self.line.as_bytes();
        let Some(memory) = self.memory else { return writer.write_all(line).await };
        let send = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut alongside = SendAncillaryBuffer::new(&mut space);
            let descriptor = [memory.file.as_fd()];
            if !alongside.push(SendAncillaryMessage::ScmRights(&descriptor)) {
                return Err(io::Error::other("no room for one descriptor"));
            }
            Ok(rustix::net::sendmsg(writer.as_ref(), &[IoSlice::new(line)], &mut alongside, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
        };
        let sent = writer.as_ref().async_io(Interest::WRITABLE, send).await?;
        writer.write_all(line.get(sent..).unwrap_or_default()).await
    }
}
