//! A stream of copies between two workers on one GPU: every byte, slots that are used again only when they were copied, and who is named when one
//! of both stands still or ends.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::sync::Notify;
use weightsync_core::protocol::worker::Part;
use weightsync_core::protocol::{BucketHeader, CarriedBy, DataHello, EpochId, LentMemory, MemberName, Refusal, RefusalCode, UpdateId};
use weightsync_net::identity::PeerIdentity;
use weightsync_transport::nccl::{Borrowed, Communicator, Joining, LocalRank, NcclTransport, Staging};
use weightsync_transport::tcp::{TcpOptions, TcpTransport};
use weightsync_transport::{
    Admission, BucketSink, BucketStore, DeviceBucket, DeviceMemory, DevicePayload, Fault, Payload, Transport, TransportError, Wants,
};

use super::fixture::{Machine, Member, SLOT, gsum64, pattern};
use crate::world::{SOON, until};

/// What a member without a sign of life may take.
const SILENCE: Duration = Duration::from_secs(2);

/// Takes buckets in GPU memory, or their bytes.
#[derive(Default)]
struct Store {
    device: bool,
    buckets: Mutex<Vec<DeviceBucket>>,
    bytes: Mutex<Vec<u8>>,
    whole: Mutex<Vec<(u32, u128)>>,
    ended: Mutex<bool>,
    broken: Mutex<Option<String>>,
    changed: Notify,
}

impl BucketStore for Store {
    fn write(&self, offset: u64, part: &[u8]) -> Result<(), Refusal> {
        let mut bytes = self.bytes.lock().unwrap();
        assert_eq!(offset, bytes.len() as u64);
        bytes.extend_from_slice(part);
        Ok(())
    }

    fn wants(&self) -> Wants {
        if self.device { Wants::Device } else { Wants::Bytes }
    }

    fn device(&self, bucket: DeviceBucket) -> Result<(), Refusal> {
        self.buckets.lock().unwrap().push(bucket);
        self.changed.notify_one();
        Ok(())
    }

    fn complete(&self, header: &BucketHeader, digest: u128) -> Result<(), Refusal> {
        self.whole.lock().unwrap().push((header.sequence, digest));
        Ok(())
    }

    fn end(&self) -> Result<(), Refusal> {
        *self.ended.lock().unwrap() = true;
        Ok(())
    }

    fn broken(&self, _fault: Fault<'_>, cause: &str) {
        *self.broken.lock().unwrap() = Some(cause.to_owned());
    }
}

/// Lets every stream into the store of the moment.
#[derive(Default)]
struct Door(Mutex<Option<Arc<Store>>>);

impl Admission for Door {
    fn admit(&self, _: &DataHello, _: Option<&PeerIdentity>) -> Result<Arc<dyn BucketStore>, Refusal> {
        let store = self.0.lock().unwrap().clone();
        let closed = || Refusal { code: RefusalCode::WrongPhase, message: "closed".into() };
        store.map(|store| store as Arc<dyn BucketStore>).ok_or_else(closed)
    }
}

fn epoch() -> EpochId {
    EpochId { weightsync: "w".into(), created: 1, term: 1, epoch: 1 }
}

fn name(of: &str) -> MemberName {
    MemberName(of.to_owned())
}

fn local(member: &Member) -> LocalRank {
    LocalRank { worker: member.worker.clone(), ring: member.ring.clone(), staging: Staging::new(member.worker.clone()) }
}

async fn transport(door: &Arc<Door>) -> NcclTransport {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    NcclTransport::new(TcpTransport::bind(any, door.clone(), TcpOptions::default()).await.unwrap())
}

/// A source with a communicator of one rank, and a member on the same GPU that opened its ring.
struct Pair {
    source: Member,
    /// Where a trainer's bytes would lie.
    trainer: Member,
    guest: Member,
    leads: NcclTransport,
    follows: NcclTransport,
    door: Arc<Door>,
}

impl Pair {
    async fn new(machine: &Machine) -> Self {
        let worker = machine.worker(0).await;
        let (source, trainer) = (Member::with_slots(worker.clone(), 2).await, Member::with_slots(worker, 2).await);
        let guest = Member::with_slots(machine.worker(0).await, 2).await;
        let door: Arc<Door> = Arc::default();
        let (leads, follows) = (transport(&door).await, transport(&door).await);
        let id = source.worker.unique_id(SOON).await.unwrap();
        let joining = Joining { epoch: epoch(), me: name("trainer"), id, first: 0, world: 1, locals: vec![local(&source)], within: SOON };
        leads.join(joining).await.unwrap();
        let slot = source.ring.take(SOON).await.unwrap();
        let check = pattern(1, LentMemory::CHECK_BYTES);
        source.fill(&slot, &check).await;
        let lent = LentMemory {
            gpu: source.worker.gpu().to_owned(),
            handle: *source.ring.handle(),
            slots: source.ring.slots(),
            slot_bytes: source.ring.slot_bytes(),
            check: STANDARD.encode(&check),
            check_at: slot.offset(),
            pid_namespace: None,
        };
        let borrowed = Borrowed::open(&guest.worker, &lent, None, SOON).await.unwrap();
        follows.borrow(Communicator::borrowed(epoch(), name("rollouts/a"), local(&guest), borrowed));
        Self { source, trainer, guest, leads, follows, door }
    }

    async fn open(&self, store: &Arc<Store>, attempt: u32) -> Box<dyn BucketSink> {
        *self.door.0.lock().unwrap() = Some(store.clone());
        let hello = DataHello {
            update: UpdateId { epoch: epoch(), version: 1, attempt },
            from: name("trainer"),
            to: name("rollouts/a"),
            secret: "s".into(),
            rest: Vec::new(),
            tls: false,
            silence_ms: u64::try_from(SILENCE.as_millis()).unwrap(),
            probe: false,
            preflight: false,
            carried: Some(CarriedBy { root: 0, passing: Vec::new(), lent: true, fabric: None }),
        };
        self.leads.open(hello, &self.follows.address()).await.unwrap()
    }

    /// A bucket in the trainer's memory, or in host memory.
    async fn payload(&self, bytes: &[u8], on_gpu: bool) -> Payload {
        if !on_gpu {
            return bytes::Bytes::copy_from_slice(bytes).into();
        }
        let slot = self.trainer.ring.take(SOON).await.unwrap();
        self.trainer.fill(&slot, bytes).await;
        let (worker, memory) = (self.trainer.worker.clone(), DeviceMemory::Slot(slot));
        DevicePayload { worker, memory, offset: 0, bytes: bytes.len() as u64, after: None, lent: None }.into()
    }
}

impl Drop for Pair {
    /// In the order of its fields the source's ring would be freed while the guest has it open: a race that a busy machine loses, and a rule of
    /// the driver that the stand-in sees broken.
    fn drop(&mut self) {
        self.source.worker.kill("the test is over");
    }
}

fn header(sequence: u32, offset: u64, bytes: &[u8]) -> BucketHeader {
    BucketHeader { sequence, flags: 0, offset, bytes: bytes.len() as u64 }
}

fn bucket(sequence: u32) -> Vec<u8> {
    // Not all of the same length, and none a multiple of a page.
    pattern(u64::from(sequence) + 10, SLOT as usize - 8 * (sequence as usize % 5) - 3)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_byte_is_copied_and_none_passes_the_host() {
    // The check of a bucket's bytes reads them on the host, so digests are compared here.
    let machine = Machine::new().with("FAKEGPU_MOST_TO_HOST", 4096).with("FAKEGPU_JITTER_US", 2000);
    let pair = Pair::new(&machine).await;
    for attempt in 1..=2 {
        let store = Arc::new(Store { device: true, ..Store::default() });
        let mut sink = pair.open(&store, attempt).await;
        let mut offset = 0;
        for sequence in 0..12 {
            let bytes = bucket(sequence);
            let payload = pair.payload(&bytes, true).await;
            tokio::time::timeout(SOON, sink.send(header(sequence, offset, &bytes), payload, 0)).await.unwrap().unwrap();
            offset += bytes.len() as u64;
            // Two slots there are: the engine takes a bucket before the third can come.
            while store.buckets.lock().unwrap().is_empty() {
                // A leader listens to its stream while it waits.
                tokio::select! {
                    () = store.changed.notified() => {}
                    error = sink.failed() => panic!("{error}"),
                    () = tokio::time::sleep(SOON) => panic!("no bucket came"),
                }
            }
            let taken = store.buckets.lock().unwrap().remove(0);
            let at = taken.slots[0].at(0);
            let part = Part { offset: 0, bytes: taken.header.bytes, first_word: 0 };
            let sums = pair.guest.worker.digest(at, vec![part], None, SOON).await.unwrap();
            assert_eq!(sums.sums, [gsum64(&bucket(taken.header.sequence))], "bucket {}", taken.header.sequence);
        }
        tokio::time::timeout(SOON, sink.finish()).await.unwrap().unwrap();
        let expected: Vec<(u32, u128)> = (0..12).map(|sequence| (sequence, gsum64(&bucket(sequence)).into())).collect();
        assert_eq!(*store.whole.lock().unwrap(), expected);
        assert!(*store.ended.lock().unwrap());
        assert_eq!((pair.source.ring.free(), pair.trainer.ring.free()), (2, 2), "all slots came back");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn store_that_wants_bytes_gets_all_from_any_memory() {
    let machine = Machine::new();
    let pair = Pair::new(&machine).await;
    let store = Arc::new(Store::default());
    let mut sink = pair.open(&store, 1).await;
    let (mut offset, mut all) = (0, Vec::new());
    for sequence in 0..6 {
        // The last one is longer than a slot, and lies on the host.
        let bytes = if sequence == 5 { pattern(99, 2 * SLOT as usize + 777) } else { bucket(sequence) };
        let payload = pair.payload(&bytes, sequence % 2 == 0).await;
        sink.send(header(sequence, offset, &bytes), payload, 0).await.unwrap();
        offset += bytes.len() as u64;
        all.extend(bytes);
    }
    sink.finish().await.unwrap();
    assert!(*store.bytes.lock().unwrap() == all);
}

#[tokio::test(flavor = "multi_thread")]
async fn member_whose_engine_stalls_is_named_and_next_stream_works() {
    let machine = Machine::new();
    let pair = Pair::new(&machine).await;
    let store = Arc::new(Store { device: true, ..Store::default() });
    let mut sink = pair.open(&store, 1).await;
    let sending = async {
        let mut offset = 0;
        for sequence in 0..12 {
            let bytes = bucket(sequence);
            let payload = pair.payload(&bytes, true).await;
            sink.send(header(sequence, offset, &bytes), payload, 0).await?;
            offset += bytes.len() as u64;
        }
        Ok::<_, TransportError>(())
    };
    let error = tokio::time::timeout(SOON, sending).await.unwrap().unwrap_err();
    assert!(matches!(&error, TransportError::Silent { peer, .. } if *peer == name("rollouts/a")), "{error}");
    // It holds two, and no byte of another bucket was written over them.
    let held = std::mem::take(&mut *store.buckets.lock().unwrap());
    assert!(!held.is_empty());
    for taken in held {
        let part = Part { offset: 0, bytes: taken.header.bytes, first_word: 0 };
        let sums = pair.guest.worker.digest(taken.slots[0].at(0), vec![part], None, SOON).await.unwrap();
        assert_eq!(sums.sums, [gsum64(&bucket(taken.header.sequence))]);
    }
    drop(sink);
    until("slots to come back", || async { (pair.source.ring.free(), pair.guest.ring.free()) == (2, 2) }).await;
    let store = Arc::new(Store::default());
    let mut sink = pair.open(&store, 2).await;
    let bytes = bucket(1);
    let payload = pair.payload(&bytes, true).await;
    sink.send(header(0, 0, &bytes), payload, 0).await.unwrap();
    sink.finish().await.unwrap();
    assert!(*store.bytes.lock().unwrap() == bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn whose_worker_ends_is_named_and_the_other_worker_lives() {
    for guest_dies in [true, false] {
        let machine = Machine::new();
        let pair = Pair::new(&machine).await;
        let store = Arc::new(Store { device: true, ..Store::default() });
        let mut sink = pair.open(&store, 1).await;
        let bytes = bucket(0);
        let payload = pair.payload(&bytes, true).await;
        let (dies, lives) = if guest_dies { (&pair.guest, &pair.source) } else { (&pair.source, &pair.guest) };
        let victim = if guest_dies { "rollouts/a" } else { "trainer" };
        dies.worker.kill("the test says so");
        let error = match sink.send(header(0, 0, &bytes), payload, 0).await {
            Ok(()) => tokio::time::timeout(SOON, sink.failed()).await.unwrap(),
            Err(error) => error,
        };
        assert!(matches!(&error, TransportError::Lost { peer, .. } if *peer == name(victim)), "{error}");
        assert!(lives.worker.stats(SOON).await.is_ok(), "{victim}");
    }
}
