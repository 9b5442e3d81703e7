//! A machine with GPUs that are not there, workers on it, and groups of them.
//!
//! At the end of a test the stand-in is asked which of its rules were broken: none may be.

use std::fs;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use tempfile::TempDir;
use weightsync_core::protocol::worker::{Part, WorkerFaultCode};
use weightsync_gpu::worker::{Broadcast, Copy, HostMemory, Joined, Ring, Slot, Sums, Worker, WorkerError, WorkerStart};

use crate::world::{PROGRAM, SOON};

/// Bytes of a slot in these tests.
pub const SLOT: u64 = 1 << 20;

/// The stand-in's libraries, built once for their sources.
pub fn libraries() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fakegpu/build.sh");
        // Next to the program under test, wherever cargo puts it: target/debug/weightsync.
        let target = Path::new(PROGRAM).ancestors().nth(2).unwrap();
        let built = Command::new(script).env("CARGO_TARGET_DIR", target).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        PathBuf::from(String::from_utf8(built.stdout).unwrap().trim())
    })
}

/// UUID of a GPU by its number.
pub fn uuid(gpu: u32) -> String {
    format!("GPU-fa4e0000-0000-4000-8000-{gpu:012x}")
}

/// A machine of its own.
pub struct Machine {
    folder: TempDir,
    settings: Vec<(&'static str, String)>,
    libraries: PathBuf,
    reads_log: bool,
}

impl Machine {
    /// With four GPUs. Operations start late by a little, so that what does not wait for them goes wrong.
    pub fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("fakegpu-").tempdir_in("/dev/shm").unwrap();
        Self { folder, settings: vec![("FAKEGPU_JITTER_US", "300".into())], libraries: libraries().to_owned(), reads_log: false }
    }

    /// With a setting of the stand-in.
    pub fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.settings.push((name, value.to_string()));
        self
    }

    /// With other libraries.
    pub fn with_libraries(mut self, folder: &Path) -> Self {
        folder.clone_into(&mut self.libraries);
        self
    }

    /// Orders faults, one a line, instead of those ordered before.
    pub fn order(&self, faults: &str) {
        let alongside = self.folder.path().join("faults.new");
        fs::write(&alongside, format!("{faults}\n")).unwrap();
        fs::rename(alongside, self.folder.path().join("faults")).unwrap();
    }

    /// What a process needs to find its GPUs.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let place = [
            ("LD_LIBRARY_PATH", self.libraries.to_str().unwrap().to_owned()),
            ("FAKEGPU_DIR", self.folder.path().to_str().unwrap().to_owned()),
            ("WEIGHTSYNC_NCCL", self.nccl().to_str().unwrap().to_owned()),
        ];
        place.into_iter().chain(self.settings.iter().cloned()).collect()
    }

    /// Where the stand-in keeps what it knows.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// NCCL's library.
    pub fn nccl(&self) -> PathBuf {
        self.libraries.join("libnccl.so.2")
    }

    /// A worker without a GPU yet.
    pub fn start(&self, label: &str) -> Worker {
        let environment = self.environment().into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        let start = WorkerStart { environment, ..WorkerStart::new(PROGRAM, &["worker"], label) };
        Worker::start(&if self.reads_log { start.with_nccl_log() } else { start }).unwrap()
    }

    /// Has the agent's side read what NCCL writes.
    pub fn reading_nccl_log(mut self) -> Self {
        self.reads_log = true;
        self
    }

    /// A worker with its GPU.
    pub async fn worker(&self, gpu: u32) -> Worker {
        let worker = self.start(&format!("gpu {gpu}"));
        let (_, facts, nccl) = worker.open(Some(&uuid(gpu)), Some(&self.nccl()), SOON).await.unwrap();
        assert_eq!(facts.uuid, uuid(gpu));
        nccl.unwrap();
        worker
    }

    /// A member for each of the GPUs.
    pub async fn members(&self, gpus: u32) -> Vec<Member> {
        let members = (0..gpus).map(async |gpu| Member::new(self.worker(gpu).await).await);
        all(members).await
    }

    /// How many times memory of one process is open in another.
    pub fn opened(&self) -> usize {
        let names = fs::read_dir(self.folder.path().join("memory")).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().contains(".open-")).count()
    }

    /// Everything that broke a rule.
    pub fn violations(&self) -> String {
        fs::read_to_string(self.folder.path().join("violations")).unwrap_or_default()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.violations(), "", "rules of the driver or of NCCL were broken");
        }
    }
}

/// Results of futures that run together, in their order.
pub async fn all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    futures::future::join_all(futures).await
}

/// A worker with a ring, and host memory as long as the ring to look at what is in it.
pub struct Member {
    pub worker: Worker,
    pub ring: Ring,
    pub host: HostMemory,
    memfd: fs::File,
}

impl Member {
    pub async fn new(worker: Worker) -> Self {
        Self::with_slots(worker, 4).await
    }

    pub async fn with_slots(worker: Worker, slots: u32) -> Self {
        let ring = worker.ring(slots, SLOT, SOON).await.unwrap();
        let memfd: OwnedFd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memfd, ring.bytes()).unwrap();
        rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let host = worker.map_host(&memfd, ring.bytes(), SOON).await.unwrap();
        assert_eq!(host.unpinned(), None);
        Self { worker, ring, host, memfd: memfd.into() }
    }

    /// Puts bytes into a slot, through host memory.
    pub async fn fill(&self, slot: &Slot, bytes: &[u8]) {
        self.memfd.write_all_at(bytes, slot.offset()).unwrap();
        let copy = Copy { from: self.host.at(slot.offset()), to: slot.at(0), bytes: bytes.len() as u64, after: None, then: None };
        self.worker.copy(copy, SOON).await.unwrap();
    }

    /// The first bytes of a slot, as they are on the GPU.
    pub async fn read(&self, slot: &Slot, bytes: usize) -> Vec<u8> {
        let copy = Copy { from: slot.at(0), to: self.host.at(slot.offset()), bytes: bytes as u64, after: None, then: None };
        self.worker.copy(copy, SOON).await.unwrap();
        let mut read = vec![0; bytes];
        self.memfd.read_exact_at(&mut read, slot.offset()).unwrap();
        read
    }

    /// Takes part in a broadcast from rank 0 of so many bytes, digested whole.
    pub async fn broadcast(&self, group: u64, slot: &Slot, bytes: u64, within: Duration) -> Result<Sums, WorkerError> {
        let parts = vec![Part { offset: 0, bytes, first_word: 0 }];
        self.worker.broadcast(Broadcast { group, root: 0, at: slot.at(0), bytes, parts, after: None }, within).await
    }
}

/// Forms a group of these members, in their order.
pub async fn form(group: u64, members: &[&Member]) -> Vec<Joined> {
    let id = members[0].worker.unique_id(SOON).await.unwrap();
    let world = u32::try_from(members.len()).unwrap();
    let joined = all(members.iter().zip(0..).map(|(member, rank)| member.worker.join(group, id, rank, world, SOON))).await;
    joined.into_iter().map(Result::unwrap).collect()
}

/// Sends `bytes` from the first member to all, and looks at what is on every GPU afterwards.
pub async fn verified_broadcast(group: u64, members: &[&Member], bytes: &[u8]) {
    let slots = all(members.iter().map(|member| member.ring.take(SOON))).await;
    let slots: Vec<Slot> = slots.into_iter().map(Result::unwrap).collect();
    members[0].fill(&slots[0], bytes).await;
    let length = bytes.len() as u64;
    let sums = all(members.iter().zip(&slots).map(|(member, slot)| member.broadcast(group, slot, length, SOON))).await;
    for (rank, (sums, (member, slot))) in sums.into_iter().zip(members.iter().zip(&slots)).enumerate() {
        assert_eq!(sums.unwrap().sums, [gsum64(bytes)], "rank {rank}");
        assert!(member.read(slot, bytes.len()).await == bytes, "rank {rank} holds other bytes");
    }
}

/// Waits until every worker has left the group.
pub async fn abort(group: u64, members: &[&Member]) {
    for aborted in all(members.iter().map(|member| member.worker.abort(group, SOON))).await {
        aborted.unwrap();
    }
}

/// The code of a fault; other errors fail the test.
pub fn fault(error: &WorkerError) -> WorkerFaultCode {
    match error {
        WorkerError::Fault { fault, .. } => fault.code,
        other => panic!("not a fault of the worker: {other}"),
    }
}

/// Bytes that depend on every bit of `seed`.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take(length).collect()
}

/// The digest as its definition says it, written again for these tests.
pub fn gsum64(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    let terms = words.zip(1_u64..).map(|(word, number)| {
        let x = word ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (x & 0xffff_ffff).wrapping_mul(x >> 32).wrapping_add(x)
    });
    terms.fold(0, u64::wrapping_add)
}
