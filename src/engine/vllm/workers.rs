//! The workers of one server on the socket of their agent: who they are, what they are told, and how far each is.
//!
//! Lines of JSON both ways; the shared memory is passed beside the first one, so it needs no path that both can see. The socket's name is
//! abstract and lives for one install; whoever connects must show the token, which only the server was told. Decides whether all ranks are
//! there and what they have in common; never what a failure means.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::progress::{Progress, Rank, Step, reached};
use crate::engine::EngineError;
use crate::engine::host::{HostBucket, HostDigest, HostMemory};
use crate::engine::http::Until;
use crate::weights::Section;

/// Not the prefix of agents' own sockets: trainers look for those.
const PREFIX: &str = "weightsync-feed/";
/// Longest line of a worker, in bytes.
const LONGEST_LINE: u64 = 64 << 10;
/// Longest time between connecting and saying hello.
const SAY_HELLO: Duration = Duration::from_secs(5);
/// Lines that may wait for a worker.
const WAITING: usize = 64;

/// What is agreed before the first bucket.
pub(super) struct Rules {
    pub(super) token: String,
    /// Whether a draft model comes behind the model.
    pub(super) draft: bool,
    /// Longest time between two lines to a worker; half of it without a bucket makes us say that we live.
    pub(super) silence: Duration,
}

/// What a worker says first.
#[derive(Debug, Deserialize)]
struct Hello {
    token: String,
    rank: u32,
    ranks: u32,
    device: String,
    digests: Vec<String>,
    /// Whether a session is open, which an earlier life of an agent left.
    open: bool,
    /// Whether it can be told of buckets for a draft model.
    #[serde(default)]
    draft: bool,
}

/// What a worker says.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Said {
    Hello(Hello),
    /// This bucket's digests agree.
    Verified(u32),
    /// This bucket is not needed where it lies any more.
    Taken(u32),
    /// It took this step of the session.
    Did(Step),
    /// It cannot go on.
    Failed(String),
}

/// A socket that workers are told to connect to.
pub(super) struct Listening {
    url: String,
    name: String,
    ranks: u32,
    listener: UnixListener,
}

/// All workers of a server. Dropping it closes their sockets, which they hear at once.
pub(super) struct Workers {
    url: String,
    lines: Vec<mpsc::Sender<String>>,
    progress: watch::Receiver<Progress>,
    left_open: bool,
    tasks: JoinSet<()>,
}

impl Workers {
    /// Binds a socket for so many ranks.
    pub(super) fn listen(url: &str, ranks: u32) -> Result<Listening, EngineError> {
        let name = format!("{PREFIX}{}", uuid::Uuid::new_v4().simple());
        let bound = SocketAddr::from_abstract_name(name.as_bytes()).and_then(|address| StdListener::bind_addr(&address));
        let bound = bound.and_then(|listener| listener.set_nonblocking(true).and_then(|()| UnixListener::from_std(listener)));
        let listener = bound.map_err(|cause| EngineError::Unsupported {
            what: format!("no socket can be made for the server's workers: {cause}"),
            next_step: "it is fed from a directory".into(),
        })?;
        Ok(Listening { url: url.to_owned(), name, ranks, listener })
    }

    /// The line that tells of a bucket.
    pub(super) fn line(bucket: &HostBucket) -> String {
        let tensor = |tensor: &crate::engine::HostTensor| {
            json!([tensor.spec.name, tensor.spec.dtype.name(), tensor.spec.shape, tensor.offset, tensor.bytes, tensor.digest])
        };
        let tensors: Vec<_> = bucket.tensors.iter().map(tensor).collect();
        let (copy, draft) = (bucket.copy, bucket.section() == Section::Draft);
        let line = json!({"event": "bucket", "sequence": bucket.sequence, "copy": copy, "draft": draft, "tensors": tensors});
        format!("{line}\n")
    }

    /// Says a line to every worker; waits while one has not taken earlier ones. Wants to be ended by a deadline.
    pub(super) fn tell(&self, line: String) -> impl Future<Output = Result<(), EngineError>> + Send + use<> {
        let lines = self.lines.clone();
        async move {
            for worker in lines {
                // One that is gone is told of by its reader.
                let _gone = worker.send(line.clone()).await;
            }
            Ok(())
        }
    }

    /// Waits until every worker has checked so many buckets. Wants to be ended by a deadline.
    pub(super) fn verified(&self, buckets: u32) -> impl Future<Output = Result<(), EngineError>> + Send + use<> {
        let progress = self.progress.clone();
        async move {
            reached(progress, move |progress| progress.verified() >= buckets).await;
            Ok(())
        }
    }

    /// Waits until every worker took more than so many buckets: how many. Wants to be ended by a deadline.
    pub(super) fn taken(&self, more_than: u32) -> impl Future<Output = Result<u32, EngineError>> + Send + use<> {
        let progress = self.progress.clone();
        async move {
            reached(progress.clone(), move |progress| progress.taken() > more_than).await;
            let taken = progress.borrow().taken();
            Ok(taken)
        }
    }

    /// Whether one of them is in a session that somebody left open.
    pub(super) fn left_open(&self) -> bool {
        self.left_open
    }

    /// Waits until every worker took that step of a session, counted from 1 (0: one that somebody left open). Wants to be ended by a deadline.
    pub(super) fn did(&self, session: u32, step: Step) -> impl Future<Output = Result<(), EngineError>> + Send + use<> {
        let progress = self.progress.clone();
        async move {
            reached(progress, move |progress| progress.did(session, step)).await;
            Ok(())
        }
    }

    /// How many buckets every worker took by now.
    pub(super) fn taken_by_all(&self) -> u32 {
        self.progress.borrow().taken()
    }

    /// Waits until a worker says that it cannot go on, or is gone.
    pub(super) fn failed(&self) -> impl Future<Output = EngineError> + Send + use<> {
        let (mut progress, url) = (self.progress.clone(), self.url.clone());
        async move {
            let failed = progress.wait_for(|progress| progress.failure.is_some()).await;
            let why = failed.ok().and_then(|progress| progress.failure.clone());
            EngineError::NotSuccess { url, body: why.unwrap_or_else(|| "its workers are gone".into()) }
        }
    }

    /// A failure of theirs in our words.
    pub(super) fn error(&self, body: String) -> EngineError {
        EngineError::NotSuccess { url: self.url.clone(), body }
    }

    /// Closes their sockets.
    pub(super) fn close(&mut self) {
        self.lines.clear();
        self.tasks.abort_all();
    }
}

impl Listening {
    /// Abstract name, without its leading NUL.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Waits for all ranks, chooses a digest, and passes the memory.
    pub(super) async fn meet(self, rules: &Rules, memory: &HostMemory, until: Until) -> Result<(Workers, HostDigest), EngineError> {
        let mut there = BTreeMap::new();
        while there.len() < self.ranks as usize {
            let missing = || (0..self.ranks).filter(|rank| !there.contains_key(rank)).map(|rank| rank.to_string()).collect::<Vec<_>>();
            let Ok(met) = tokio::time::timeout(until.left(), self.one(rules)).await else {
                let what = format!("rank {} did not connect to its agent", missing().join(", "));
                let next_step = "its workers must run in the agent's pod; it is fed from a directory".into();
                return Err(EngineError::Unsupported { what, next_step });
            };
            if let Some((hello, socket)) = met? {
                there.insert(hello.rank, (hello, socket));
            }
        }
        let can = |digest: HostDigest| there.values().all(|(hello, _)| hello.digests.iter().any(|name| name == digest.name()));
        let Some(digest) = [HostDigest::Xxh3_128, HostDigest::Blake3].into_iter().find(|digest| can(*digest)) else {
            let what = "the server's workers can compute no digest".to_owned();
            return Err(EngineError::Unsupported { what, next_step: "install the package blake3 or xxhash in its environment".into() });
        };
        let silence = rules.silence.as_secs_f64();
        let opening = format!("{}\n", json!({"event": "memory", "bytes": memory.bytes, "digest": digest.name(), "silence": silence}));
        let (known, progress) =
            watch::channel(Progress { ranks: there.keys().map(|rank| (*rank, Rank::default())).collect(), failure: None });
        let left_open = there.values().any(|(hello, _)| hello.open);
        let (mut tasks, mut lines) = (JoinSet::new(), Vec::new());
        for (rank, (_, socket)) in there {
            let (reader, mut writer) = socket.into_parts();
            let opened = tokio::time::timeout(until.left(), pass(&mut writer, opening.as_bytes(), memory)).await;
            opened.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(|cause| EngineError::BadReply {
                url: self.url.clone(),
                what: format!("rank {rank} did not take the shared memory: {cause}"),
            })?;
            let (to_writer, inbox) = mpsc::channel(WAITING);
            lines.push(to_writer);
            tasks.spawn(write(writer, inbox, rules.silence / 3));
            tasks.spawn(read(reader, rank, if rules.draft { 2 } else { 1 }, known.clone()));
        }
        Ok((Workers { url: self.url, lines, progress, left_open, tasks }, digest))
    }

    /// The next connection, if it is one of ours.
    async fn one(&self, rules: &Rules) -> Result<Option<(Hello, Parts)>, EngineError> {
        let bad = |what: String| EngineError::BadReply { url: self.url.clone(), what };
        let (socket, _) = self.listener.accept().await.map_err(|cause| bad(format!("no worker can connect: {cause}")))?;
        let mut parts = Parts::new(socket);
        let said = tokio::time::timeout(SAY_HELLO, parts.next()).await;
        let hello = match said.ok().flatten() {
            Some(Said::Hello(hello)) if hello.token == rules.token => hello,
            other => {
                tracing::warn!(engine = self.url, ?other, "somebody connected who is no worker of this server");
                return Ok(None);
            }
        };
        if hello.device != "cpu" {
            return Err(EngineError::Unsupported {
                what: format!("rank {} computes on {:?}, and shared memory of the host is for CPU", hello.rank, hello.device),
                next_step: "it is fed from a directory".into(),
            });
        }
        if rules.draft && !hello.draft {
            return Err(EngineError::Unsupported {
                what: format!("the package weightsync beside rank {} knows no draft models", hello.rank),
                next_step: "install the one of this agent's version in the server's environment".into(),
            });
        }
        if hello.ranks != self.ranks || hello.rank >= self.ranks {
            return Err(bad(format!("a worker says that it is rank {} of {}, the server says {}", hello.rank, hello.ranks, self.ranks)));
        }
        Ok(Some((hello, parts)))
    }
}

/// A connection of a worker.
struct Parts {
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

impl Parts {
    fn new(socket: UnixStream) -> Self {
        let (reader, writer) = socket.into_split();
        Self { reader: BufReader::new(reader), writer }
    }

    async fn next(&mut self) -> Option<Said> {
        next(&mut self.reader).await.ok()
    }

    fn into_parts(self) -> (BufReader<OwnedReadHalf>, OwnedWriteHalf) {
        (self.reader, self.writer)
    }
}

async fn next(reader: &mut BufReader<OwnedReadHalf>) -> Result<Said, String> {
    let mut line = Vec::new();
    let read = reader.take(LONGEST_LINE).read_until(b'\n', &mut line).await;
    match read {
        Ok(0) => Err("it closed its connection".into()),
        Ok(_) => serde_json::from_slice(&line).map_err(|error| format!("it said something that makes no sense: {error}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Notes what a worker says until it is gone. One that closes behind its last step has not failed.
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
                Ok(Said::Hello(_)) => "it said hello twice".into(),
            };
            progress.failure.get_or_insert(format!("worker of rank {rank}: {failed}"));
        });
        if over {
            return;
        }
    }
}

/// Writes lines as they come, and one that says that we live when none does.
async fn write(mut writer: OwnedWriteHalf, mut lines: mpsc::Receiver<String>, quiet: Duration) {
    loop {
        let line = match tokio::time::timeout(quiet, lines.recv()).await {
            Ok(Some(line)) => line,
            Ok(None) => return,
            Err(_) => "{\"event\":\"alive\"}\n".to_owned(),
        };
        // Whoever waits for the worker's answer has a deadline; this write ends with the task.
        if writer.write_all(line.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Sends the first line with the memory beside it.
async fn pass(writer: &mut OwnedWriteHalf, line: &[u8], memory: &HostMemory) -> io::Result<()> {
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        let descriptor = [memory.file.as_fd()];
        if !beside.push(SendAncillaryMessage::ScmRights(&descriptor)) {
            return Err(io::Error::other("no room for one descriptor"));
        }
        Ok(rustix::net::sendmsg(writer.as_ref(), &[IoSlice::new(line)], &mut beside, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
    };
    let sent = writer.as_ref().async_io(Interest::WRITABLE, send).await?;
    writer.write_all(line.get(sent..).unwrap_or_default()).await
}
