//! The connections to the next member of a chain: how they are made, its replies, and whether it runs.
//!
//! Decides that the next member is unreachable, lost or silent. A failure that it reports itself takes precedence over the state of its
//! connections, so a write error waits for its last message. Never reads a bucket's bytes, and holds no more of them than it was given.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncReadExt;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::TcpOptions;
use super::frame::StreamId;
use super::frame::{Frame, Parser};
use super::route::{Count, Route};
use super::socket::{self, Link, Reader};
use super::writer::{Item, Life, Sent, send_items};
use weightsync_core::protocol::{BucketHeader, DataHello, LentPiece, MemberName, StreamFailure};

/// Time to send the next member the reason for a cancelled stream, and time for it to report why it closed a connection.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// State of the rest of the chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    Opening,
    Admitted,
    Done,
    Failed(StreamFailure),
}

/// Who sends signs of life to the rest of the chain while nothing else is sent.
pub(super) enum Alive {
    /// The connection by itself: a leader may wait for its trainer without a limit.
    ByItself,
    /// Only [`Downstream::alive`]: a member whose store blocks must appear silent.
    WhenReported,
}

/// The rest of the chain, seen from the previous member. Dropping it cancels the stream.
pub(crate) struct Downstream {
    route: Route,
    phase: watch::Receiver<Phase>,
    abort: watch::Sender<Option<StreamFailure>>,
    /// One for each possible connection.
    alive: Vec<Arc<Notify>>,
    /// Numbers of lent pieces that the next member has copied.
    taken: Option<mpsc::UnboundedReceiver<u32>>,
    on_drop: StreamFailure,
}

/// Interval between signs of life of a running member.
pub(super) fn alive_period(silence: Duration) -> Duration {
    (silence / 4).clamp(Duration::from_millis(5), Duration::from_secs(1))
}

impl Downstream {
    /// Begins to open the rest of the chain: `hello.to` at `address` and all later members. `on_drop` is the message that it gets when this
    /// is dropped.
    pub(super) fn start(hello: DataHello, address: String, options: Arc<TcpOptions>, alive: Alive, on_drop: StreamFailure) -> Self {
        // Payloads outside of the connections need no further ones.
        let (route, to_send) = Route::new(if hello.carried.is_some() { 1 } else { options.lanes });
        let (phase_sender, phase) = watch::channel(Phase::Opening);
        let (abort, aborted) = watch::channel(None);
        let reported: Vec<Arc<Notify>> = to_send.iter().map(|_| Arc::default()).collect();
        let by_itself = matches!(alive, Alive::ByItself).then(|| alive_period(Duration::from_millis(hello.silence_ms)));
        let queues = to_send.into_iter().zip(&reported);
        let queues = queues.map(|(items, reported)| Queue { items, life: Life { by_itself, reported: reported.clone() } }).collect();
        let count = route.count.clone();
        let (take, taken) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let connection = Connection { hello, address, options, phase: phase_sender, aborted, count, take };
            connection.run(queues).await;
        });
        Self { route, phase, abort, alive: reported, taken: Some(taken), on_drop }
    }

    /// Sends a sign of life to the rest of the chain; has no effect while there is something to send.
    pub(super) fn alive(&self) {
        self.alive.iter().for_each(|reported| reported.notify_one());
    }

    // The queue to the rest of the chain, used once it was admitted. Items after a failure are dropped.

    pub(crate) fn head(&mut self, header: BucketHeader) {
        self.route.head(header);
    }

    /// The next bytes of a bucket; `sent` is dropped when they are sent.
    pub(super) fn part(&mut self, part: Bytes, sent: Option<&Sent>) {
        self.route.part(part, sent);
    }

    pub(crate) fn digest(&mut self, digest: u128) {
        self.route.digest(digest);
    }

    /// Place of the next bytes of the bucket in memory that was lent to the next member.
    pub(crate) fn lent(&mut self, piece: LentPiece) {
        self.route.lent(piece);
    }

    /// Receiver of the numbers of lent pieces that the next member has copied; only once.
    pub(crate) fn taken(&mut self) -> Option<mpsc::UnboundedReceiver<u32>> {
        self.taken.take()
    }

    pub(crate) fn end(&mut self) {
        self.route.end();
    }

    /// The next change of phase, once each.
    pub(super) async fn changed(&mut self) -> Phase {
        match self.phase.changed().await {
            Ok(()) => self.phase.borrow_and_update().clone(),
            // The task has ended and sent its last phase before.
            Err(_) => pending().await,
        }
    }

    /// Waits until the whole rest of the chain is open.
    pub(crate) async fn admitted(&mut self) -> Result<(), StreamFailure> {
        self.until(|phase| *phase == Phase::Admitted).await
    }

    /// Waits until the rest of the chain confirmed that it stored everything.
    pub(crate) async fn done(&mut self) -> Result<(), StreamFailure> {
        self.until(|phase| *phase == Phase::Done).await
    }

    pub(crate) async fn failed(&mut self) -> StreamFailure {
        match self.until(|_| false).await {
            Err(failure) => failure,
            Ok(()) => pending().await,
        }
    }

    async fn until(&mut self, wanted: impl Fn(&Phase) -> bool) -> Result<(), StreamFailure> {
        let reached = self.phase.wait_for(|phase| wanted(phase) || matches!(phase, Phase::Failed(_))).await;
        match reached.map(|phase| phase.clone()) {
            Ok(Phase::Failed(failure)) => Err(failure),
            Ok(_) => Ok(()),
            // The task ended without a failure: it was cancelled with its runtime.
            Err(_) => Err(StreamFailure::Cancelled),
        }
    }

    /// Sends the rest of the chain the reason for the end of the stream.
    pub(crate) fn abort(&mut self, failure: StreamFailure) {
        self.abort.send_if_modified(|reported| {
            let first = reported.is_none();
            reported.get_or_insert(failure);
            first
        });
    }
}

impl Drop for Downstream {
    fn drop(&mut self) {
        self.abort(self.on_drop.clone());
    }
}

/// The queue of one connection, and its signs of life.
struct Queue {
    items: mpsc::UnboundedReceiver<Item>,
    life: Life,
}

/// The task of a [`Downstream`].
struct Connection {
    hello: DataHello,
    address: String,
    options: Arc<TcpOptions>,
    phase: watch::Sender<Phase>,
    aborted: watch::Receiver<Option<StreamFailure>>,
    count: Count,
    take: mpsc::UnboundedSender<u32>,
}

impl Connection {
    async fn run(self, queues: Vec<Queue>) {
        let mut aborted = self.aborted.clone();
        let given_up = async {
            if aborted.wait_for(Option::is_some).await.is_ok() {
                sleep(LAST_WORDS).await;
            }
        };
        let connection = Arc::new(self);
        tokio::select! {
            outcome = connection.talk(queues) => {
                if let Err(failure) = outcome {
                    connection.phase.send_replace(Phase::Failed(failure));
                }
            }
            () = given_up => {}
        }
    }

    async fn talk(self: &Arc<Self>, queues: Vec<Queue>) -> Result<(), StreamFailure> {
        let silence = Duration::from_millis(self.hello.silence_ms);
        let wanted = queues.len();
        let mut queues = queues.into_iter();
        let Some(Queue { items, life }) = queues.next() else { return Err(self.unreachable("no connection was wanted".to_owned())) };
        let opened = self.connect(async |link| socket::write_hello(link, &self.hello, wanted).await).await;
        let Link { reader, writer, .. } = opened.map_err(|cause| self.unreachable(cause))?;
        let (agreed, more) = oneshot::channel();
        let lent = self.hello.carried.as_ref().is_some_and(|carried| carried.lent);
        let take = lent.then_some(&self.take);
        let answers = Answers { hello: &self.hello, silence, phase: &self.phase, count: &self.count, wanted, agreed: Some(agreed), take };
        let mut writing = std::pin::pin!(send_items(writer, items, self.aborted.clone(), life));
        let mut reading = std::pin::pin!(answers.read(reader));
        let mut others = std::pin::pin!(self.other_lanes(more, queues));
        let answered = tokio::select! {
            outcome = &mut reading => outcome,
            // Everything was sent, or the connection broke: the last message of the next member decides.
            _ = &mut writing => reading.await,
            failure = &mut others => match timeout(LAST_WORDS, &mut reading).await {
                // It closed all connections because one broke.
                Err(_) | Ok(Err(Broken::Seen(_))) => Err(Broken::Seen(failure)),
                Ok(outcome) => outcome,
            },
        };
        answered.map_err(|(Broken::Said(failure) | Broken::Seen(failure))| failure)
    }

    /// Opens the further connections that both sides agreed on, and sends on them; ends with the first failure.
    async fn other_lanes(
        self: &Arc<Self>,
        agreed: oneshot::Receiver<(usize, StreamId)>,
        queues: impl Iterator<Item = Queue>,
    ) -> StreamFailure {
        let Ok((count, id)) = agreed.await else { return pending().await };
        let mut lanes = JoinSet::new();
        for (number, queue) in (1..).zip(queues).take(count.saturating_sub(1)) {
            lanes.spawn(self.clone().lane(id, number, queue));
        }
        while let Some(ended) = lanes.join_next().await {
            if let Ok(Err(failure)) = ended {
                return failure;
            }
        }
        pending().await
    }

    async fn lane(self: Arc<Self>, id: StreamId, number: u32, queue: Queue) -> Result<(), StreamFailure> {
        let named = |cause: String| format!("connection {number}: {cause}");
        let opened = self.connect(async |link| socket::write_lane(link, &id, number).await).await;
        let Link { mut reader, writer, .. } = opened.map_err(|cause| self.unreachable(named(cause)))?;
        let mut answer = [0; 1];
        let cause = tokio::select! {
            sent = send_items(writer, queue.items, self.aborted.clone(), queue.life) => match sent {
                Ok(()) => return Ok(()),
                Err(error) => error.to_string(),
            },
            // No replies come on it: this is its end.
            read = reader.read(&mut answer) => read.err().map_or_else(|| "it closed the connection".to_owned(), |error| error.to_string()),
        };
        Err(lost(&self.hello.to, &self.hello.from, &named(cause)))
    }

    fn unreachable(&self, cause: String) -> StreamFailure {
        StreamFailure::Unreachable { peer: self.hello.to.clone(), cause }
    }

    /// Makes a connection and begins it, or returns why that is not possible.
    async fn connect(&self, begin: impl AsyncFnOnce(&mut Link) -> io::Result<()>) -> Result<Link, String> {
        let silence = Duration::from_millis(self.hello.silence_ms);
        let opened = timeout(silence, async {
            let mut link = socket::connect(&self.hello.to, self.hello.tls, &self.address, &self.options).await?;
            begin(&mut link).await?;
            Ok::<_, io::Error>(link)
        });
        match opened.await {
            Ok(Ok(link)) => Ok(link),
            Ok(Err(error)) => Err(format!("{}: {error}", self.address)),
            Err(_) => Err(format!("{}: no answer within {silence:?}", self.address)),
        }
    }
}
/// The messages of the next member, and their effect on the phase.
struct Answers<'a> {
    hello: &'a DataHello,
    silence: Duration,
    phase: &'a watch::Sender<Phase>,
    count: &'a Count,
    /// Connections that this side would like to use.
    wanted: usize,
    /// Sends once how many the next member agreed to.
    agreed: Option<oneshot::Sender<(usize, StreamId)>>,
    /// Receives the numbers of copied lent pieces, if payloads are in lent memory.
    take: Option<&'a mpsc::UnboundedSender<u32>>,
}

/// Why no more replies come: reported by the next member, or seen from its connection.
enum Broken {
    Said(StreamFailure),
    Seen(StreamFailure),
}

impl Answers<'_> {
    /// Reads replies until the chain is done or failed.
    async fn read(mut self, mut reader: Reader) -> Result<(), Broken> {
        let DataHello { from, to, .. } = self.hello;
        let lost = |cause: String| Broken::Seen(lost(to, from, &cause));
        let mut parser = Parser::default();
        let mut buffer = vec![0; 4096];
        let mut deadline = Instant::now() + self.silence;
        loop {
            let mut input = match timeout_at(deadline, reader.read(&mut buffer)).await {
                Err(_) => return Err(Broken::Seen(StreamFailure::Silent { peer: to.clone(), silence_ms: millis(self.silence) })),
                Ok(Err(error)) => return Err(lost(error.to_string())),
                Ok(Ok(0)) => return Err(lost("it closed the connection".to_owned())),
                Ok(Ok(length)) => buffer.get(..length).unwrap_or_default(),
            };
            deadline = Instant::now() + self.silence;
            while let Some(frame) = parser.next(&mut input).map_err(|error| lost(error.to_string()))? {
                match frame {
                    Frame::Alive => {}
                    Frame::Lanes(count, id) => {
                        let count = usize::try_from(count).ok().filter(|count| (2..=self.wanted).contains(count));
                        let (Some(count), Some(agreed)) = (count, self.agreed.take()) else {
                            return Err(lost("it asked for connections that were not offered".to_owned()));
                        };
                        self.count.set(count);
                        let _ = agreed.send((count, id));
                    }
                    Frame::Taken(number) if self.take.is_some() => {
                        // A leader that no longer waits has ended its stream.
                        let _ = self.take.map(|take| take.send(number));
                    }
                    Frame::Admitted => _ = self.phase.send_replace(Phase::Admitted),
                    Frame::Done => {
                        self.phase.send_replace(Phase::Done);
                        return Ok(());
                    }
                    Frame::Failure(failure) => return Err(Broken::Said(failure)),
                    other => return Err(lost(format!("it answered {other:?}"))),
                }
            }
        }
    }
}

/// A connection ended in the middle. `peer` is at fault as far as this end can see; the other end may see it the other way round, because
/// both see the same reset. So the message names both.
pub(super) fn lost(peer: &MemberName, seen_by: &MemberName, cause: &str) -> StreamFailure {
    StreamFailure::Lost { peer: peer.clone(), cause: format!("its connection with {seen_by} ended: {cause}") }
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
