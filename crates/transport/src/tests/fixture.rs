//! Members for tests: a store that keeps what it receives, an admission that the test controls, and a runtime that can be lost.

pub mod fabric;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::tcp::{TcpOptions, TcpTransport};
use crate::{Admission, BucketSink, BucketStore, Fault, Transfer, Transport, TransportError};
use weightsync_core::protocol::{BucketHeader, CarriedBy, DataHello, EpochId, MemberName, Refusal, RefusalCode, UpdateId};
use weightsync_core::weights::{bucket_digest, gsum64};
use weightsync_net::identity::PeerIdentity;

/// Nothing in a test takes longer: reaching it is a failure.
pub const LONG: Duration = Duration::from_secs(180);
/// Silence limit of streams whose members all run, in ms: an emulated machine is slow.
pub const PATIENT: u64 = 60_000;

/// The calls that a member's store received.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    pub bytes: Vec<u8>,
    pub buckets: Vec<u32>,
    pub ended: bool,
    pub transfers: Vec<Transfer>,
    pub broken: Option<(Option<String>, String)>,
    /// Calls after the end.
    pub too_late: usize,
}

#[derive(Debug, Clone, Copy, Default)]
pub enum Refuse {
    #[default]
    Nothing,
    Admission,
    Write,
    Complete,
    End,
}

pub struct Record {
    pub seen: watch::Sender<Seen>,
    refuse: Refuse,
}

fn no(what: &str) -> Refusal {
    Refusal { code: RefusalCode::OutOfSpace, message: format!("no room for {what}") }
}

impl Record {
    pub fn new(refuse: Refuse) -> Arc<Self> {
        Arc::new(Self { seen: watch::channel(Seen::default()).0, refuse })
    }

    fn note(&self, change: impl FnOnce(&mut Seen)) {
        self.seen.send_modify(|seen| {
            if seen.ended || seen.broken.is_some() {
                seen.too_late += 1;
            }
            change(seen);
        });
    }

    /// Waits until the store's calls satisfy `wanted`.
    pub async fn until(&self, wanted: impl FnMut(&Seen) -> bool) -> Seen {
        let mut watch = self.seen.subscribe();
        let found = timeout(LONG, watch.wait_for(wanted)).await;
        found.unwrap_or_else(|_| panic!("never came; seen: {:?}", short(&self.seen.borrow()))).unwrap().clone()
    }

    pub async fn broken(&self) -> (Option<String>, String) {
        self.until(|seen| seen.broken.is_some()).await.broken.unwrap()
    }
}

fn short(seen: &Seen) -> Seen {
    Seen { bytes: vec![], ..seen.clone() }
}

impl BucketStore for Record {
    fn write(&self, offset: u64, part: &[u8]) -> Result<(), Refusal> {
        if matches!(self.refuse, Refuse::Write) {
            return Err(no("a part"));
        }
        self.note(|seen| {
            let end = offset as usize + part.len();
            seen.bytes.resize(seen.bytes.len().max(end), 0);
            seen.bytes[offset as usize..end].copy_from_slice(part);
        });
        Ok(())
    }

    fn complete(&self, header: &BucketHeader, digest: u128) -> Result<(), Refusal> {
        if matches!(self.refuse, Refuse::Complete) {
            return Err(no("a bucket"));
        }
        self.note(|seen| {
            let bytes = &seen.bytes[header.offset as usize..(header.offset + header.bytes) as usize];
            assert!(bucket_digest(bytes) == digest || u128::from(gsum64(bytes)) == digest);
            seen.buckets.push(header.sequence);
        });
        Ok(())
    }

    fn measured(&self, transfer: &Transfer) {
        self.note(|seen| seen.transfers.push(transfer.clone()));
    }

    fn end(&self) -> Result<(), Refusal> {
        if matches!(self.refuse, Refuse::End) {
            return Err(no("an end"));
        }
        self.note(|seen| seen.ended = true);
        Ok(())
    }

    fn broken(&self, fault: Fault<'_>, cause: &str) {
        self.note(|seen| seen.broken = Some((fault.peer().map(ToString::to_string), cause.to_owned())));
    }
}

/// Admits every sender with the secret, and stores each attempt in a separate record.
pub struct Door {
    name: MemberName,
    refuse: Refuse,
    records: Mutex<std::collections::HashMap<u32, Arc<Record>>>,
    pub hellos: Mutex<Vec<DataHello>>,
}

impl Door {
    pub fn new(name: &str, refuse: Refuse) -> Arc<Self> {
        Arc::new(Self { name: MemberName(name.into()), refuse, records: Mutex::default(), hellos: Mutex::default() })
    }

    pub fn record(&self, attempt: u32) -> Arc<Record> {
        self.records.lock().entry(attempt).or_insert_with(|| Record::new(self.refuse)).clone()
    }
}

impl Admission for Door {
    fn admit(&self, hello: &DataHello, _: Option<&PeerIdentity>) -> Result<Arc<dyn BucketStore>, Refusal> {
        self.hellos.lock().push(hello.clone());
        if matches!(self.refuse, Refuse::Admission) || hello.secret != "secret" || hello.to != self.name {
            return Err(Refusal { code: RefusalCode::StaleEpoch, message: "this epoch is over".into() });
        }
        Ok(self.record(hello.update.attempt))
    }
}

/// A member with a runtime of its own.
pub struct Member {
    pub name: MemberName,
    pub address: String,
    pub door: Arc<Door>,
    runtime: Option<Runtime>,
    transport: Option<Box<dyn Transport>>,
    frozen: Arc<(Mutex<bool>, Condvar)>,
}

impl Member {
    /// The record of the first attempt.
    pub fn record(&self) -> Arc<Record> {
        self.door.record(1)
    }

    /// Ends the member as SIGKILL does: its tasks end, its sockets close, and no last message is sent.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// Closes the member's transport, like an agent that leaves.
    pub fn close(&mut self) {
        drop(self.transport.take());
    }

    /// Stops the member as SIGSTOP does: its sockets stay open and nothing runs.
    pub async fn freeze(&self) {
        let (frozen, asleep) = (self.frozen.clone(), Arc::new(tokio::sync::Notify::new()));
        let reported = asleep.clone();
        self.runtime.as_ref().unwrap().spawn(async move {
            reported.notify_one();
            let (thawed, wake) = &*frozen;
            wake.wait_while_for(&mut thawed.lock(), |thawed| !*thawed, LONG);
        });
        timeout(LONG, asleep.notified()).await.unwrap();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        *self.frozen.0.lock() = true;
        self.frozen.1.notify_all();
        drop(self.transport.take());
        self.kill();
    }
}

#[derive(Clone)]
pub struct Fixture {
    tcp: TcpOptions,
    /// Whether members read payloads from each other through NIXL.
    fabric: bool,
}

impl Fixture {
    /// Small receive buffers, so that small tests reach their ends.
    pub fn tcp() -> Self {
        Self::over(TcpOptions { receive_buffer: 4096, receive_buffers: 4, lanes: 1, ..TcpOptions::default() })
    }

    /// Several connections on each hop, whatever the machine.
    pub fn lanes() -> Self {
        Self::over(TcpOptions { receive_buffer: 4096, receive_buffers: 4, lanes: 3, ..TcpOptions::default() })
    }

    /// Payloads are read through NIXL, over UCX's `tcp`, in pieces.
    pub fn gdr() -> Self {
        Self { fabric: true, ..Self::tcp() }
    }

    pub fn over(tcp: TcpOptions) -> Self {
        Self { tcp, fabric: false }
    }

    /// A transport, and how it carries its payloads.
    pub async fn transport(&self, door: Arc<Door>) -> (Box<dyn Transport>, Option<CarriedBy>) {
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let name = door.name.clone();
        let tcp = TcpTransport::bind(any, door, self.tcp.clone()).await.unwrap();
        if !self.fabric {
            return (Box::new(tcp), None);
        }
        let (gdr, carried) = fabric::transport(tcp, name, epoch()).await;
        (Box::new(gdr), Some(carried))
    }

    /// Whether payloads are read through NIXL.
    pub fn reads(&self) -> bool {
        self.fabric
    }

    pub async fn member(&self, name: &str, refuse: Refuse) -> Member {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let door = Door::new(name, refuse);
        let (fixture, outer) = (self.clone(), door.clone());
        let (transport, _) = runtime.spawn(async move { fixture.transport(outer).await }).await.unwrap();
        Member {
            name: MemberName(name.into()),
            address: transport.address(),
            door,
            runtime: Some(runtime),
            transport: Some(transport),
            frozen: Arc::default(),
        }
    }

    pub async fn members(&self, refusals: &[Refuse]) -> Vec<Member> {
        let mut members = Vec::new();
        for (number, refuse) in refusals.iter().enumerate() {
            members.push(self.member(&format!("actors/{number}"), *refuse).await);
        }
        members
    }

    /// The transport of a leader, and an open chain through members in their order.
    pub async fn open(&self, members: &[Member], silence_ms: u64) -> Result<(Box<dyn Transport>, Box<dyn BucketSink>), TransportError> {
        let (leader, carried) = self.transport(Door::new("trainer/0", Refuse::Admission)).await;
        let hello = DataHello { carried, ..hello(members, silence_ms) };
        let sink = timeout(LONG, leader.open(hello, &members[0].address)).await.unwrap()?;
        Ok((leader, sink))
    }
}

pub fn epoch() -> EpochId {
    EpochId { weightsync: "ws".into(), created: 1, term: 1, epoch: 1 }
}

pub fn hello(members: &[Member], silence_ms: u64) -> DataHello {
    DataHello {
        update: UpdateId { epoch: epoch(), version: 1, attempt: 1 },
        from: MemberName("trainer/0".into()),
        to: members[0].name.clone(),
        secret: "secret".into(),
        rest: members[1..].iter().map(|member| (member.name.clone(), member.address.clone())).collect(),
        tls: false,
        silence_ms,
        probe: false,
        preflight: false,
        carried: None,
    }
}

/// Bytes that differ at each place, cut into buckets.
pub fn buckets(lengths: &[usize]) -> (Vec<u8>, Vec<(BucketHeader, Bytes, u128)>) {
    let total: usize = lengths.iter().sum();
    let stream: Vec<u8> = (0..total as u64).map(|place| (place.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect();
    let all = Bytes::from(stream.clone());
    let mut offset = 0;
    let cut = lengths.iter().enumerate().map(|(sequence, length)| {
        let data = all.slice(offset..offset + length);
        let header = BucketHeader { sequence: sequence as u32, flags: 0, offset: offset as u64, bytes: *length as u64 };
        offset += length;
        (header, data.clone(), bucket_digest(&data))
    });
    let cut = cut.collect();
    (stream, cut)
}

pub async fn send(sink: &mut Box<dyn BucketSink>, bucket: &(BucketHeader, Bytes, u128)) -> Result<(), TransportError> {
    timeout(LONG, sink.send(bucket.0, bucket.1.clone().into(), bucket.2)).await.expect("sending a bucket does not end")
}

pub async fn finish(sink: Box<dyn BucketSink>) -> Result<(), TransportError> {
    timeout(LONG, sink.finish()).await.expect("finishing does not end")
}
