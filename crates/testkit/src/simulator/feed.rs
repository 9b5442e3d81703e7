//! One simulated worker on the socket of its agent (`python/weightsync/_feed.py`): receives messages, checks every digest over the bytes
//! that it finds, and hands it on in order.
//!
//! Decides whether the announced buckets make sense, as the real one does. It reads memory of the host each time that it is asked, so a place that
//! was used again shows; a bucket in memory of a GPU is read when it is taken, and checked then.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::memory::GpuMemory;
use super::tensors::Taken;
use weightsync_core::weights::{Dtype, digest_hex, gsum64, tensor_digest};

/// Longest wait for the first line.
const FIRST_WORD: Duration = Duration::from_secs(60);

/// A tensor in the shared memory: name, type, shape, first byte, length, digest.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Place(String, String, Vec<u64>, u64, u64, String);

/// Tensors that were announced together.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Reported {
    pub(super) sequence: u32,
    pub(super) copy: bool,
    /// For the draft model, which follows the model.
    #[serde(default)]
    pub(super) draft: bool,
    pub(super) tensors: Vec<Place>,
    /// Where it lies on the worker's GPU; none where it lies in memory of the host.
    #[serde(default)]
    memory: Option<OnGpu>,
    #[serde(default)]
    bytes: u64,
}

/// A bucket in memory of a GPU.
#[derive(Debug, Clone, Deserialize)]
struct OnGpu {
    handle: String,
    offset: u64,
}

#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "camelCase")]
enum Line {
    Memory { digest: String, silence: f64 },
    Gpu { silence: f64 },
    Bucket(Reported),
    End { buckets: u32 },
    Alive,
}

pub(super) enum Arrived {
    Bucket(Reported),
    End,
    Failed(String),
}

pub(super) struct Feed {
    arrived: mpsc::UnboundedReceiver<Arrived>,
    memory: Arc<OnceLock<File>>,
    socket: UnixStream,
    /// Memory of the GPU that it computes on; none for one that computes on a CPU.
    gpu: Option<GpuMemory>,
    /// The first bucket for the draft model.
    ahead: Option<Reported>,
    over: bool,
}

impl Drop for Feed {
    fn drop(&mut self) {
        // The thread that listens has a descriptor of its own.
        let _closed = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

impl Feed {
    /// Connects and says hello; buckets are checked from now on. `gpu` is the UUID of the GPU that it computes on, and what lies there.
    pub(super) fn connect(
        (socket, token): (&str, &str),
        (rank, ranks): (u32, u32),
        digests: &[String],
        open: bool,
        gpu: Option<(String, GpuMemory)>,
    ) -> Result<Self, String> {
        let address = SocketAddr::from_abstract_name(socket.as_bytes());
        let socket = address.and_then(|address| UnixStream::connect_addr(&address));
        let socket = socket.map_err(|error| format!("no agent answers: {error}"))?;
        let (uuid, gpu) = gpu.unzip();
        let device = if gpu.is_some() { "cuda" } else { "cpu" };
        let on_gpus = gpu.is_some().then(|| "gsum64".to_owned());
        let digests: Vec<&String> = digests.iter().chain(&on_gpus).collect();
        let hello = json!({
            "token": token, "protocol": 1, "rank": rank, "ranks": ranks, "device": device, "gpu": uuid, "digests": digests, "open": open,
            "draft": true,
        });
        say(&socket, &json!({"hello": hello}))?;
        let listening = socket.try_clone().map_err(|error| error.to_string())?;
        let (to_engine, arrived) = mpsc::unbounded_channel();
        let memory = Arc::new(OnceLock::new());
        let seen = memory.clone();
        std::thread::spawn(move || {
            let listener = Listener { socket: listening, heard: Vec::new(), descriptors: VecDeque::new(), memory: seen };
            if let Err(cause) = listener.run(&to_engine) {
                let _gone = to_engine.send(Arrived::Failed(cause));
            }
        });
        Ok(Self { arrived, memory, socket, gpu, ahead: None, over: false })
    }

    /// What comes next for the model, or for the draft model; waits for it. The model ends where the draft model begins.
    pub(super) async fn next(&mut self, draft: bool) -> Arrived {
        let next = match self.ahead.take() {
            Some(bucket) => Arrived::Bucket(bucket),
            None => self.arrived.recv().await.unwrap_or_else(|| Arrived::Failed("the agent went away".into())),
        };
        match next {
            Arrived::Bucket(bucket) if bucket.draft && !draft => {
                self.ahead = Some(bucket);
                Arrived::End
            }
            Arrived::Bucket(bucket) if !bucket.draft && draft => Arrived::Failed("a bucket of the model came after its draft model".into()),
            next => {
                self.over |= matches!(next, Arrived::End);
                next
            }
        }
    }

    pub(super) fn over(&self) -> bool {
        self.over
    }

    pub(super) fn read(&self, place: &Place) -> Result<Taken, String> {
        let bytes = self.memory.get().map_or_else(|| Err("there is no memory".into()), |memory| read(memory, place))?;
        let Place(name, dtype, shape, ..) = place;
        taken(name, dtype, shape, &bytes)
    }

    /// Copies a bucket from memory of the GPU and checks every tensor of the copy; none where it lies in memory of the host.
    pub(super) fn copy(&self, reported: &Reported) -> Result<Option<Vec<Taken>>, String> {
        let (Some(at), Some(gpu)) = (&reported.memory, &self.gpu) else { return Ok(None) };
        let handle = STANDARD.decode(&at.handle).map_err(|error| error.to_string())?;
        let copy = gpu.open(&handle)?.read(at.offset, reported.bytes)?;
        let tensor = |place: &Place| {
            let Place(name, dtype, shape, offset, bytes, said) = place;
            let range = usize::try_from(*offset).ok().zip(usize::try_from(offset.saturating_add(*bytes)).ok());
            let bytes =
                range.and_then(|(first, end)| copy.get(first..end)).ok_or_else(|| format!("tensor {name} does not lie in its bucket"))?;
            let computed = format!("{:016x}", gsum64(bytes));
            if computed != *said {
                return Err(format!("tensor {name} is not what the agent says: its digest is {computed}, not {said}"));
            }
            taken(name, dtype, shape, bytes)
        };
        reported.tensors.iter().map(tensor).collect::<Result<Vec<_>, _>>().map(Some)
    }

    /// Reports that a step of the session was taken; does nothing if the agent is gone.
    pub(super) fn did(&self, step: &str) {
        let _reported = self.say(&json!({"did": step}));
    }

    pub(super) fn say(&self, what: &Value) -> Result<(), String> {
        say(&self.socket, what)
    }
}

fn taken(name: &str, dtype: &str, shape: &[u64], bytes: &[u8]) -> Result<Taken, String> {
    let dtype = Dtype::ALL.into_iter().find(|known| known.name() == dtype).ok_or_else(|| format!("no type {dtype}"))?;
    Ok(Taken::of(name.to_owned(), dtype, shape.to_vec(), bytes))
}

fn say(mut socket: &UnixStream, what: &Value) -> Result<(), String> {
    socket.write_all(format!("{what}\n").as_bytes()).map_err(|error| format!("the agent went away: {error}"))
}

fn read(memory: &File, place: &Place) -> Result<Vec<u8>, String> {
    let Place(name, _, _, offset, bytes, _) = place;
    let mut read = vec![0; usize::try_from(*bytes).map_err(|error| error.to_string())?];
    let done = memory.read_exact_at(&mut read, *offset);
    done.map_err(|error| format!("tensor {name} does not lie in the shared memory: {error}"))?;
    Ok(read)
}

struct Listener {
    socket: UnixStream,
    heard: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
    memory: Arc<OnceLock<File>>,
}

impl Listener {
    fn run(mut self, to_engine: &mpsc::UnboundedSender<Arrived>) -> Result<(), String> {
        let outcome = self.listen(to_engine);
        if let Err(cause) = &outcome {
            // Do nothing if the agent is gone.
            let _reported = say(&self.socket, &json!({"failed": cause}));
        }
        outcome
    }

    fn listen(&mut self, to_engine: &mpsc::UnboundedSender<Arrived>) -> Result<(), String> {
        self.within(FIRST_WORD)?;
        let (digest, silence) = match self.line()? {
            Line::Memory { digest, silence } => (Some(digest), silence),
            Line::Gpu { silence } => (None, silence),
            _ => return Err("the agent did not begin with the memory".into()),
        };
        self.within(Duration::try_from_secs_f64(silence).map_err(|error| error.to_string())?)?;
        if digest.is_some() {
            let file = self.descriptors.pop_front().ok_or("no memory came next to its description")?;
            self.memory.get_or_init(|| File::from(file));
        }
        let memory = self.memory.clone();
        let mut expected = 0;
        loop {
            match self.line()? {
                Line::Alive => {}
                Line::Memory { .. } | Line::Gpu { .. } => return Err("the agent described the memory twice".into()),
                Line::Bucket(bucket) => {
                    if bucket.sequence != expected {
                        return Err(format!("bucket {} was announced, {expected} was expected", bucket.sequence));
                    }
                    // What lies on a GPU is checked when it was copied.
                    if let (Some(memory), Some(digest)) = (memory.get(), &digest) {
                        for place in &bucket.tensors {
                            check(memory, place, digest)?;
                        }
                        say(&self.socket, &json!({"verified": expected}))?;
                    }
                    let _gone = to_engine.send(Arrived::Bucket(bucket));
                    expected += 1;
                }
                Line::End { buckets } if buckets == expected => {
                    let _gone = to_engine.send(Arrived::End);
                    return Ok(());
                }
                Line::End { buckets } => return Err(format!("the agent ended after {buckets} buckets, {expected} were announced")),
            }
        }
    }

    fn within(&self, silence: Duration) -> Result<(), String> {
        self.socket.set_read_timeout(Some(silence)).map_err(|error| error.to_string())
    }

    fn line(&mut self) -> Result<Line, String> {
        loop {
            if let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.heard.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(|error| format!("the agent said something that means nothing here: {error}"));
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut alongside = RecvAncillaryBuffer::new(&mut space);
            let mut part = vec![0; 64 << 10];
            let received = rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(&mut part)], &mut alongside, RecvFlags::CMSG_CLOEXEC);
            let received = received.map_err(|error| format!("the agent went away: {error}"))?.bytes;
            for message in alongside.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    self.descriptors.extend(rights);
                }
            }
            if received == 0 {
                return Err("the agent closed the connection".into());
            }
            self.heard.extend_from_slice(part.get(..received).unwrap_or_default());
        }
    }
}

fn check(memory: &File, place: &Place, digest: &str) -> Result<(), String> {
    let bytes = read(memory, place)?;
    let computed = match digest {
        "blake3" => blake3::hash(&bytes).to_hex().to_string(),
        _ => digest_hex(tensor_digest(&bytes)),
    };
    let Place(name, .., said) = place;
    if computed == *said { Ok(()) } else { Err(format!("tensor {name} is not what the agent says: its digest is {computed}, not {said}")) }
}
