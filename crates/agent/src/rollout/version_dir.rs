//! The directories in which versions lie beside an engine: one for each version, one parent for each agent.
//!
//! Decides names, who owns a directory, and when it goes: a version's directory is removed when its last holder lets it go, an agent's
//! when the agent ends, and whatever a killed agent left is swept by the next one that starts under the same root. It never removes a
//! directory that a living agent holds (a locked file beside it says so).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, flock};

#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}")]
pub struct DirError {
    path: String,
    source: io::Error,
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> DirError {
    let path = path.display().to_string();
    move |source| DirError { path, source }
}

/// One agent's directory. Locked while the agent lives, removed with all in it when this is dropped.
#[derive(Debug)]
pub struct AgentDir {
    path: PathBuf,
    lock_path: PathBuf,
    _lock: File,
    made: AtomicU64,
}

impl AgentDir {
    /// Takes `ROOT/NAME` for this agent, and sweeps what agents left there that live no more; tells how many directories that were.
    pub fn open(root: &Path, name: &str) -> Result<(Self, usize), DirError> {
        // Readable by the engine, whose user may be another one.
        fs::DirBuilder::new().recursive(true).mode(0o755).create(root).map_err(at(root))?;
        let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
        let lock_path = root.join(format!("{name}.lock"));
        let lock = lock(&lock_path).map_err(at(&lock_path))?.ok_or_else(|| DirError {
            path: lock_path.display().to_string(),
            source: io::Error::new(io::ErrorKind::ResourceBusy, "another agent of the same pod and engine holds it"),
        })?;
        let path = root.join(&name);
        let mut swept = sweep_others(root, &name);
        if path.exists() {
            fs::remove_dir_all(&path).map_err(at(&path))?;
            swept += 1;
        }
        fs::DirBuilder::new().mode(0o755).create(&path).map_err(at(&path))?;
        Ok((Self { path, lock_path, _lock: lock, made: AtomicU64::new(0) }, swept))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a new directory for one attempt at a version. No name is used twice in an agent's life: an engine may remember a path.
    pub fn version(&self, version: u64, attempt: u32) -> Result<VersionDir, DirError> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let path = self.path.join(format!("v{version}-a{attempt}.{number}"));
        fs::DirBuilder::new().mode(0o755).create(&path).map_err(at(&path))?;
        Ok(VersionDir { path })
    }
}

impl Drop for AgentDir {
    fn drop(&mut self) {
        remove(&self.path);
        if let Err(error) = fs::remove_file(&self.lock_path) {
            tracing::warn!(path = %self.lock_path.display(), %error, "a lock file cannot be removed");
        }
    }
}

/// The directory of one version; removed when this is dropped.
#[derive(Debug)]
pub struct VersionDir {
    path: PathBuf,
}

impl VersionDir {
    /// Where it is, as this process sees it.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for VersionDir {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_dir_all(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "a directory cannot be removed");
    }
}

/// Takes a lock file without waiting; none when somebody alive holds it.
fn lock(path: &Path) -> io::Result<Option<File>> {
    // An agent that ends removes its lock file. Who opened it just before holds a lock that nobody else will see: try again then.
    for _ in 0..100 {
        let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o644).open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        if fs::metadata(path).is_ok_and(|now| file.metadata().is_ok_and(|held| (now.dev(), now.ino()) == (held.dev(), held.ino()))) {
            return Ok(Some(file));
        }
    }
    Err(io::Error::other("its lock file is made and removed without end"))
}

/// Removes directories of agents that live no more; what cannot be removed (another user's) is left and said.
fn sweep_others(root: &Path, own: &str) -> usize {
    let Ok(entries) = fs::read_dir(root) else { return 0 };
    let mut swept = 0;
    for entry in entries.filter_map(Result::ok) {
        let file_name = entry.file_name();
        let Some(name) = file_name.to_str().and_then(|name| name.strip_suffix(".lock")).filter(|name| *name != own) else { continue };
        let lock_path = entry.path();
        let held = match lock(&lock_path) {
            Ok(Some(held)) => held,
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(path = %lock_path.display(), %error, "what another agent left cannot be swept");
                continue;
            }
        };
        remove(&root.join(name));
        if fs::remove_file(&lock_path).is_ok() {
            swept += 1;
        }
        drop(held);
    }
    swept
}
