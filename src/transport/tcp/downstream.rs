//! The connection to the next member of a chain: what is sent down, what is answered, and whether the next member lives.
//!
//! Decides that the next member is unreachable, lost or silent; a failure that it reports itself wins over what its connection looks
//! like, so a write error waits for its last words. Never reads a bucket's bytes, and holds no more of them than it was given.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::TcpOptions;
use super::frame::{Frame, Parser, put_part_start};
use super::socket::{self, Link};
use crate::protocol::{BucketHeader, DataHello, MemberName, StreamFailure};

/// Bytes of a leader's bucket in one part: a sign of life or a failure need not wait for more than this.
const PART: usize = 1 << 20;
/// A stream that is given up still tells the next member why, within this long.
const LAST_WORDS: Duration = Duration::from_millis(500);

type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// Something to be sent down the chain.
pub(in crate::transport) enum Item {
    Head(BucketHeader),
    Part(Bytes),
    Digest(u128),
    /// A whole bucket; the permit is given back when it was sent.
    Bucket(BucketHeader, Bytes, u128, OwnedSemaphorePermit),
    End,
}

/// Where the rest of the chain stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    Opening,
    Admitted,
    Done,
    Failed(StreamFailure),
}

/// Who shows the rest of the chain that this side lives while nothing else is to be sent.
pub(super) enum Alive {
    /// The connection by itself: a leader may wait for its trainer as long as it likes.
    ByItself,
    /// Only [`Downstream::alive`]: a member whose store blocks must look as silent as it is.
    WhenTold,
}

/// The rest of the chain, seen from the member before it. Dropping it gives the stream up.
pub(in crate::transport) struct Downstream {
    items: mpsc::UnboundedSender<Item>,
    phase: watch::Receiver<Phase>,
    abort: watch::Sender<Option<StreamFailure>>,
    alive: Arc<Notify>,
    on_drop: StreamFailure,
}

/// How often a member that lives says so.
pub(super) fn alive_period(silence: Duration) -> Duration {
    (silence / 4).clamp(Duration::from_millis(5), Duration::from_secs(1))
}

impl Downstream {
    /// Begins to open the rest of the chain: `hello.to` at `address` and all behind it. `on_drop` is what it is told when this is dropped.
    pub(super) fn start(hello: DataHello, address: String, options: Arc<TcpOptions>, alive: Alive, on_drop: StreamFailure) -> Self {
        let (items, to_send) = mpsc::unbounded_channel();
        let (phase_sender, phase) = watch::channel(Phase::Opening);
        let (abort, aborted) = watch::channel(None);
        let told = Arc::new(Notify::new());
        let notified = told.clone();
        tokio::spawn(async move {
            let connection = Connection { hello, address, options, phase: phase_sender, aborted, alive, told };
            connection.run(to_send).await;
        });
        Self { items, phase, abort, alive: notified, on_drop }
    }

    /// Shows the rest of the chain that this member lives; does nothing while there is something to send.
    pub(super) fn alive(&self) {
        self.alive.notify_one();
    }

    /// Gives something to be sent. What is sent after a failure is dropped.
    pub(in crate::transport) fn send(&self, item: Item) {
        let _ = self.items.send(item);
    }

    /// The next change of phase, once each.
    pub(super) async fn changed(&mut self) -> Phase {
        match self.phase.changed().await {
            Ok(()) => self.phase.borrow_and_update().clone(),
            // The task is gone and said its last phase before.
            Err(_) => pending().await,
        }
    }

    /// Waits until the whole rest of the chain is open.
    pub(in crate::transport) async fn admitted(&mut self) -> Result<(), StreamFailure> {
        self.until(|phase| *phase == Phase::Admitted).await
    }

    /// Waits until the whole rest of the chain confirmed that it stored everything.
    pub(in crate::transport) async fn done(&mut self) -> Result<(), StreamFailure> {
        self.until(|phase| *phase == Phase::Done).await
    }

    /// Waits for a failure.
    pub(in crate::transport) async fn failed(&mut self) -> StreamFailure {
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

    /// Tells the rest of the chain why the stream is over.
    pub(in crate::transport) fn abort(&mut self, failure: StreamFailure) {
        self.abort.send_if_modified(|told| {
            let first = told.is_none();
            told.get_or_insert(failure);
            first
        });
    }
}

impl Drop for Downstream {
    fn drop(&mut self) {
        self.abort(self.on_drop.clone());
    }
}

/// The task behind a [`Downstream`].
struct Connection {
    hello: DataHello,
    address: String,
    options: Arc<TcpOptions>,
    phase: watch::Sender<Phase>,
    aborted: watch::Receiver<Option<StreamFailure>>,
    alive: Alive,
    told: Arc<Notify>,
}

impl Connection {
    async fn run(self, items: mpsc::UnboundedReceiver<Item>) {
        let mut aborted = self.aborted.clone();
        let given_up = async {
            if aborted.wait_for(Option::is_some).await.is_ok() {
                sleep(LAST_WORDS).await;
            }
        };
        let phase = self.phase.clone();
        tokio::select! {
            outcome = self.talk(items) => {
                if let Err(failure) = outcome {
                    phase.send_replace(Phase::Failed(failure));
                }
            }
            () = given_up => {}
        }
    }

    async fn talk(&self, items: mpsc::UnboundedReceiver<Item>) -> Result<(), StreamFailure> {
        let peer = self.hello.to.clone();
        let silence = Duration::from_millis(self.hello.silence_ms);
        let unreachable = |cause: String| StreamFailure::Unreachable { peer: peer.clone(), cause };
        let opened = timeout(silence, async {
            let mut link = socket::connect(&self.hello, &self.address, &self.options).await?;
            socket::write_hello(&mut link, &self.hello).await?;
            Ok::<_, io::Error>(link)
        });
        let Link { reader, writer, .. } = match opened.await {
            Ok(Ok(link)) => link,
            Ok(Err(error)) => return Err(unreachable(format!("{}: {error}", self.address))),
            Err(_) => return Err(unreachable(format!("{}: no answer within {silence:?}", self.address))),
        };
        let by_itself = matches!(self.alive, Alive::ByItself).then(|| alive_period(silence));
        let life = Life { by_itself, told: self.told.clone() };
        let mut writing = std::pin::pin!(send_items(writer, items, self.aborted.clone(), life));
        let mut reading = std::pin::pin!(read_answers(reader, &peer, silence, &self.phase));
        tokio::select! {
            outcome = &mut reading => return outcome,
            // All was said, or the connection broke: what the next member says last decides.
            _ = &mut writing => {}
        }
        reading.await
    }
}

/// Reads answers until the chain is done or failed.
async fn read_answers(
    mut reader: Box<dyn AsyncRead + Send + Unpin>,
    peer: &MemberName,
    silence: Duration,
    phase: &watch::Sender<Phase>,
) -> Result<(), StreamFailure> {
    let lost = |cause: String| StreamFailure::Lost { peer: peer.clone(), cause };
    let mut parser = Parser::default();
    let mut buffer = vec![0; 4096];
    let mut deadline = Instant::now() + silence;
    loop {
        let mut input = match timeout_at(deadline, reader.read(&mut buffer)).await {
            Err(_) => return Err(StreamFailure::Silent { peer: peer.clone(), silence_ms: millis(silence) }),
            Ok(Err(error)) => return Err(lost(error.to_string())),
            Ok(Ok(0)) => return Err(lost("it closed the connection".to_owned())),
            Ok(Ok(length)) => buffer.get(..length).unwrap_or_default(),
        };
        deadline = Instant::now() + silence;
        while let Some(frame) = parser.next(&mut input).map_err(|error| lost(error.to_string()))? {
            match frame {
                Frame::Alive => {}
                Frame::Admitted => _ = phase.send_replace(Phase::Admitted),
                Frame::Done => {
                    phase.send_replace(Phase::Done);
                    return Ok(());
                }
                Frame::Failure(failure) => return Err(failure),
                other => return Err(lost(format!("it answered {other:?}"))),
            }
        }
    }
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// When to show that this side lives.
struct Life {
    by_itself: Option<Duration>,
    told: Arc<Notify>,
}

impl Life {
    async fn due(&self) {
        match self.by_itself {
            Some(period) => sleep(period).await,
            None => self.told.notified().await,
        }
    }
}

/// Sends items, signs of life between them, and at last why the stream is over. Ends when the connection breaks or last words were said.
async fn send_items(
    mut writer: Writer,
    mut items: mpsc::UnboundedReceiver<Item>,
    mut aborted: watch::Receiver<Option<StreamFailure>>,
    life: Life,
) -> io::Result<()> {
    let mut small = Vec::with_capacity(4096);
    loop {
        let failure = aborted.borrow_and_update().clone();
        if let Some(failure) = failure {
            Frame::Failure(failure).put(&mut small);
            writer.write_all(&small).await?;
            return writer.shutdown().await;
        }
        let item = if let Ok(item) = items.try_recv() {
            item
        } else {
            // Nothing more to put into one write.
            writer.write_all(&small).await?;
            writer.flush().await?;
            small.clear();
            tokio::select! {
                biased;
                _ = aborted.changed() => continue,
                Some(item) = items.recv() => item,
                () = life.due() => {
                    Frame::Alive.put(&mut small);
                    continue;
                }
            }
        };
        match item {
            Item::Head(header) => Frame::Head(header).put(&mut small),
            Item::Digest(digest) => Frame::Digest(digest).put(&mut small),
            Item::End => Frame::End.put(&mut small),
            Item::Part(part) => send_part(&mut writer, &mut small, part).await?,
            Item::Bucket(header, mut data, digest, _sent) => {
                Frame::Head(header).put(&mut small);
                while !data.is_empty() && aborted.borrow().is_none() {
                    let part = data.split_to(data.len().min(PART));
                    send_part(&mut writer, &mut small, part).await?;
                }
                if data.is_empty() {
                    Frame::Digest(digest).put(&mut small);
                }
            }
        }
    }
}

/// Sends what waits in `small`, and a part behind it, in as few calls as the kernel takes.
async fn send_part(writer: &mut Writer, small: &mut Vec<u8>, part: Bytes) -> io::Result<()> {
    put_part_start(small, part.len());
    writer.write_all_buf(&mut Buf::chain(small.as_slice(), part)).await?;
    small.clear();
    Ok(())
}
