//! One stream into this member: its bytes go to the store and, while they arrive, to the next member of the chain.
//!
//! Decides which member is at fault when the stream stops: the previous one (closed, silent), the next one (by its connection's message),
//! or this one (its store refused, a digest disagreed). It is one task. So a store that blocks makes this member silent, and no separate
//! timer hides that.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::TcpOptions;
use super::downstream::{Alive, Downstream, Phase, alive_period, lost, millis};
use super::frame::Frame;
use super::inlet::{Arrived, Event, Inlet, Many, One, Over, Room};
use super::lanes::Meeting;
use super::socket::{Link, Writer};
use crate::carrier::{Carried, Carrier, Carrying, Relayed};
use crate::intake::Intake;
use crate::{Admission, BucketStore};
use weightsync_core::protocol::{DataHello, LentPiece, MemberName, Refusal, RefusalCode, StreamFailure};
use weightsync_net::identity::PeerIdentity;

/// Limits of the silence in a hello.
const SILENCE: std::ops::RangeInclusive<u64> = 10..=600_000;
/// A failed stream is read and discarded for at most this long, so that the close does not overtake the message with the reason.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The checks and limits for an incoming stream.
pub(super) struct Doors<'a> {
    pub(super) admission: &'a dyn Admission,
    pub(super) carrying: &'a Carrying,
    pub(super) meeting: &'a Meeting,
}

/// Serves one stream after its hello, to its end, over so many connections.
pub(super) async fn serve(
    link: Link,
    hello: DataHello,
    lanes: usize,
    doors: Doors<'_>,
    options: Arc<TcpOptions>,
    room: Option<OwnedSemaphorePermit>,
) {
    let Link { reader, writer, secured, peer } = link;
    let silence = Duration::from_millis(hello.silence_ms);
    let mut upstream = Upstream { writer: Some(writer), silence };
    let buffers = if lanes == 1 && hello.rest.is_empty() { 1 } else { options.receive_buffers.max(2) };
    let space = Room { buffers, size: options.receive_buffer };
    let admitted = admit(&hello, (secured, peer.as_ref()), doors.admission, room.is_some());
    match admitted.and_then(|store| Ok((carrier(&hello, doors.carrying, &store)?, store))) {
        Err(refusal) => {
            upstream.say(Frame::Failure(StreamFailure::Refused { peer: hello.to, refusal })).await;
            upstream.close(Inlet::One(One::new(reader, space, silence))).await;
        }
        Ok((carrier, store)) => {
            let inlet = if lanes > 1 {
                let expected = doors.meeting.open(lanes, secured, peer);
                upstream.say(Frame::Lanes(u32::try_from(lanes).unwrap_or(u32::MAX), expected.id)).await;
                Inlet::Many(Many::new(reader, lanes, expected, space, silence))
            } else {
                Inlet::One(One::new(reader, space, silence))
            };
            Session::new(hello, (store, carrier), options, upstream, inlet).run().await;
        }
    }
}

fn carrier(hello: &DataHello, carrying: &Carrying, store: &Arc<dyn BucketStore>) -> Result<Option<Box<dyn Carrier>>, Refusal> {
    let Some(carried) = &hello.carried else { return Ok(None) };
    let none = || {
        let message = "the payloads are to travel outside of the connections, and this member has no way to them".to_owned();
        Refusal { code: RefusalCode::Invalid, message }
    };
    carrying.of(carried).ok_or_else(none)?.receive(hello, store).map(Some)
}

fn admit(
    hello: &DataHello,
    (secured, peer): (bool, Option<&PeerIdentity>),
    admission: &dyn Admission,
    room: bool,
) -> Result<Arc<dyn BucketStore>, Refusal> {
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
    admission.admit(hello, peer)
}

/// The messages to the previous member.
struct Upstream {
    /// `None` once it broke.
    writer: Option<Writer>,
    silence: Duration,
}

impl Upstream {
    /// Sends a message to the previous member. The reader notices a failure.
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

    /// Closes so that the last message arrives: a socket that is closed with unread bytes is reset.
    async fn close(mut self, inlet: Inlet) {
        let _ = timeout(LAST_WORDS, async {
            if let Some(writer) = self.writer.as_mut() {
                let _ = writer.shutdown().await;
            }
            inlet.drain().await;
        })
        .await;
    }
}

/// Why a session ends early, and whether the previous member knows it already.
struct Ending {
    failure: StreamFailure,
    reported: bool,
}

struct Session {
    me: MemberName,
    from: MemberName,
    upstream: Upstream,
    intake: Intake,
    carrier: Option<Box<dyn Carrier>>,
    /// Whether the carrier gives the messages to the next member.
    relays: bool,
    /// The end came while announced buckets were still in flight.
    end_came: bool,
    inlet: Inlet,
    downstream: Option<Downstream>,
    open_behind: bool,
    /// Whether the previous member was notified that the chain is open.
    admitted: bool,
}

impl Session {
    fn new(
        hello: DataHello,
        (store, mut carrier): (Arc<dyn BucketStore>, Option<Box<dyn Carrier>>),
        options: Arc<TcpOptions>,
        upstream: Upstream,
        inlet: Inlet,
    ) -> Self {
        let (me, from) = (hello.to.clone(), hello.from.clone());
        let intake = Intake::new(&hello, store);
        let mut rest = hello.rest.iter().cloned();
        let offered = carrier.as_ref().and_then(|carrier| carrier.offers());
        let mut downstream = rest.next().map(|(name, address)| {
            let mut hello = DataHello { from: me.clone(), to: name, rest: rest.collect(), ..hello };
            if let (Some(carried), Some(offered)) = (hello.carried.as_mut(), &offered) {
                carried.fabric = Some(offered.clone());
            }
            let lost = StreamFailure::Lost { peer: me.clone(), cause: "it closed its transport".to_owned() };
            Downstream::start(hello, address, options, Alive::WhenReported, lost)
        });
        let relays = offered.is_some();
        if let (true, Some(carrier), Some(taken)) = (relays, carrier.as_mut(), downstream.as_mut().and_then(Downstream::taken)) {
            carrier.taken(taken);
        }
        let open_behind = downstream.is_none();
        Self { me, from, upstream, intake, carrier, relays, end_came: false, inlet, downstream, open_behind, admitted: false }
    }

    async fn run(mut self) {
        if let Err(Ending { failure, reported }) = self.receive().await {
            self.intake.broken(&failure);
            if let Some(downstream) = self.downstream.as_mut() {
                downstream.abort(failure.clone());
            }
            if !reported {
                self.upstream.say(Frame::Failure(failure)).await;
            }
        } else {
            self.upstream.say(Frame::Done).await;
        }
        self.upstream.close(self.inlet).await;
    }

    async fn receive(&mut self) -> Result<(), Ending> {
        let mut ticks = interval(alive_period(self.upstream.silence));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut chain_done = self.downstream.is_none();
        self.admit().await;
        // After the end, the loss of the previous member is no failure any more.
        let mut listening = true;
        // While the store has no room, the previous member is not read. It waits then, and still receives signs of life.
        let (mut has_room, mut room) = (false, self.intake.room());
        while !(chain_done && self.intake.ended()) {
            tokio::select! {
                biased;
                phase = changed(&mut self.downstream) => match phase {
                    Phase::Opening => {}
                    Phase::Admitted => {
                        self.open_behind = true;
                        self.admit().await;
                    }
                    Phase::Done => chain_done = true,
                    Phase::Failed(failure) => return Err(Ending { failure, reported: false }),
                },
                _ = ticks.tick() => {
                    self.upstream.say(Frame::Alive).await;
                    self.downstream.iter().for_each(Downstream::alive);
                }
                () = &mut room, if !has_room => has_room = true,
                arrived = self.inlet.next(), if listening && has_room => {
                    match arrived {
                        Ok(Arrived::Bytes(length)) => self.take(length)?,
                        Ok(Arrived::Event(event)) => self.event(event)?,
                        Ok(Arrived::Lane) => self.admit().await,
                        // After the end, nothing more is expected of the previous member.
                        Err(Over::Closed(_) | Over::Silent) if self.intake.ended() || self.end_came => listening = false,
                        Err(over) => return Err(self.over(over)),
                    }
                    (has_room, room) = (false, self.intake.room());
                }
                // Comes after the input: heads that wait would delay the broadcasts of all members.
                carried = carried(&mut self.carrier) => match carried {
                    Carried::Taken(number) => self.upstream.say(Frame::Taken(number)).await,
                    carried => self.carried(carried)?,
                },
            }
        }
        Ok(())
    }

    /// Notifies the previous member that the chain is open, once it is.
    async fn admit(&mut self) {
        if self.open_behind && self.inlet.whole() && !std::mem::replace(&mut self.admitted, true) {
            self.upstream.say(Frame::Admitted).await;
        }
    }

    /// Why nothing more comes from the previous member.
    fn over(&self, over: Over) -> Ending {
        match over {
            Over::Closed(cause) => Ending { failure: lost(&self.from, &self.me, &cause), reported: true },
            Over::Failure(failure) => Ending { failure, reported: true },
            Over::Silent => {
                let silence_ms = millis(self.upstream.silence);
                Ending { failure: StreamFailure::Silent { peer: self.from.clone(), silence_ms }, reported: false }
            }
            Over::Bad(error) => self.nonsense(&error.to_string()),
        }
    }

    fn nonsense(&self, what: &str) -> Ending {
        let refusal = Refusal { code: RefusalCode::Invalid, message: what.to_owned() };
        Ending { failure: StreamFailure::Refused { peer: self.me.clone(), refusal }, reported: false }
    }

    /// Processes the first `length` bytes of the buffer of the one connection.
    fn take(&mut self, length: usize) -> Result<(), Ending> {
        let Inlet::One(one) = &mut self.inlet else { return Ok(()) };
        let Some(buffer) = one.buffer.take() else { return Ok(()) };
        if self.downstream.is_none() {
            let outcome = self.frames(buffer.as_ref().get(..length).unwrap_or_default(), |_| None);
            if let Inlet::One(one) = &mut self.inlet {
                one.buffer = Some(buffer);
            }
            return outcome;
        }
        let bytes = buffer.freeze();
        let input = bytes.slice(..length);
        self.frames(&input, |part| Some(input.slice_ref(part)))
    }

    fn frames(&mut self, mut input: &[u8], forward: impl Fn(&[u8]) -> Option<Bytes>) -> Result<(), Ending> {
        loop {
            let Inlet::One(one) = &mut self.inlet else { return Ok(()) };
            let frame = match one.parser.next(&mut input) {
                Ok(Some(frame)) => frame,
                Ok(None) => return Ok(()),
                Err(error) => return Err(self.over(Over::Bad(error))),
            };
            match frame {
                Frame::Part(part) => {
                    let forward = forward(part);
                    self.begun()?;
                    if let (Some(downstream), Some(part)) = (&mut self.downstream, forward) {
                        downstream.part(part, None);
                    }
                    self.intake.part(part).map_err(here)?;
                }
                Frame::Head(header) => self.event(Event::Head(header))?,
                Frame::Digest(digest) => self.event(Event::Digest(digest))?,
                Frame::End => self.event(Event::End)?,
                Frame::Failure(failure) => return Err(self.over(Over::Failure(failure))),
                Frame::Lent(piece) => self.lent(piece)?,
                Frame::Alive | Frame::Admitted | Frame::Done | Frame::Cut | Frame::Lanes(..) | Frame::Taken(_) => {}
            }
        }
    }

    /// Processes the next piece of the stream. The next member gets its bytes before this one copies them.
    fn event(&mut self, event: Event) -> Result<(), Ending> {
        self.begun()?;
        if let Some(downstream) = self.downstream.as_mut().filter(|_| !self.relays) {
            match &event {
                Event::Head(header) => downstream.head(*header),
                Event::Part(part) => downstream.part(part.clone(), None),
                Event::Digest(digest) => downstream.digest(*digest),
                Event::End => downstream.end(),
                Event::Block(_) | Event::Over(_) => {}
            }
        }
        match (event, self.carrier.as_mut()) {
            (Event::Head(header), Some(carrier)) => {
                self.intake.carried_head(header).map_err(here)?;
                carrier.head(header);
                Ok(())
            }
            (Event::Digest(digest), Some(carrier)) => {
                carrier.digest(digest);
                Ok(())
            }
            (Event::End, Some(carrier)) if !carrier.idle() => {
                self.end_came = true;
                Ok(())
            }
            (Event::End, Some(_)) => self.carried_end(),
            (Event::Head(header), None) => self.intake.head(header).map_err(here),
            (Event::Part(part), _) => self.intake.hashed_part(&part).map_err(here),
            (Event::Block(digest), _) => self.intake.block(digest).map_err(here),
            (Event::Digest(digest), None) => self.intake.digest(digest).map_err(here),
            (Event::End, None) => self.intake.end().map_err(here),
            (Event::Over(over), _) => Err(self.over(over)),
        }
    }

    /// Place of the next bytes of the bucket in memory that was lent to this member.
    fn lent(&mut self, piece: LentPiece) -> Result<(), Ending> {
        self.begun()?;
        let Some(carrier) = self.carrier.as_mut() else { return Err(self.nonsense("bytes in memory that was never lent")) };
        carrier.lent(piece);
        Ok(())
    }

    /// An event of a payload outside of the connection.
    fn carried(&mut self, carried: Carried) -> Result<(), Ending> {
        match carried {
            Carried::Part(offset, bytes) => self.intake.carried_part(offset, &bytes).map_err(here)?,
            Carried::Device(bucket) => self.intake.carried_device(bucket).map_err(here)?,
            Carried::Whole(header, digest) => self.intake.carried_whole(&header, digest).map_err(here)?,
            Carried::Failed(failure) => return Err(here(failure)),
            Carried::Relay(relayed) => {
                let Some(downstream) = &mut self.downstream else { return Ok(()) };
                match relayed {
                    Relayed::Head(header) => downstream.head(header),
                    Relayed::Lent(piece) => downstream.lent(piece),
                    Relayed::Digest(digest) => downstream.digest(digest),
                }
            }
            // The task that waits for it sends it upstream.
            Carried::Taken(_) => {}
        }
        if self.end_came && self.carrier.as_ref().is_some_and(|carrier| carrier.idle()) {
            self.end_came = false;
            self.carried_end()?;
        }
        Ok(())
    }

    /// All payloads outside of the connection were passed on, and the end came.
    fn carried_end(&mut self) -> Result<(), Ending> {
        if let Some(downstream) = self.downstream.as_mut().filter(|_| self.relays) {
            downstream.end();
        }
        self.intake.end().map_err(here)?;
        if let Some(carrier) = self.carrier.as_mut() {
            carrier.ended();
        }
        Ok(())
    }

    /// A member that sends before the chain is open does not know the number of connections.
    fn begun(&self) -> Result<(), Ending> {
        if self.admitted { Ok(()) } else { Err(self.nonsense("the stream began before it was admitted")) }
    }
}

fn here(failure: StreamFailure) -> Ending {
    Ending { failure, reported: false }
}

/// The next event of payloads outside of the connection; pending without end if there are none.
async fn carried(carrier: &mut Option<Box<dyn Carrier>>) -> Carried {
    match carrier {
        Some(carrier) => carrier.next().await,
        None => std::future::pending().await,
    }
}

/// The next change of the rest of the chain; pending without end if there is no next member.
async fn changed(downstream: &mut Option<Downstream>) -> Phase {
    match downstream {
        Some(downstream) => downstream.changed().await,
        None => std::future::pending().await,
    }
}
