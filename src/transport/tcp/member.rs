//! One stream into this member: its bytes go to the store and, while they arrive, to the next member of the chain.
//!
//! Decides who is at fault when the stream stops: the member before (closed, silent), the one behind (what its connection says), or this
//! one (its store refused, a digest disagreed). One task, so a store that blocks makes this member silent instead of hiding behind a
//! timer that still ticks.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout, timeout_at};

use super::TcpOptions;
use super::downstream::{Alive, Downstream, Item, Phase, alive_period, millis};
use super::frame::{Frame, Parser};
use super::pool::{Buffer, Pool};
use super::socket::Link;
use crate::protocol::{DataHello, MemberName, Refusal, RefusalCode, StreamFailure};
use crate::transport::carrier::{Carried, Carrier, Carriers};
use crate::transport::intake::Intake;
use crate::transport::{Admission, BucketStore};

/// Bounds of the silence that a hello may ask for.
const SILENCE: std::ops::RangeInclusive<u64> = 10..=600_000;
/// A failed stream is read on (and thrown away) for at most this long, so that closing it does not overtake the words that say why.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Serves one connection whose hello was read, to its end.
pub(super) async fn serve(
    link: Link,
    hello: DataHello,
    admission: &dyn Admission,
    carriers: Option<&dyn Carriers>,
    options: Arc<TcpOptions>,
    room: Option<OwnedSemaphorePermit>,
) {
    let silence = Duration::from_millis(hello.silence_ms);
    let upstream = Upstream { reader: link.reader, writer: Some(link.writer), silence };
    let admitted = admit(&hello, link.secured, admission, room.is_some()).and_then(|store| Ok((carrier(&hello, carriers, &store)?, store)));
    match admitted {
        Err(refusal) => upstream.fail(StreamFailure::Refused { peer: hello.to, refusal }).await,
        Ok((carrier, store)) => Session::new(hello, store, carrier, options, upstream).run().await,
    }
}

fn carrier(hello: &DataHello, carriers: Option<&dyn Carriers>, store: &Arc<dyn BucketStore>) -> Result<Option<Box<dyn Carrier>>, Refusal> {
    match (&hello.carried, carriers) {
        (None, _) => Ok(None),
        (Some(_), Some(carriers)) => carriers.receive(hello, store).map(Some),
        (Some(_), None) => {
            let message = "the payloads are to travel between GPUs, and this member has none".to_owned();
            Err(Refusal { code: RefusalCode::Invalid, message })
        }
    }
}

fn admit(hello: &DataHello, secured: bool, admission: &dyn Admission, room: bool) -> Result<Arc<dyn BucketStore>, Refusal> {
    let refuse = |message: String| Err(Refusal { code: RefusalCode::Invalid, message });
    if hello.tls != secured {
        let (said, is) = if secured { ("plain", "inside TLS") } else { ("inside TLS", "plain") };
        return refuse(format!("the hello says that the stream is {said}, it is {is}"));
    }
    if !SILENCE.contains(&hello.silence_ms) {
        return refuse(format!("a silence of {} ms is not between 10 ms and 10 min", hello.silence_ms));
    }
    if !room {
        return refuse("too many streams at once".to_owned());
    }
    admission.admit(hello)
}

/// The connection to the member before.
struct Upstream {
    reader: Box<dyn AsyncRead + Send + Unpin>,
    /// None once it broke.
    writer: Option<Box<dyn AsyncWrite + Send + Unpin>>,
    silence: Duration,
}

impl Upstream {
    /// Says something to the member before. That it cannot be said is seen by reading.
    async fn say(&mut self, frame: Frame<'_>) {
        let Some(writer) = self.writer.as_mut() else { return };
        let mut wire = Vec::new();
        frame.put(&mut wire);
        let said = timeout(self.silence, async {
            writer.write_all(&wire).await?;
            writer.flush().await
        });
        if !matches!(said.await, Ok(Ok(()))) {
            self.writer = None;
        }
    }

    async fn fail(mut self, failure: StreamFailure) {
        self.say(Frame::Failure(failure)).await;
        self.close().await;
    }

    /// Closes so that what was said arrives: a socket closed with unread bytes in it is reset.
    async fn close(mut self) {
        let _ = timeout(LAST_WORDS, async {
            if let Some(mut writer) = self.writer.take() {
                writer.shutdown().await?;
            }
            let mut rest = vec![0; 64 << 10];
            while self.reader.read(&mut rest).await? > 0 {}
            Ok::<_, io::Error>(())
        })
        .await;
    }
}

/// Reads from the member before, as far ahead as the pool allows.
struct Inlet {
    pool: Pool,
    buffer: Option<Buffer>,
    deadline: Instant,
}

enum Read {
    Bytes(usize),
    Closed(String),
    Silent,
}

impl Inlet {
    /// Waits for a buffer, then for bytes. Dropping the future loses nothing.
    async fn next(&mut self, reader: &mut (dyn AsyncRead + Send + Unpin), silence: Duration) -> Read {
        if self.buffer.is_none() {
            self.buffer = Some(self.pool.take().await);
            // As long as we could not read, it was not the other side that was silent.
            self.deadline = Instant::now() + silence;
        }
        let Some(buffer) = self.buffer.as_mut() else { return Read::Closed("no buffer".to_owned()) };
        match timeout_at(self.deadline, reader.read(buffer.data_mut())).await {
            Err(_) => Read::Silent,
            Ok(Err(error)) => Read::Closed(error.to_string()),
            Ok(Ok(0)) => Read::Closed("it closed the stream in the middle".to_owned()),
            Ok(Ok(length)) => {
                self.deadline = Instant::now() + silence;
                Read::Bytes(length)
            }
        }
    }
}

/// Why a session ends early, and whether the member before knows it already.
struct Ending {
    failure: StreamFailure,
    told: bool,
}

struct Session {
    me: MemberName,
    from: MemberName,
    upstream: Upstream,
    intake: Intake,
    carrier: Option<Box<dyn Carrier>>,
    /// The end came while announced buckets were still on their way.
    end_came: bool,
    parser: Parser,
    downstream: Option<Downstream>,
    inlet: Inlet,
}

impl Session {
    fn new(
        hello: DataHello,
        store: Arc<dyn BucketStore>,
        carrier: Option<Box<dyn Carrier>>,
        options: Arc<TcpOptions>,
        upstream: Upstream,
    ) -> Self {
        let (me, from) = (hello.to.clone(), hello.from.clone());
        let mut rest = hello.rest.iter().cloned();
        let buffers = if hello.rest.is_empty() { 1 } else { options.receive_buffers.max(2) };
        let pool = Pool::new(buffers, options.receive_buffer);
        let next = rest.next().map(|(name, address)| {
            let hello = DataHello { from: me.clone(), to: name, rest: rest.collect(), ..hello };
            let lost = StreamFailure::Lost { peer: me.clone(), cause: "it closed its transport".to_owned() };
            Downstream::start(hello, address, options, Alive::WhenTold, lost)
        });
        Self {
            intake: Intake::new(me.clone(), store),
            carrier,
            end_came: false,
            me,
            from,
            inlet: Inlet { pool, buffer: None, deadline: Instant::now() + upstream.silence },
            upstream,
            parser: Parser::default(),
            downstream: next,
        }
    }

    async fn run(mut self) {
        match self.receive().await {
            Ok(()) => {
                self.upstream.say(Frame::Done).await;
                self.upstream.close().await;
            }
            Err(Ending { failure, told }) => {
                self.intake.broken(&failure);
                if let Some(downstream) = self.downstream.as_mut() {
                    downstream.abort(failure.clone());
                }
                if told {
                    self.upstream.close().await;
                } else {
                    self.upstream.fail(failure).await;
                }
            }
        }
    }

    async fn receive(&mut self) -> Result<(), Ending> {
        let mut ticks = interval(alive_period(self.upstream.silence));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut chain_done = self.downstream.is_none();
        if chain_done {
            self.upstream.say(Frame::Admitted).await;
        }
        // Behind the end, a member before that goes away is no failure any more.
        let mut listening = true;
        while !(chain_done && self.intake.ended()) {
            tokio::select! {
                biased;
                phase = changed(&mut self.downstream) => match phase {
                    Phase::Opening => {}
                    Phase::Admitted => self.upstream.say(Frame::Admitted).await,
                    Phase::Done => chain_done = true,
                    Phase::Failed(failure) => return Err(Ending { failure, told: false }),
                },
                _ = ticks.tick() => {
                    self.upstream.say(Frame::Alive).await;
                    self.downstream.iter().for_each(Downstream::alive);
                }
                carried = carried(&mut self.carrier) => self.carried(carried)?,
                read = self.inlet.next(&mut self.upstream.reader, self.upstream.silence), if listening => match read {
                    Read::Bytes(length) => self.take(length)?,
                    // Behind the end nothing more is awaited of the member before.
                    _ if self.intake.ended() || self.end_came => listening = false,
                    Read::Closed(cause) => {
                        let failure = StreamFailure::Lost { peer: self.from.clone(), cause };
                        return Err(Ending { failure, told: true });
                    }
                    Read::Silent => {
                        let silence_ms = millis(self.upstream.silence);
                        return Err(Ending { failure: StreamFailure::Silent { peer: self.from.clone(), silence_ms }, told: false });
                    }
                },
            }
        }
        Ok(())
    }

    /// Works on the first `length` bytes of the buffer.
    fn take(&mut self, length: usize) -> Result<(), Ending> {
        let Some(buffer) = self.inlet.buffer.take() else { return Ok(()) };
        if self.downstream.is_none() {
            let outcome = self.frames(buffer.as_ref().get(..length).unwrap_or_default(), |_| None);
            self.inlet.buffer = Some(buffer);
            return outcome;
        }
        let bytes = buffer.freeze();
        let input = bytes.slice(..length);
        self.frames(&input, |part| Some(Item::Part(input.slice_ref(part))))
    }

    fn frames(&mut self, mut input: &[u8], forward: impl Fn(&[u8]) -> Option<Item>) -> Result<(), Ending> {
        let here = |failure| Ending { failure, told: false };
        loop {
            let frame = match self.parser.next(&mut input) {
                Ok(Some(frame)) => frame,
                Ok(None) => return Ok(()),
                Err(error) => {
                    let refusal = Refusal { code: RefusalCode::Invalid, message: error.to_string() };
                    return Err(here(StreamFailure::Refused { peer: self.me.clone(), refusal }));
                }
            };
            // The next member has its bytes before this one copies them.
            if let Some(downstream) = &self.downstream {
                match &frame {
                    Frame::Head(header) => downstream.send(Item::Head(*header)),
                    Frame::Part(part) => forward(part).into_iter().for_each(|item| downstream.send(item)),
                    Frame::Digest(digest) => downstream.send(Item::Digest(*digest)),
                    Frame::End => downstream.send(Item::End),
                    _ => {}
                }
            }
            match (frame, self.carrier.as_mut()) {
                (Frame::Head(header), Some(carrier)) => {
                    self.intake.carried_head(header).map_err(here)?;
                    carrier.head(header);
                }
                (Frame::Digest(digest), Some(carrier)) => carrier.digest(digest),
                (Frame::End, Some(carrier)) if !carrier.idle() => self.end_came = true,
                (Frame::End, Some(carrier)) => {
                    self.intake.end().map_err(here)?;
                    carrier.ended();
                }
                (frame, _) => self.plain(frame)?,
            }
        }
    }

    /// A frame of a stream whose payloads travel in the connection, or one that has nothing to do with payloads.
    fn plain(&mut self, frame: Frame<'_>) -> Result<(), Ending> {
        let here = |failure| Ending { failure, told: false };
        match frame {
            Frame::Head(header) => self.intake.head(header).map_err(here),
            Frame::Part(part) => self.intake.part(part).map_err(here),
            Frame::Digest(digest) => self.intake.digest(digest).map_err(here),
            Frame::End => self.intake.end().map_err(here),
            Frame::Failure(failure) => Err(Ending { failure, told: true }),
            Frame::Alive | Frame::Admitted | Frame::Done => Ok(()),
        }
    }

    /// Something that travelled beside the connection.
    fn carried(&mut self, carried: Carried) -> Result<(), Ending> {
        let here = |failure| Ending { failure, told: false };
        match carried {
            Carried::Part(offset, bytes) => self.intake.carried_part(offset, &bytes).map_err(here)?,
            Carried::Device(bucket) => self.intake.carried_device(bucket).map_err(here)?,
            Carried::Whole(header, digest) => self.intake.carried_whole(&header, digest).map_err(here)?,
            Carried::Failed(failure) => return Err(here(failure)),
        }
        if let Some(carrier) = self.carrier.as_mut().filter(|carrier| self.end_came && carrier.idle()) {
            self.end_came = false;
            self.intake.end().map_err(here)?;
            carrier.ended();
        }
        Ok(())
    }
}

/// What comes next beside the connection; never, when nothing does.
async fn carried(carrier: &mut Option<Box<dyn Carrier>>) -> Carried {
    match carrier {
        Some(carrier) => carrier.next().await,
        None => std::future::pending().await,
    }
}

/// The next change of what is behind this member; never, when nothing is.
async fn changed(downstream: &mut Option<Downstream>) -> Phase {
    match downstream {
        Some(downstream) => downstream.changed().await,
        None => std::future::pending().await,
    }
}
