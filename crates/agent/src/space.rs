//! Whether this machine has room for so many bytes more: memory of the control group, and free space of a directory.
//!
//! Decides before use, because what agents keep counts against the pod: a write that goes over `memory.max` kills somebody, and it may be
//! the engine or the trainer. Reads limits of control groups of version 2 and 1 on every level that can be seen. Never allocates.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory that is never asked for, so that the other processes of the pod have room to breathe: 1/32 of the limit.
const RESERVE: u64 = 32;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoSpace {
    #[error("{wanted} bytes of memory are needed, {free} are free under the limit of {limit} in {place}")]
    Memory { wanted: u64, free: u64, limit: u64, place: String },
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

/// Where control groups are mounted, and in which of them this process is.
#[derive(Debug, Clone)]
pub struct Cgroups {
    root: PathBuf,
    own: String,
}

impl Cgroups {
    /// Of this process.
    pub fn of_this_process() -> Self {
        Self { root: PathBuf::from("/sys/fs/cgroup"), own: fs::read_to_string("/proc/self/cgroup").unwrap_or_default() }
    }

    /// With another mount point and another text of `/proc/self/cgroup`.
    #[cfg(test)]
    pub(crate) fn at(root: PathBuf, own: String) -> Self {
        Self { root, own }
    }

    /// The limit with the least free memory among all levels that can be seen; none when nothing is limited.
    pub fn tightest(&self) -> Option<MemoryLimit> {
        self.levels().into_iter().filter_map(|(directory, v2)| read_limit(&directory, v2)).min_by_key(MemoryLimit::free)
    }

    pub(crate) fn check(&self, wanted: u64) -> Result<(), NoSpace> {
        match self.tightest() {
            Some(limit) if limit.free() < wanted => {
                Err(NoSpace::Memory { wanted, free: limit.free(), limit: limit.limit, place: limit.place.display().to_string() })
            }
            _ => Ok(()),
        }
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

/// Bytes that may still be written below a directory.
pub(crate) fn free_in(directory: &Path) -> Result<u64, NoSpace> {
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

/// Refuses when `wanted` bytes do not fit into a directory; where its files are memory, the control group is asked as well.
pub(crate) fn check_directory(directory: &Path, wanted: u64, cgroups: &Cgroups) -> Result<(), NoSpace> {
    let free = free_in(directory)?;
    if free < wanted {
        return Err(NoSpace::Directory { wanted, free, place: directory.display().to_string() });
    }
    if is_memory(directory) { cgroups.check(wanted) } else { Ok(()) }
}
