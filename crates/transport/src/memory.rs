//! The in-process transport: the reference that says what a chain does, against which the others are tested, and the data path of
//! tests that need no socket.
//!
//! Members meet in a [`MemoryNetwork`]. A bucket is handed to one member after the other, each in a task of its own, so a member that
//! blocks or dies is seen as on a wire. It never copies a bucket and never works ahead.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::intake::Intake;
use super::{Admission, BucketSink, MOST_AT_ONCE, Payload, Transport, TransportError};
use weightsync_core::protocol::{BucketHeader, DataHello, MemberName, StreamFailure};

/// Where members of one process find each other by name.
#[derive(Clone, Default)]
pub struct MemoryNetwork(Arc<Mutex<HashMap<String, Listener>>>);

#[derive(Clone)]
struct Listener {
    inbox: mpsc::UnboundedSender<Opening>,
    gone: CancellationToken,
}

/// Asks a member in.
struct Opening {
    hello: DataHello,
    steps: mpsc::Receiver<Step>,
    admitted: oneshot::Sender<Result<(), StreamFailure>>,
}

/// One thing a member is to do with the stream, and where it says that it did.
struct Step {
    work: Work,
    done: oneshot::Sender<Result<(), StreamFailure>>,
}

enum Work {
    Bucket(BucketHeader, Bytes, u128),
    End,
    Broken(StreamFailure),
}

/// A member of a [`MemoryNetwork`].
pub struct MemoryTransport {
    network: MemoryNetwork,
    address: String,
    /// Ends the member's tasks when the transport is dropped.
    _gone: DropGuard,
}

impl MemoryNetwork {
    fn table(&self) -> std::sync::MutexGuard<'_, HashMap<String, Listener>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemoryTransport {
    /// Joins the network under a name; a member that had it before is replaced. Must be called on a tokio runtime, which runs the member.
    pub fn new(network: &MemoryNetwork, address: &str, admission: Arc<dyn Admission>) -> Self {
        let (inbox, mut openings) = mpsc::unbounded_channel::<Opening>();
        let gone = CancellationToken::new();
        network.table().insert(address.to_owned(), Listener { inbox, gone: gone.clone() });
        let ended = gone.clone();
        tokio::spawn(ended.clone().run_until_cancelled_owned(async move {
            while let Some(opening) = openings.recv().await {
                tokio::spawn(ended.clone().run_until_cancelled_owned(member(opening, admission.clone())));
            }
        }));
        Self { network: network.clone(), address: address.to_owned(), _gone: gone.drop_guard() }
    }
}

/// One stream into one member.
async fn member(opening: Opening, admission: Arc<dyn Admission>) {
    let Opening { hello, mut steps, admitted } = opening;
    let store = match admission.admit(&hello) {
        Ok(store) => store,
        Err(refusal) => {
            let _ = admitted.send(Err(StreamFailure::Refused { peer: hello.to, refusal }));
            return;
        }
    };
    let mut intake = Intake::new(hello.to, store);
    let _ = admitted.send(Ok(()));
    while let Some(Step { work, done }) = steps.recv().await {
        let outcome = match work {
            Work::Bucket(header, data, digest) => {
                let mut taken = intake.head(header);
                for part in data.chunks(usize::try_from(MOST_AT_ONCE).unwrap_or(usize::MAX)) {
                    intake.room().await;
                    taken = taken.and_then(|()| intake.part(part));
                }
                taken.and_then(|()| intake.digest(digest))
            }
            Work::End => intake.end(),
            Work::Broken(failure) => {
                intake.broken(&failure);
                Ok(())
            }
        };
        let _ = done.send(outcome);
    }
    let lost = StreamFailure::Lost { peer: hello.from, cause: "it closed the stream in the middle".to_owned() };
    intake.broken(&lost);
}

#[async_trait]
impl Transport for MemoryTransport {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn address(&self) -> String {
        self.address.clone()
    }

    async fn open(&self, hello: DataHello, first: &str) -> Result<Box<dyn BucketSink>, TransportError> {
        let mut chain = Chain { members: Vec::new(), silence: Duration::from_millis(hello.silence_ms), failure: None, ended: false };
        let mut to = vec![(hello.to.clone(), first.to_owned())];
        to.extend(hello.rest.iter().cloned());
        let mut from = hello.from.clone();
        for (position, (name, address)) in to.iter().enumerate() {
            let rest = to.iter().skip(position + 1).cloned().collect();
            let hello = DataHello { from: std::mem::replace(&mut from, name.clone()), to: name.clone(), rest, ..hello.clone() };
            let listener = self.network.table().get(address).cloned();
            if let Err(failure) = chain.admit(hello, listener).await {
                return Err(chain.fail(failure));
            }
        }
        Ok(Box::new(chain))
    }
}

/// The leader's end.
struct Chain {
    members: Vec<Member>,
    silence: Duration,
    failure: Option<StreamFailure>,
    ended: bool,
}

struct Member {
    name: MemberName,
    steps: mpsc::Sender<Step>,
}

impl Chain {
    async fn admit(&mut self, hello: DataHello, listener: Option<Listener>) -> Result<(), StreamFailure> {
        let name = hello.to.clone();
        let unreachable = |cause: &str| StreamFailure::Unreachable { peer: name.clone(), cause: cause.to_owned() };
        let Some(listener) = listener else { return Err(unreachable("no member listens under this name")) };
        let (steps, work) = mpsc::channel(1);
        let (admitted, answer) = oneshot::channel();
        let opening = Opening { hello, steps: work, admitted };
        if listener.gone.is_cancelled() || listener.inbox.send(opening).is_err() {
            return Err(unreachable("nobody listens there any more"));
        }
        match timeout(self.silence, answer).await {
            Ok(Ok(Ok(()))) => {
                self.members.push(Member { name, steps });
                Ok(())
            }
            Ok(Ok(Err(failure))) => Err(failure),
            Ok(Err(_)) => Err(lost(&name)),
            Err(_) => Err(silent(&name, self.silence)),
        }
    }

    async fn each(&mut self, work: impl Fn() -> Work) -> Result<(), TransportError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        let mut outcome = Ok(());
        for member in &self.members {
            outcome = member.step(work(), self.silence).await;
            if outcome.is_err() {
                break;
            }
        }
        outcome.map_err(|failure| self.fail(failure))
    }

    /// Tells every member why the stream is over.
    fn fail(&mut self, failure: StreamFailure) -> TransportError {
        for member in &self.members {
            let (done, _) = oneshot::channel();
            let _ = member.steps.try_send(Step { work: Work::Broken(failure.clone()), done });
        }
        self.failure = Some(failure.clone());
        failure.into()
    }
}

impl Member {
    async fn step(&self, work: Work, silence: Duration) -> Result<(), StreamFailure> {
        let (done, answer) = oneshot::channel();
        let asked = async {
            self.steps.send(Step { work, done }).await.map_err(|_| lost(&self.name))?;
            answer.await.map_err(|_| lost(&self.name))?
        };
        timeout(silence, asked).await.unwrap_or_else(|_| Err(silent(&self.name, silence)))
    }
}

fn lost(name: &MemberName) -> StreamFailure {
    StreamFailure::Lost { peer: name.clone(), cause: "it closed its transport".to_owned() }
}

fn silent(name: &MemberName, silence: Duration) -> StreamFailure {
    StreamFailure::Silent { peer: name.clone(), silence_ms: u64::try_from(silence.as_millis()).unwrap_or(u64::MAX) }
}

#[async_trait]
impl BucketSink for Chain {
    async fn send(&mut self, header: BucketHeader, data: Payload, digest: u128) -> Result<(), TransportError> {
        let Payload::Host(data) = data else { return Err(TransportError::on_a_gpu()) };
        self.each(|| Work::Bucket(header, data.clone(), digest)).await
    }

    async fn failed(&mut self) -> TransportError {
        if let Some(failure) = &self.failure {
            return failure.clone().into();
        }
        if self.members.is_empty() {
            return std::future::pending().await;
        }
        let watches = self.members.iter().map(|member| Box::pin(async { (member.steps.closed().await, lost(&member.name)).1 }));
        let (failure, _, _) = futures::future::select_all(watches).await;
        self.fail(failure)
    }

    async fn finish(mut self: Box<Self>) -> Result<(), TransportError> {
        self.each(|| Work::End).await?;
        self.ended = true;
        Ok(())
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        if !self.ended && self.failure.is_none() {
            self.fail(StreamFailure::Cancelled);
        }
    }
}
