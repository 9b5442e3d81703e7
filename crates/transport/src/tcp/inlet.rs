//! The input from the previous member. One connection is read by the task that processes it. Several are each read and hashed by a task of
//! their own, and put in order here.
//!
//! Decides when the other side is silent, and on which connection the stream continues. Never reads a bucket's content, and reads no
//! further ahead than its buffers allow.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::frame::{BadFrame, Frame, Parser};
use super::lanes::Expected;
use super::pool::{Buffer, Pool};
use super::socket::{Reader, Writer};
use weightsync_core::protocol::{BucketHeader, StreamFailure};
use weightsync_core::weights::BlockHasher;

/// Most events of one lane in the queue; its buffers limit the bytes.
const EVENTS: usize = 64;

/// Why no more input comes.
pub(super) enum Over {
    Closed(String),
    Silent,
    Failure(StreamFailure),
    Bad(BadFrame),
}

/// The next piece of a stream over several lanes, in order.
pub(super) enum Event {
    Head(BucketHeader),
    Part(Bytes),
    /// The digest of the parts since the previous block.
    Block(u128),
    Digest(u128),
    End,
    Over(Over),
}

/// The input from the previous member.
pub(super) enum Inlet {
    One(One),
    Many(Many),
}

pub(super) enum Arrived {
    /// Number of bytes in the buffer of the one connection.
    Bytes(usize),
    Event(Event),
    Lane,
}

impl Inlet {
    /// Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Result<Arrived, Over> {
        match self {
            Self::One(one) => one.next().await.map(Arrived::Bytes),
            Self::Many(many) => match many.next().await {
                None => Ok(Arrived::Lane),
                Some(Event::Over(over)) => Err(over),
                Some(event) => Ok(Arrived::Event(event)),
            },
        }
    }

    /// Whether all its connections exist.
    pub(super) fn whole(&self) -> bool {
        match self {
            Self::One(_) => true,
            Self::Many(many) => many.whole(),
        }
    }

    pub(super) async fn drain(self) {
        match self {
            Self::One(one) => one.drain().await,
            Self::Many(many) => many.drain().await,
        }
    }
}

/// Number and length of the buffers of a stream.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) buffers: usize,
    pub(super) size: usize,
}

pub(super) struct One {
    pub(super) parser: Parser,
    pub(super) buffer: Option<Buffer>,
    reader: Reader,
    pool: Pool,
    deadline: Instant,
    silence: Duration,
}

impl One {
    pub(super) fn new(reader: Reader, room: Room, silence: Duration) -> Self {
        let pool = Pool::new(room.buffers, room.size);
        Self { parser: Parser::default(), buffer: None, reader, pool, deadline: Instant::now() + silence, silence }
    }

    /// Waits for a buffer, then for bytes at its start; returns their number. Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Result<usize, Over> {
        if self.buffer.is_none() {
            self.buffer = Some(self.pool.take().await);
            // While we could not read, the other side was not the silent one.
            self.deadline = Instant::now() + self.silence;
        }
        let Some(buffer) = self.buffer.as_mut() else { return Err(Over::Closed("no buffer".to_owned())) };
        let length = read(&mut self.reader, buffer.data_mut(), self.deadline).await?;
        self.deadline = Instant::now() + self.silence;
        Ok(length)
    }

    pub(super) async fn drain(mut self) {
        drain(&mut self.reader).await;
    }
}

pub(super) struct Many {
    /// The events of each lane; `None` until its connection exists.
    lanes: Vec<Option<mpsc::Receiver<Event>>>,
    current: usize,
    expected: Option<Expected>,
    /// Deadline for all connections.
    by: Instant,
    tasks: JoinSet<()>,
    /// Kept open; nothing is sent on them.
    writers: Vec<Writer>,
    room: Room,
    silence: Duration,
    heard: Heard,
}

/// When any connection of a stream moved a byte.
#[derive(Clone)]
struct Heard(Arc<Mutex<Instant>>);

impl Heard {
    fn now(&self) {
        *self.0.lock() = Instant::now();
    }

    /// The meaning of a connection's silence: the other side may run, while a path between is broken.
    fn silent(&self, silence: Duration) -> Over {
        // A running side sends four signs of life in each silence limit on each connection; a busy machine may be late.
        if self.0.lock().elapsed() < silence * 2 / 3 {
            Over::Closed(format!("no byte for {silence:?} while others moved"))
        } else {
            Over::Silent
        }
    }
}

impl Many {
    /// A stream over `lanes` connections, of which the first exists.
    pub(super) fn new(first: Reader, lanes: usize, expected: Expected, room: Room, silence: Duration) -> Self {
        // All lanes together read as far ahead as one connection would.
        let room = Room { buffers: (room.buffers / lanes.max(1)).max(2), ..room };
        let mut many = Self {
            lanes: (0..lanes).map(|_| None).collect(),
            current: 0,
            expected: Some(expected),
            by: Instant::now() + silence,
            tasks: JoinSet::new(),
            writers: Vec::new(),
            room,
            silence,
            heard: Heard(Arc::new(Mutex::new(Instant::now()))),
        };
        many.start(0, first);
        many
    }

    pub(super) fn whole(&self) -> bool {
        self.expected.is_none()
    }

    /// The next piece; `None` when another connection came. Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Option<Event> {
        let Some(expected) = self.expected.as_mut() else { return Some(event(&mut self.lanes, &mut self.current).await) };
        tokio::select! {
            biased;
            (lane, link) = expected.next() => {
                if self.lanes.get(lane).is_some_and(Option::is_none) {
                    self.writers.push(link.writer);
                    self.start(lane, link.reader);
                }
                if self.lanes.iter().all(Option::is_some) {
                    self.expected = None;
                }
                None
            }
            event = event(&mut self.lanes, &mut self.current) => Some(event),
            () = sleep_until(self.by) => {
                let there = self.lanes.iter().flatten().count();
                let (all, within) = (self.lanes.len(), self.silence);
                Some(Event::Over(Over::Closed(format!("it opened {there} of {all} connections within {within:?}"))))
            }
        }
    }

    fn start(&mut self, lane: usize, reader: Reader) {
        let (events, coming) = mpsc::channel(EVENTS);
        if let Some(place) = self.lanes.get_mut(lane) {
            *place = Some(coming);
            let pool = Pool::new(self.room.buffers, self.room.size);
            self.tasks.spawn(read_lane(lane, reader, pool, events, self.silence, self.heard.clone()));
        }
    }

    /// Reads and discards the remaining input.
    pub(super) async fn drain(mut self) {
        self.lanes.clear();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// The next event of the stream's present lane.
async fn event(lanes: &mut [Option<mpsc::Receiver<Event>>], current: &mut usize) -> Event {
    let Some(Some(lane)) = lanes.get_mut(*current) else { return std::future::pending().await };
    let event = lane.recv().await;
    if matches!(event, Some(Event::Block(_))) {
        *current = (*current + 1) % lanes.len().max(1);
    }
    event.unwrap_or_else(|| Event::Over(Over::Closed("its reader ended".to_owned())))
}

/// Reads one connection, hashes its parts while they are in the cache, and passes them on.
async fn read_lane(lane: usize, mut reader: Reader, pool: Pool, events: mpsc::Sender<Event>, silence: Duration, heard: Heard) {
    let over = match pass(&mut reader, pool, &events, silence, &heard).await {
        Some(Over::Silent) => Some(heard.silent(silence)),
        over => over,
    };
    let over = over.map(|over| match over {
        Over::Closed(cause) => Over::Closed(format!("connection {lane}: {cause}")),
        over => over,
    });
    if let Some(over) = over {
        let _ = events.send(Event::Over(over)).await;
    }
    // So the closed connection does not overtake the messages on another one.
    events.closed().await;
    drain(&mut reader).await;
}

/// `None` when no receiver is left.
async fn pass(reader: &mut Reader, pool: Pool, events: &mpsc::Sender<Event>, silence: Duration, heard: &Heard) -> Option<Over> {
    let mut parser = Parser::default();
    let mut block = BlockHasher::new();
    loop {
        let mut buffer = pool.take().await;
        // While we could not read, the other side was not the silent one.
        let deadline = Instant::now() + silence;
        let length = match read(reader, buffer.data_mut(), deadline).await {
            Ok(length) => length,
            Err(over) => return Some(over),
        };
        heard.now();
        let bytes = buffer.freeze().slice(..length);
        let mut input: &[u8] = &bytes;
        loop {
            let event = match parser.next(&mut input) {
                Ok(None) => break,
                Ok(Some(Frame::Part(part))) => {
                    block.update(part);
                    Event::Part(bytes.slice_ref(part))
                }
                Ok(Some(Frame::Cut)) => Event::Block(block.take()),
                Ok(Some(Frame::Head(header))) => Event::Head(header),
                Ok(Some(Frame::Digest(digest))) => Event::Digest(digest),
                Ok(Some(Frame::End)) => Event::End,
                Ok(Some(Frame::Failure(failure))) => return Some(Over::Failure(failure)),
                // Payloads outside of the connections use only one of them.
                Ok(Some(Frame::Alive | Frame::Admitted | Frame::Done | Frame::Lanes(..) | Frame::Lent(_) | Frame::Taken(_))) => continue,
                Err(bad) => return Some(Over::Bad(bad)),
            };
            if events.send(event).await.is_err() {
                return None;
            }
        }
    }
}

/// Waits for bytes, and takes all available ones. Dropping the future loses nothing.
async fn read(reader: &mut Reader, buffer: &mut [u8], deadline: Instant) -> Result<usize, Over> {
    let mut length = match timeout_at(deadline, reader.read(buffer)).await {
        Err(_) => return Err(Over::Silent),
        Ok(Err(error)) => return Err(Over::Closed(error.to_string())),
        Ok(Ok(0)) => return Err(Over::Closed("it closed the stream in the middle".to_owned())),
        Ok(Ok(length)) => length,
    };
    // TLS gives one record at a time: otherwise, only nearly empty buffers would be read ahead.
    while let Some(free) = buffer.get_mut(length..).filter(|free| !free.is_empty()) {
        match reader.read(free).now_or_never() {
            Some(Ok(more)) if more > 0 => length += more,
            // The next call meets an end or an error again.
            _ => break,
        }
    }
    Ok(length)
}

/// Reads and discards the remaining input.
async fn drain(reader: &mut Reader) {
    let mut rest = vec![0; 64 << 10];
    let nothing = async {
        while reader.read(&mut rest).await? > 0 {}
        Ok::<_, io::Error>(())
    };
    let _ = nothing.await;
}
