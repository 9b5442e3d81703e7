//! The trainer's side of the socket, for `weightsync publish`; the Python client is the same in Python.
//!
//! Blocks its thread, with a limit on every wait: an agent that says nothing for [`SILENCE`] is lost. It decides which free slot is
//! written next, and nothing about versions.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use super::memfd::SharedMemory;
use super::socket::{SocketError, SocketName};
use weightsync_core::protocol::{CLIENT_PROTOCOL, ClientReply, ClientRequest, PublishError, PublishResult};
use weightsync_core::weights::{Bucket, Layout};

/// An agent that lives says something each second while a publish runs.
pub const SILENCE: Duration = Duration::from_secs(10);

/// Longest line that is read, in bytes.
const LONGEST_LINE: usize = 256 << 20;

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TrainerError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("the agent went away ({cause}): publish again when it is back")]
    AgentLost { cause: String },
    #[error("{}", .0.message)]
    Failed(PublishError),
    #[error("the agent said something that makes no sense: {0}")]
    Nonsense(String),
    #[error("reading what is to be published: {0}")]
    Source(Box<dyn std::error::Error + Send + Sync>),
}

/// Writes one bucket of the layout's stream.
pub type Fill<'a> = dyn FnMut(&Layout, Bucket, &mut [u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> + 'a;

/// A connection to the agent.
pub struct TrainerClient {
    socket: UnixStream,
    heard: Vec<u8>,
    looked_at: usize,
    descriptors: VecDeque<OwnedFd>,
    memory: Option<SharedMemory>,
}

struct Filling {
    layout: Layout,
    slot_bytes: u64,
    free: VecDeque<u32>,
    attempt: u32,
    next: u32,
    ended: bool,
}

impl TrainerClient {
    /// Connects and says hello; `name` is the caller's program and version.
    pub fn connect(socket: &SocketName, name: &str) -> Result<Self, TrainerError> {
        let socket = socket.connect()?;
        let limits = socket.set_read_timeout(Some(SILENCE)).and_then(|()| socket.set_write_timeout(Some(SILENCE)));
        limits.map_err(|error| lost(&error))?;
        let mut client = Self { socket, heard: Vec::new(), looked_at: 0, descriptors: VecDeque::new(), memory: None };
        client.say(&ClientRequest::Hello { protocol: CLIENT_PROTOCOL, client: name.to_owned() })?;
        match client.hear()? {
            ClientReply::Welcome { .. } => Ok(client),
            ClientReply::Error { error } => Err(TrainerError::Failed(error)),
            other => Err(nonsense(&other)),
        }
    }

    /// Sends a request.
    pub fn say(&mut self, request: &ClientRequest) -> Result<(), TrainerError> {
        let mut line = serde_json::to_vec(request).map_err(|error| TrainerError::Nonsense(error.to_string()))?;
        line.push(b'\n');
        match self.socket.write_all(&line) {
            Ok(()) => Ok(()),
            // The agent's last words say why it closed.
            Err(error) => match self.hear() {
                Ok(ClientReply::Error { error }) => Err(TrainerError::Failed(error)),
                _ => Err(lost(&error)),
            },
        }
    }

    /// The next line; ends with an error after [`SILENCE`].
    pub fn hear(&mut self) -> Result<ClientReply, TrainerError> {
        self.line(RecvFlags::empty())?.ok_or_else(|| TrainerError::AgentLost { cause: format!("it said nothing for {SILENCE:?}") })
    }

    /// The next line if it is there already.
    fn hear_now(&mut self) -> Result<Option<ClientReply>, TrainerError> {
        self.line(RecvFlags::DONTWAIT)
    }

    /// Publishes a version whose buckets `fill` writes; `request` is `publish` or `publishCheckpoint`. Shows every line to `seen`.
    pub fn publish(
        &mut self,
        request: &ClientRequest,
        fill: &mut Fill<'_>,
        seen: &mut dyn FnMut(&ClientReply),
    ) -> Result<PublishResult, TrainerError> {
        let timeout_ms = match request {
            ClientRequest::Publish { timeout_ms, .. } | ClientRequest::PublishCheckpoint { timeout_ms, .. } => *timeout_ms,
            other => return Err(TrainerError::Nonsense(format!("{other:?} is no publish"))),
        };
        // The agent ends every publish in time; this ends the wait for an agent that is broken but talks on.
        let deadline = Instant::now().checked_add(Duration::from_millis(timeout_ms).saturating_add(3 * SILENCE));
        self.say(request)?;
        let mut filling = None;
        loop {
            let reply = if self.fill_next(&mut filling, fill)? { self.hear_now()? } else { Some(self.hear()?) };
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                return Err(TrainerError::AgentLost { cause: format!("it gave no outcome within {timeout_ms} ms") });
            }
            let Some(reply) = reply else { continue };
            seen(&reply);
            match reply {
                ClientReply::Ring { memfd, layout, slots, slot_bytes, attempt, .. } => {
                    self.take_ring(memfd, slots, slot_bytes)?;
                    layout.validate().map_err(|error| TrainerError::Nonsense(error.to_string()))?;
                    filling = Some(Filling { layout, slot_bytes, free: (0..slots).collect(), attempt, next: 0, ended: false });
                }
                ClientReply::Free { slot } => {
                    if let Some(filling) = &mut filling {
                        filling.free.push_back(slot);
                    }
                }
                ClientReply::Again { attempt, .. } => {
                    if let Some(filling) = &mut filling {
                        (filling.attempt, filling.next, filling.ended) = (attempt, 0, false);
                    }
                }
                ClientReply::Done { result } => return Ok(result),
                ClientReply::Error { error } => return Err(TrainerError::Failed(error)),
                _ => {}
            }
        }
    }

    /// Fills one slot, or reports the end; returns whether more can be done without a reply first.
    fn fill_next(&mut self, filling: &mut Option<Filling>, fill: &mut Fill<'_>) -> Result<bool, TrainerError> {
        let Some(filling) = filling.as_mut().filter(|filling| !filling.ended) else { return Ok(false) };
        let attempt = filling.attempt;
        let Some(bucket) = filling.layout.bucket(filling.next) else {
            filling.ended = true;
            self.say(&ClientRequest::End { attempt })?;
            return Ok(false);
        };
        let Some(slot) = filling.free.pop_front() else { return Ok(false) };
        let range = u64::from(slot).checked_mul(filling.slot_bytes).and_then(|start| {
            let start = usize::try_from(start).ok()?;
            Some(start..start.checked_add(usize::try_from(bucket.bytes).ok()?)?)
        });
        let room = range.and_then(|range| self.memory.as_mut()?.bytes_mut(range));
        let room = room.ok_or_else(|| TrainerError::Nonsense(format!("slot {slot} lies outside the ring")))?;
        if let Err(error) = fill(&filling.layout, bucket, room) {
            // Dropping the connection would end it as well; the reason would be lost.
            self.say(&ClientRequest::Cancel { reason: error.to_string() })?;
            return Err(TrainerError::Source(error));
        }
        filling.next += 1;
        self.say(&ClientRequest::Filled { attempt, sequence: bucket.sequence, slot, event: false })?;
        Ok(true)
    }

    fn take_ring(&mut self, new: bool, slots: u32, slot_bytes: u64) -> Result<(), TrainerError> {
        if !new {
            return Ok(());
        }
        let length = u64::from(slots).checked_mul(slot_bytes).and_then(|bytes| usize::try_from(bytes).ok());
        let memory = length.zip(self.descriptors.pop_front());
        let (length, descriptor) = memory.ok_or_else(|| TrainerError::Nonsense("a ring came without its memory".into()))?;
        self.memory = Some(SharedMemory::attach(descriptor, length).map_err(|error| TrainerError::Nonsense(error.to_string()))?);
        Ok(())
    }

    fn line(&mut self, flags: RecvFlags) -> Result<Option<ClientReply>, TrainerError> {
        loop {
            let unseen = self.heard.get(self.looked_at..).unwrap_or_default();
            if let Some(end) = unseen.iter().position(|byte| *byte == b'\n').map(|end| self.looked_at + end) {
                let line: Vec<u8> = self.heard.drain(..=end).collect();
                self.looked_at = 0;
                return serde_json::from_slice(&line).map(Some).map_err(|error| TrainerError::Nonsense(error.to_string()));
            }
            self.looked_at = self.heard.len();
            if self.looked_at > LONGEST_LINE {
                return Err(TrainerError::Nonsense("a line is too long".into()));
            }
            match self.receive(flags) {
                Ok(0) => return Err(TrainerError::AgentLost { cause: "it closed the connection".into() }),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(&error)),
            }
        }
    }

    /// Reads what is there, descriptors included.
    fn receive(&mut self, flags: RecvFlags) -> io::Result<usize> {
        let mut chunk = [0; 16 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut alongside = RecvAncillaryBuffer::new(&mut space);
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(&mut chunk)], &mut alongside, flags)?;
        for message in alongside.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        self.heard.extend_from_slice(chunk.get(..received.bytes).unwrap_or_default());
        Ok(received.bytes)
    }
}

fn lost(error: &io::Error) -> TrainerError {
    TrainerError::AgentLost { cause: error.to_string() }
}

fn nonsense(reply: &ClientReply) -> TrainerError {
    TrainerError::Nonsense(format!("{reply:?}").chars().take(200).collect())
}
