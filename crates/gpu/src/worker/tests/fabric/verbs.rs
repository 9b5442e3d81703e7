//! What only an RDMA device does: it looks at keys, and it answers for a process that does nothing. These tests need
//! `WEIGHTSYNC_STORIES_OVER=verbs`.
//!
//! A reader that lies is made by changing the metadata that it got: NIXL believes it, and the device must not.

use std::time::Instant;

use rustix::process::{Signal, kill_process};

use super::{AMPLE, BYTES, Member, code, nixl, over_verbs, pattern, pid};
use crate::worker::{Read, WorkerError};
use weightsync_core::protocol::worker::{FabricMetadata, RemotePlace, WorkerFaultCode};

/// Bytes that a reader asks for.
const PART: u64 = 4096;

fn library() -> std::path::PathBuf {
    assert!(over_verbs(), "WEIGHTSYNC_STORIES_OVER=verbs says that this host has an RDMA device");
    nixl()
}

/// Where metadata describes a region: its address and length, then its key (NIXL 1.5.1, run).
fn description(metadata: &FabricMetadata, address: u64) -> usize {
    let wanted: Vec<u8> = [address.to_le_bytes(), BYTES.to_le_bytes()].concat();
    metadata.bytes().windows(wanted.len()).position(|part| part == wanted).expect("metadata holds address and length")
}

/// A reader that lies, and a source.
struct Scene {
    reader: Member,
    source: Member,
    sent: Vec<u8>,
}

impl Scene {
    async fn new() -> Self {
        let library = library();
        let (reader, source) = tokio::join!(Member::new(&library, "liar"), Member::new(&library, "source"));
        let sent = pattern(7, PART);
        source.write(0, &sent);
        Self { reader, source, sent }
    }

    /// A READ by changed metadata is refused by the device; one by true metadata goes on.
    async fn is_refused(&self, changed: Vec<u8>, from: RemotePlace) {
        let changed = FabricMetadata::new(changed).unwrap();
        let peer = self.reader.worker.add_peer(&self.reader.region, &changed, AMPLE).await.unwrap();
        let (unanswered, begun) = (counted("retry_exceeded_err"), Instant::now());
        let error = self.reader.read(&peer, from, 0, PART, AMPLE).await.unwrap_err();
        assert_eq!(super::fault(&error), WorkerFaultCode::Fabric, "{error}");
        // NIXL saw nothing wrong before it began, and an answer came.
        assert!(!error.to_string().contains("has not registered"), "{error}");
        assert_eq!(unanswered, counted("retry_exceeded_err"), "no answer came, after {:?}", begun.elapsed());
        assert!(self.reader.holds(0, &vec![0; self.sent.len()]), "bytes arrived");
        drop(peer);
        let peer = self.reader.peer(&self.source).await;
        self.reader.read(&peer, self.source.region.at(0).unwrap(), BYTES - PART, PART, AMPLE).await.unwrap();
        assert!(self.reader.holds(BYTES - PART, &self.sent));
    }
}

/// A counter of a software RDMA device; none where there is another one.
fn counted(name: &str) -> Option<u64> {
    let device = std::fs::read_dir("/sys/class/infiniband").unwrap().flatten().find(|device| device.file_name() == "rxe0")?;
    let text = std::fs::read_to_string(device.path().join("ports/1/hw_counters").join(name)).unwrap();
    Some(text.trim().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: make verbs-test"]
async fn key_or_address_that_is_not_registered_is_refused() {
    let mut scene = Scene::new().await;
    let inside = scene.source.region.at(0).unwrap();
    let old = scene.source.region.metadata().clone();
    scene.source.region.close(AMPLE).await.unwrap();
    scene.source.region = scene.source.worker.register_host(&scene.source.host, AMPLE).await.unwrap();
    let new = scene.source.region.metadata().clone();
    // The present queues of the source, with the key that it gave out before.
    let (old_at, at) = (description(&old, inside.address), description(&new, inside.address));
    let old_key = [&new.bytes()[..at], &old.bytes()[old_at..]].concat();
    assert_eq!((old_key.len(), old_key == new.bytes()), (new.bytes().len(), false), "another key");
    scene.is_refused(old_key, inside).await;
    // The present key, with a length that reaches beyond the memory.
    let mut longer = new.bytes().to_vec();
    longer[at + 8..at + 16].copy_from_slice(&(2 * BYTES).to_le_bytes());
    let beyond = RemotePlace { address: inside.address + BYTES, device: None };
    scene.is_refused(longer, beyond).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: make verbs-test"]
async fn stopped_peer_is_read_and_a_killed_one_is_not() {
    let library = library();
    let (reader, source) = tokio::join!(Member::new(&library, "reader"), Member::new(&library, "stopped"));
    let peer = reader.peer(&source).await;
    let (from, sent) = (source.region.at(0).unwrap(), pattern(8, PART));
    reader.read(&peer, from, 0, 1, AMPLE).await.unwrap();
    source.write(0, &sent);
    let stopped = pid("stopped");
    kill_process(stopped, Signal::STOP).unwrap();
    reader.read(&peer, from, 0, PART, AMPLE).await.unwrap();
    assert!(reader.holds(0, &sent));
    kill_process(stopped, Signal::KILL).unwrap();
    // The device answers until the kernel has closed what the process had open.
    source.worker.ended().await;
    let end = reader.read(&peer, from, PART, PART, AMPLE).await;
    assert_eq!(code(end), WorkerFaultCode::Fabric);
    assert!(reader.holds(PART, &vec![0; sent.len()]), "bytes of a process that is gone arrived");
    reader.worker.stats(AMPLE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: make verbs-test"]
async fn reader_killed_in_a_read_leaves_its_source_whole() {
    let library = library();
    let (reader, source, other) =
        tokio::join!(Member::new(&library, "read-killed"), Member::new(&library, "source"), Member::new(&library, "other"));
    let (peer, healthy) = (reader.peer(&source).await, other.peer(&source).await);
    let (from, sent) = (source.region.at(0).unwrap(), pattern(10, PART));
    source.write(0, &sent);
    reader.read(&peer, from, 0, 1, AMPLE).await.unwrap();
    let before = counted("sent_pkts");
    let reading = reader.worker.read_now(Read { peer: peer.clone(), from, to: reader.host.at(0), bytes: BYTES }, AMPLE);
    let reading = tokio::spawn(reading);
    // Bytes are on the wire where packets can be counted; the READ has 2,048 of 4,096 bytes.
    crate::worker::tests::until(|| (before.is_none() || counted("sent_pkts") > before.map(|before| before + 64)).then_some(())).await;
    kill_process(pid("read-killed"), Signal::KILL).unwrap();
    if before.is_some() {
        assert!(matches!(reading.await.unwrap(), Err(WorkerError::Gone { .. })));
    }
    source.worker.stats(AMPLE).await.unwrap();
    other.read(&healthy, from, 0, PART, AMPLE).await.unwrap();
    assert!(other.holds(0, &sent));
}
