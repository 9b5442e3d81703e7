//! Workers that read each other's memory over the real NIXL, with UCX and host memory: over TCP on loopback, or over the RDMA device of this
//! host where `WEIGHTSYNC_STORIES_OVER` is `verbs`. `WEIGHTSYNC_NIXL` names the library, `libnixl_capi.so`; tests that need it are ignored
//! elsewhere.
//!
//! A worker is this very program, started again for one test, [`a_worker_serves_until_its_agent_is_gone`].

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::{Pid, Signal, kill_process};

mod gpu;
mod verbs;

use super::AMPLE;
use crate::worker::{HostMemory, Peer, Read, Region, Worker, WorkerError, WorkerStart};
use weightsync_core::protocol::worker::{FabricMetadata, RemotePlace, UcxSettings, WorkerFaultCode};

const SERVE: &str = "WEIGHTSYNC_TEST_SERVES";
const BYTES: u64 = 8 << 20;
/// For a READ that never ends.
const SHORT: Duration = Duration::from_secs(2);

#[test]
fn a_worker_serves_until_its_agent_is_gone() {
    if std::env::var_os(SERVE).is_some() {
        let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        crate::worker::serve(socket).unwrap();
    }
}

fn nixl() -> PathBuf {
    let library =
        std::env::var_os("WEIGHTSYNC_NIXL").expect("WEIGHTSYNC_NIXL names libnixl_capi.so: WEIGHTSYNC_NIXL=$(tests/tools/nixl.sh)");
    library.into()
}

fn over_verbs() -> bool {
    std::env::var("WEIGHTSYNC_STORIES_OVER").as_deref() == Ok("verbs")
}

/// For tests where the peer's process must serve a READ itself. A network card serves it, whatever the process does.
fn nixl_over_tcp() -> PathBuf {
    assert!(!over_verbs(), "over verbs a READ from a process that stopped goes on: this test runs over TCP");
    nixl()
}

fn ucx() -> UcxSettings {
    if !over_verbs() {
        return UcxSettings { tls: vec!["tcp".into()], devices: vec!["lo".into()] };
    }
    // As an agent has them.
    let devices = std::env::var("UCX_NET_DEVICES").unwrap_or_default();
    let devices = devices.split(',').filter(|name| !name.is_empty()).map(Into::into).collect();
    UcxSettings { tls: ["rc", "dc", "ud", "cuda_copy", "cuda_ipc", "self"].map(Into::into).into(), devices }
}

fn start(label: &str) -> Worker {
    start_with(label, &ucx())
}

fn start_with(label: &str, ucx: &UcxSettings) -> Worker {
    let arguments = ["--exact", "worker::tests::fabric::a_worker_serves_until_its_agent_is_gone", "--nocapture"];
    let start = WorkerStart::new(std::env::current_exe().unwrap(), &arguments, label);
    let start = WorkerStart { environment: vec![(SERVE.into(), label.into())], ..start };
    Worker::start(&start.with_ucx(ucx).unwrap()).unwrap()
}

fn fault(error: &WorkerError) -> WorkerFaultCode {
    match error {
        WorkerError::Fault { fault, .. } => fault.code,
        other => panic!("not a fault of the worker: {other}"),
    }
}

fn memfd(bytes: u64) -> File {
    let memfd: OwnedFd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memfd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    memfd.into()
}

/// Bytes that no other seed gives.
fn pattern(seed: u64, length: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take(usize::try_from(length).unwrap()).collect()
}

/// A worker with a fabric and registered host memory.
struct Member {
    worker: Worker,
    file: File,
    host: HostMemory,
    region: Region,
}

impl Member {
    async fn new(library: &Path, name: &str) -> Self {
        let worker = start(name);
        worker.open_fabric(Some(library), name, &ucx(), AMPLE).await.unwrap();
        let file = memfd(BYTES);
        let host = worker.map_host(file.as_fd(), BYTES, AMPLE).await.unwrap();
        assert_eq!(host.unpinned(), Some("no GPU was opened"));
        let region = worker.register_host(&host, AMPLE).await.unwrap();
        assert_eq!(region.bytes(), BYTES);
        Self { worker, file, host, region }
    }

    async fn peer(&self, other: &Self) -> Peer {
        self.worker.add_peer(&self.region, other.region.metadata(), AMPLE).await.unwrap()
    }

    async fn read(&self, peer: &Peer, from: RemotePlace, offset: u64, bytes: u64, within: Duration) -> Result<(), WorkerError> {
        self.worker.read(Read { peer: peer.clone(), from, to: self.host.at(offset), bytes }, within).await
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, offset).unwrap();
    }

    fn holds(&self, offset: u64, bytes: &[u8]) -> bool {
        let mut here = vec![0; bytes.len()];
        self.file.read_exact_at(&mut here, offset).unwrap();
        here == bytes
    }
}

fn code(read: Result<(), WorkerError>) -> WorkerFaultCode {
    fault(&read.unwrap_err())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: make gdr-test"]
async fn bytes_of_several_sizes_arrive_as_they_are() {
    let library = nixl();
    let (reader, source) = tokio::join!(Member::new(&library, "reader"), Member::new(&library, "source"));
    let peer = reader.peer(&source).await;
    assert!(peer.name().starts_with("source."), "{}", peer.name());
    for (seed, bytes) in (1..).zip([1, 7, 4096, 65_537, (1 << 20) + 3, BYTES]) {
        let (sent, offset) = (pattern(seed, bytes), BYTES - bytes);
        source.write(offset, &sent);
        reader.read(&peer, source.region.at(offset).unwrap(), 0, bytes, AMPLE).await.unwrap();
        assert!(reader.holds(0, &sent), "{bytes} bytes");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: make gdr-test"]
async fn several_reads_at_once_keep_their_places() {
    let library = nixl();
    let (reader, first, second) =
        tokio::join!(Member::new(&library, "reader"), Member::new(&library, "first"), Member::new(&library, "second"));
    let peers = [reader.peer(&first).await, reader.peer(&second).await];
    let sent = [pattern(1, BYTES), pattern(2, BYTES)];
    first.write(0, &sent[0]);
    second.write(0, &sent[1]);
    let part = BYTES / 64;
    let reads = (0..64_u64).map(|number| {
        let (peer, source) = if number % 2 == 0 { (&peers[0], &first) } else { (&peers[1], &second) };
        reader.read(peer, source.region.at(number * part).unwrap(), number * part, part, AMPLE)
    });
    for read in futures_of(reads).await {
        read.unwrap();
    }
    for number in 0..64_usize {
        let range = number * 131_072..(number + 1) * 131_072;
        assert!(reader.holds(number as u64 * part, &sent[number % 2][range]), "part {number}");
    }
}

async fn futures_of<F: Future + Send>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut under_way: Vec<_> = futures.map(Box::pin).collect();
    let mut results: Vec<Option<F::Output>> = under_way.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, result) in under_way.iter_mut().zip(&mut results).filter(|(_, result)| result.is_none()) {
            if let std::task::Poll::Ready(output) = future.as_mut().poll(context) {
                *result = Some(output);
            }
        }
        if results.iter().all(Option::is_some) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    results.into_iter().map(Option::unwrap).collect()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: make gdr-test"]
async fn a_region_that_was_released_is_not_read() {
    let library = nixl();
    let (reader, source) = tokio::join!(Member::new(&library, "reader"), Member::new(&library, "source"));
    let peer = reader.peer(&source).await;
    source.write(0, &pattern(1, BYTES));
    let (from, metadata) = (source.region.at(0).unwrap(), source.region.metadata().clone());
    reader.read(&peer, from, 0, 4096, AMPLE).await.unwrap();
    let zeros = vec![0; 4096];
    reader.write(0, &zeros);
    let Member { worker, file: _file, host, region } = source;
    region.close(AMPLE).await.unwrap();
    let again = worker.register_host(&host, AMPLE).await.unwrap();
    assert_eq!(code(reader.read(&peer, from, 0, 4096, AMPLE).await), WorkerFaultCode::Fabric);
    assert!(reader.holds(0, &zeros), "bytes of a released region arrived");
    // Neither by its old metadata, although the memory is registered once more. Over verbs no answer comes: UCX asks for minutes.
    drop(peer);
    if let Ok(old) = reader.worker.add_peer(&reader.region, &metadata, AMPLE).await {
        let (within, expected) = if over_verbs() { (SHORT, WorkerFaultCode::Late) } else { (AMPLE, WorkerFaultCode::Fabric) };
        assert_eq!(code(reader.read(&old, from, 0, 4096, within).await), expected);
    }
    assert!(reader.holds(0, &zeros), "bytes of a released region arrived");
    let peer = reader.worker.add_peer(&reader.region, again.metadata(), AMPLE).await.unwrap();
    reader.read(&peer, again.at(0).unwrap(), 4096, 4096, AMPLE).await.unwrap();
    assert!(reader.holds(4096, &pattern(1, 4096)));
    // Whatever READs still wait, the end of the region ends them.
    reader.region.close(AMPLE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: make gdr-test"]
async fn memory_that_is_gone_is_not_read_and_both_live() {
    let library = nixl();
    let (reader, source) = tokio::join!(Member::new(&library, "reader"), Member::new(&library, "unmapped"));
    let peer = reader.peer(&source).await;
    let from = source.region.at(0).unwrap();
    reader.read(&peer, from, 0, 4096, AMPLE).await.unwrap();
    let maps = format!("/proc/{}/maps", pid("unmapped").as_raw_nonzero());
    let is_mapped = || std::fs::read_to_string(&maps).unwrap().contains("memfd:test");
    assert!(is_mapped());
    let Member { worker, file, host, region } = source;
    // The last clones go, and the worker unmaps on its own time.
    drop((region, host, file));
    super::until(|| (!is_mapped()).then_some(())).await;
    assert_eq!(code(reader.read(&peer, from, 0, 4096, AMPLE).await), WorkerFaultCode::Fabric);
    worker.stats(AMPLE).await.unwrap();
    reader.worker.stats(AMPLE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: make gdr-test"]
async fn a_read_into_a_region_that_is_closed_is_aborted() {
    let library = nixl_over_tcp();
    let (reader, source) = tokio::join!(Member::new(&library, "reader"), Member::new(&library, "stopped"));
    let peer = reader.peer(&source).await;
    let from = source.region.at(0).unwrap();
    reader.read(&peer, from, 0, 1, AMPLE).await.unwrap();
    kill_process(pid("stopped"), Signal::STOP).unwrap();
    let reading = reader.worker.read_now(Read { peer: peer.clone(), from, to: reader.host.at(0), bytes: BYTES }, AMPLE);
    reader.region.close(AMPLE).await.unwrap();
    assert_eq!(code(reading.await), WorkerFaultCode::Aborted);
    assert_eq!(code(reader.read(&peer, from, 0, 1, AMPLE).await), WorkerFaultCode::Invalid);
    // Its bytes are free: it can be registered and read into again.
    reader.worker.register_host(&reader.host, AMPLE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: make gdr-test"]
async fn places_outside_of_regions_are_refused() {
    let library = nixl();
    let (reader, source) = tokio::join!(Member::new(&library, "reader"), Member::new(&library, "source"));
    let peer = reader.peer(&source).await;
    let inside = source.region.at(0).unwrap();
    let last = source.region.at(BYTES - 1).unwrap();
    let before = RemotePlace { address: inside.address - 1, device: None };
    for from in [last, before, RemotePlace { address: inside.address, device: Some(0) }] {
        let error = reader.read(&peer, from, 0, 2, AMPLE).await.unwrap_err();
        assert_eq!(fault(&error), WorkerFaultCode::Fabric, "{error}");
        assert!(error.to_string().contains("has not registered"), "{error}");
    }
    assert_eq!(source.region.at(BYTES), None);
    // Here too: beyond the end, of no length, and in memory that is not the region's.
    assert_eq!(code(reader.read(&peer, inside, BYTES - 1, 2, AMPLE).await), WorkerFaultCode::Invalid);
    assert_eq!(code(reader.read(&peer, inside, 0, 0, AMPLE).await), WorkerFaultCode::Invalid);
    let other = reader.worker.map_host(memfd(4096).as_fd(), 4096, AMPLE).await.unwrap();
    let read = Read { peer: peer.clone(), from: inside, to: other.at(0), bytes: 1 };
    assert_eq!(code(reader.worker.read(read, AMPLE).await), WorkerFaultCode::Invalid);
    reader.read(&peer, last, 0, 1, AMPLE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: make gdr-test"]
async fn a_read_from_a_killed_peer_ends_and_the_worker_serves() {
    let library = nixl_over_tcp();
    let within = Duration::from_secs(8);
    let (reader, source, other) =
        tokio::join!(Member::new(&library, "reader"), Member::new(&library, "killed"), Member::new(&library, "other"));
    let (peer, healthy) = (reader.peer(&source).await, reader.peer(&other).await);
    let from = source.region.at(0).unwrap();
    let begun = Instant::now();
    reader.read(&peer, from, 0, 1, AMPLE).await.unwrap();
    // What any answer of the worker takes on this machine.
    let usual = begun.elapsed();
    let source_pid = pid("killed");
    // It stops in the middle: the READ is under way when it is killed.
    kill_process(source_pid, Signal::STOP).unwrap();
    let begun = Instant::now();
    let reading = tokio::spawn(reader.worker.read_now(Read { peer: peer.clone(), from, to: reader.host.at(0), bytes: BYTES }, within));
    let elsewhere = BYTES / 2;
    // What names the same bytes is refused meanwhile, also by another READ.
    let overlapping = reader.read(&healthy, other.region.at(0).unwrap(), elsewhere, 1, AMPLE).await;
    assert_eq!(code(overlapping), WorkerFaultCode::Invalid);
    assert!(!reading.is_finished());
    kill_process(source_pid, Signal::KILL).unwrap();
    let error = reading.await.unwrap().unwrap_err();
    assert!(matches!(fault(&error), WorkerFaultCode::Fabric | WorkerFaultCode::Late), "{error}");
    assert!(begun.elapsed() < within + Duration::from_secs(1) + 20 * usual, "{:?}, and {usual:?} from a live peer", begun.elapsed());
    // And the worker goes on.
    assert_eq!(code(reader.read(&peer, from, 0, 1, within).await), WorkerFaultCode::Fabric);
    let sent = pattern(3, BYTES);
    other.write(0, &sent);
    reader.read(&healthy, other.region.at(0).unwrap(), 0, BYTES, AMPLE).await.unwrap();
    assert!(reader.holds(0, &sent));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: make gdr-test"]
async fn a_read_from_a_silent_peer_is_late_and_holds_its_bytes() {
    let library = nixl_over_tcp();
    let (reader, source) = tokio::join!(Member::new(&library, "reader"), Member::new(&library, "silent"));
    let peer = reader.peer(&source).await;
    let from = source.region.at(0).unwrap();
    reader.read(&peer, from, 0, 1, AMPLE).await.unwrap();
    let sent = pattern(4, BYTES);
    source.write(0, &sent);
    let source_pid = pid("silent");
    kill_process(source_pid, Signal::STOP).unwrap();
    assert_eq!(code(reader.read(&peer, from, 0, BYTES, Duration::from_millis(300)).await), WorkerFaultCode::Late);
    assert_eq!(code(reader.read(&peer, from, 0, 1, AMPLE).await), WorkerFaultCode::Invalid);
    // It ends when the peer goes on; then its bytes are free.
    kill_process(source_pid, Signal::CONT).unwrap();
    let reads = async {
        while let Err(error) = reader.read(&peer, from, 0, BYTES, AMPLE).await {
            assert!(error.to_string().contains("may still write there"), "{error}");
        }
    };
    tokio::time::timeout(AMPLE, reads).await.unwrap();
    assert!(reader.holds(0, &sent));
}

/// The process of the worker that was started with this label, which no other test uses.
fn pid(label: &str) -> Pid {
    let wanted = format!("{SERVE}={label}\0");
    let processes = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<i32>().ok());
    let environment = |pid: &i32| std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let mut found = processes.filter(|pid| environment(pid).windows(wanted.len()).any(|part| part == wanted.as_bytes()));
    Pid::from_raw(found.next().unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_library_that_cannot_be_used_is_named() {
    let worker = start("no library");
    for path in ["/nowhere/libnixl_capi.so", "/dev/null"] {
        let error = worker.open_fabric(Some(Path::new(path)), "name", &ucx(), AMPLE).await.unwrap_err();
        assert_eq!(fault(&error), WorkerFaultCode::NoFabric, "{error}");
        assert!(error.to_string().contains(path) && error.to_string().contains("install the Python package nixl-cu"), "{error}");
    }
    // libc is a library, and no NIXL.
    let error = worker.open_fabric(Some(Path::new("libc.so.6")), "name", &ucx(), AMPLE).await.unwrap_err();
    assert!(error.to_string().contains("it lacks nixl_capi_"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: make gdr-test"]
async fn fabric_opens_once_after_an_attempt_that_failed() {
    let (library, worker) = (nixl(), start("second attempt"));
    worker.open_fabric(Some(Path::new("/dev/null")), "name", &ucx(), AMPLE).await.unwrap_err();
    let facts = worker.open_fabric(Some(&library), "name", &ucx(), AMPLE).await.unwrap();
    assert_eq!((facts.path.as_str(), facts.plugin.as_str()), (library.to_str().unwrap(), "UCX"));
    assert!(facts.memory.iter().any(|kind| kind == "DRAM"), "{facts:?}");
    assert_eq!(facts.parameters["UCX_TLS"], ucx().tls.join(","));
    assert_eq!(facts.gpu_memory, Err("no GPU was opened".into()));
    let error = worker.open_fabric(Some(&library), "name", &ucx(), AMPLE).await.unwrap_err();
    assert_eq!(fault(&error), WorkerFaultCode::Invalid, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn transports_that_the_worker_lacks_are_refused() {
    let worker = start("other transports");
    let dc = UcxSettings { tls: vec!["dc".into()], ..ucx() };
    let error = worker.open_fabric(None, "name", &dc, AMPLE).await.unwrap_err();
    assert_eq!(fault(&error), WorkerFaultCode::Invalid, "{error}");
    let text = format!("UCX_TLS of the worker is {}, needed is dc", ucx().tls.join(","));
    assert!(error.to_string().contains(&text), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fabric_is_needed_before_memory_is_registered() {
    let worker = start("no fabric");
    let host = worker.map_host(memfd(4096).as_fd(), 4096, AMPLE).await.unwrap();
    let error = worker.register_host(&host, AMPLE).await.err().unwrap();
    assert_eq!(fault(&error), WorkerFaultCode::Invalid, "{error}");
    assert!(error.to_string().contains("no fabric was opened"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: make gdr-test"]
async fn metadata_that_makes_no_sense_is_refused() {
    let library = nixl();
    let reader = Member::new(&library, "reader").await;
    for bytes in [vec![0; 320], pattern(5, 320), reader.region.metadata().bytes()[..100].to_vec()] {
        let metadata = FabricMetadata::new(bytes).unwrap();
        let error = reader.worker.add_peer(&reader.region, &metadata, AMPLE).await.err().unwrap();
        assert_eq!(fault(&error), WorkerFaultCode::Fabric, "{error}");
    }
    reader.worker.stats(AMPLE).await.unwrap();
}
