//! Whether this machine has room for so many bytes more: memory of the control group and of the node, and free space of a directory.
//!
//! Decides before use, because what agents keep counts against the pod: a write that goes over `memory.max`, or takes the last memory of the
//! node, kills somebody, and it may be the engine or the trainer. Room is reserved until it is used, so that two engines of one pod do not
//! get the same. Reads limits of control groups of version 2 and 1 on every level that can be seen. Never allocates.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::locks::lock;

/// Memory that is never asked for, so that other processes of the pod and node have room to breathe: 1/32 of the limit, or of the node.
const RESERVE: u64 = 32;

/// Why there is no room.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum NoSpace {
    #[error("{wanted} bytes of memory are needed, {free} are free under the limit of {limit} in {place}")]
    Memory { wanted: u64, free: u64, limit: u64, place: String },
    #[error("{wanted} bytes of memory are needed, {free} are available on the node")]
    Node { wanted: u64, free: u64 },
    #[error("{wanted} bytes are needed in {place}, {free} are free")]
    Directory { wanted: u64, free: u64, place: String },
    #[error("{place} cannot be asked for its free space: {cause}")]
    Unknown { place: String, cause: String },
}

/// A limit of a control group and what is used of it, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimit {
    pub(crate) place: PathBuf,
    /// The limit.
    pub limit: u64,
    /// What counts against it and cannot be dropped: usage without inactive file cache.
    pub(crate) used: u64,
}

impl MemoryLimit {
    /// Bytes that may still be used.
    pub(crate) fn free(&self) -> u64 {
        self.limit.saturating_sub(self.limit / RESERVE).saturating_sub(self.used)
    }
}

/// Where control groups are mounted, in which of them this process is, and what is reserved. Clones share the reservations.
#[derive(Debug, Clone)]
pub struct Cgroups {
    root: PathBuf,
    own: String,
    meminfo: PathBuf,
    ledger: Arc<Ledger>,
}

/// Bytes that were promised and are not used yet.
#[derive(Debug, Default)]
struct Ledger {
    memory: Mutex<u64>,
    disk: Mutex<u64>,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Memory,
    Disk,
}

impl Ledger {
    fn of(&self, kind: Kind) -> &Mutex<u64> {
        match kind {
            Kind::Memory => &self.memory,
            Kind::Disk => &self.disk,
        }
    }
}

/// Room that no one else gets until it is used or this is dropped.
#[derive(Debug)]
pub struct Reservation {
    ledger: Arc<Ledger>,
    kind: Kind,
    left: Mutex<u64>,
}

impl Reservation {
    /// So many bytes of it are in use now: the machine counts them itself from here on.
    pub fn used(&self, bytes: u64) {
        let mut left = lock(&self.left);
        let bytes = bytes.min(*left);
        *left -= bytes;
        let mut all = lock(self.ledger.of(self.kind));
        *all = all.saturating_sub(bytes);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.used(u64::MAX);
    }
}

impl Cgroups {
    /// Of this process.
    pub fn of_this_process() -> Self {
        Self {
            root: PathBuf::from("/sys/fs/cgroup"),
            own: fs::read_to_string("/proc/self/cgroup").unwrap_or_default(),
            meminfo: "/proc/meminfo".into(),
            ledger: Arc::default(),
        }
    }

    /// With another mount point, which has the node's `meminfo` as well, and another text of `/proc/self/cgroup`.
    #[cfg(test)]
    pub(crate) fn at(root: PathBuf, own: String) -> Self {
        Self { meminfo: root.join("meminfo"), root, own, ledger: Arc::default() }
    }

    /// The limit with the least free memory among all levels that can be seen; none when nothing is limited.
    pub fn tightest(&self) -> Option<MemoryLimit> {
        self.levels().into_iter().filter_map(|(directory, v2)| read_limit(&directory, v2)).min_by_key(MemoryLimit::free)
    }

    /// Bytes of memory that this process may still use, by its control groups and the node; `None` if neither can be read.
    pub fn free_memory(&self) -> Option<u64> {
        let limit = self.tightest().map(|limit| limit.free());
        limit.into_iter().chain(available(&self.meminfo)).min()
    }

    /// Reserves memory; refuses what does not fit into the control groups and the node, next to what is reserved already.
    pub(crate) fn reserve(&self, wanted: u64) -> Result<Reservation, NoSpace> {
        let mut reserved = lock(self.ledger.of(Kind::Memory));
        self.check(wanted, *reserved)?;
        Ok(self.note(Kind::Memory, &mut reserved, wanted))
    }

    /// Reserves room for files below a directory; where they are memory, it must fit as [`reserve`](Self::reserve) says, too.
    pub(crate) fn reserve_in(&self, directory: &Path, wanted: u64) -> Result<Reservation, NoSpace> {
        let kind = if is_memory(directory) { Kind::Memory } else { Kind::Disk };
        let mut reserved = lock(self.ledger.of(kind));
        let free = free_in(directory)?.saturating_sub(*reserved);
        if free < wanted {
            return Err(NoSpace::Directory { wanted, free, place: directory.display().to_string() });
        }
        if matches!(kind, Kind::Memory) {
            self.check(wanted, *reserved)?;
        }
        Ok(self.note(kind, &mut reserved, wanted))
    }

    fn check(&self, wanted: u64, reserved: u64) -> Result<(), NoSpace> {
        if let Some(limit) = self.tightest() {
            let free = limit.free().saturating_sub(reserved);
            if free < wanted {
                return Err(NoSpace::Memory { wanted, free, limit: limit.limit, place: limit.place.display().to_string() });
            }
        }
        let free = available(&self.meminfo).map(|free| free.saturating_sub(reserved));
        free.filter(|free| *free < wanted).map_or(Ok(()), |free| Err(NoSpace::Node { wanted, free }))
    }

    fn note(&self, kind: Kind, reserved: &mut u64, wanted: u64) -> Reservation {
        *reserved = reserved.saturating_add(wanted);
        Reservation { ledger: self.ledger.clone(), kind, left: Mutex::new(wanted) }
    }

    /// Directories of this process's groups with all their parents, each with whether it is of version 2.
    fn levels(&self) -> Vec<(PathBuf, bool)> {
        let mut levels = Vec::new();
        for line in self.own.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
            let (base, v2) = match controllers {
                "" => (self.root.clone(), true),
                list if list.split(',').any(|one| one == "memory") => (self.root.join("memory"), false),
                _ => continue,
            };
            // In a container the path may be the host's, or climb out of what is mounted: only levels that exist below the mount count.
            let path = Path::new(path.trim_start_matches('/'));
            let below = |level: &&Path| !level.components().any(|part| matches!(part, std::path::Component::ParentDir));
            levels.extend(path.ancestors().filter(below).map(|level| (base.join(level), v2)));
        }
        levels
    }
}

fn read_limit(directory: &Path, v2: bool) -> Option<MemoryLimit> {
    let (limit, usage, inactive) = if v2 {
        ("memory.max", "memory.current", "inactive_file ")
    } else {
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
    };
    // "max" is no number, and version 1 says a number near 2^63: neither is a limit.
    let limit = read_number(&directory.join(limit))?;
    if limit >= 1 << 60 {
        return None;
    }
    let usage = read_number(&directory.join(usage))?;
    let stat = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
    let inactive = stat.lines().find_map(|line| line.strip_prefix(inactive)).and_then(|number| number.trim().parse().ok()).unwrap_or(0);
    Some(MemoryLimit { place: directory.to_owned(), limit, used: usage.saturating_sub(inactive) })
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Memory that new processes of the node can get without swapping, less the reserve; none where the node does not say.
fn available(meminfo: &Path) -> Option<u64> {
    let text = fs::read_to_string(meminfo).ok()?;
    let kib = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    let reserve = kib("MemTotal").unwrap_or_default() / RESERVE;
    Some(kib("MemAvailable")?.saturating_sub(reserve).saturating_mul(1024))
}

/// Bytes that may still be written below a directory.
pub fn free_in(directory: &Path) -> Result<u64, NoSpace> {
    let found = rustix::fs::statvfs(directory)
        .map_err(|cause| NoSpace::Unknown { place: directory.display().to_string(), cause: cause.to_string() })?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Whether files below a directory are memory (tmpfs, ramfs).
fn is_memory(directory: &Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    rustix::fs::statfs(directory).is_ok_and(|found| {
        let kind = u64::try_from(found.f_type).unwrap_or_default();
        kind == TMPFS || kind == RAMFS
    })
}
