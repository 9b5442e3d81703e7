//! The directories in which versions lie next to an engine: one for each version, one parent for each agent.
//!
//! Decides names, who owns a directory, and when it goes: a version's directory is removed when its last holder lets it go, an agent's
//! when the agent ends, and whatever a killed agent left is swept by the next one that starts under the same root. It never removes a
//! directory that a living agent holds (a locked file next to it says so), nor one that no agent of this user made: a lock file and a marker
//! say who did, and no link is followed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, OFlags, flock};

/// What lock files and markers of ours begin with.
pub(crate) const MARK: &[u8] = b"weightsync agent 1\n";
/// The file in an agent's directory that says that an agent made it.
pub(crate) const MARKER: &str = ".weightsync";

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
    /// Takes `ROOT/NAME` for this agent, and removes the directories of agents that no longer run; returns the number of those.
    pub fn open(root: &Path, name: &str) -> Result<(Self, usize), DirError> {
        // Readable by the engine, whose user may be another one.
        fs::DirBuilder::new().recursive(true).mode(0o755).create(root).map_err(at(root))?;
        check_root(root, own_user()).map_err(at(root))?;
        let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
        if !is_strict(&name) {
            return Err(at(root)(io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} cannot be the name of a directory"))));
        }
        let lock_path = root.join(format!("{name}.lock"));
        let lock = make_lock(&lock_path).map_err(at(&lock_path))?.ok_or_else(|| DirError {
            path: lock_path.display().to_string(),
            source: io::Error::new(io::ErrorKind::ResourceBusy, "another agent of the same pod and engine holds it"),
        })?;
        let path = root.join(&name);
        let mut swept = sweep_others(root, &name);
        if fs::symlink_metadata(&path).is_ok() {
            remove_made(&path).map_err(at(&path))?;
            swept += 1;
        }
        fs::DirBuilder::new().mode(0o755).create(&path).map_err(at(&path))?;
        let marker = path.join(MARKER);
        let marked = OpenOptions::new().create_new(true).write(true).mode(0o644).open(&marker);
        marked.and_then(|mut file| file.write_all(MARK)).map_err(at(&marker))?;
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
        if let Err(error) = remove_made(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a directory cannot be removed");
        }
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

/// Refuses a root in which another user decides what lies where; root's own (a volume's) is taken.
pub fn check_root(root: &Path, user: u32) -> io::Result<()> {
    // The link itself, where it is one, and what it leads to.
    for found in [fs::symlink_metadata(root)?, fs::metadata(root)?] {
        let owner = found.uid();
        if owner != 0 && owner != user {
            let what = format!("it belongs to user {owner}; give this agent a directory of its own (WEIGHTSYNC_VERSION_DIR)");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
    }
    Ok(())
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether an agent may give a directory that name: letters, digits, `-` and `_`, so that it never leads out of its root.
fn is_strict(name: &str) -> bool {
    (1..=200).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

/// A file of this user that begins with our mark; links are not followed.
fn open_marked(path: &Path) -> io::Result<File> {
    let mut file = OpenOptions::new().read(true).custom_flags(no_follow()).open(path)?;
    let found = file.metadata()?;
    let mut begin = Vec::new();
    if found.is_file() && found.uid() == own_user() {
        (&mut file).take(MARK.len() as u64).read_to_end(&mut begin)?;
    }
    if begin == MARK { Ok(file) } else { Err(io::Error::new(io::ErrorKind::InvalidData, "no agent of this user made it")) }
}

/// Neither follows a link nor waits for the other end of a pipe.
fn no_follow() -> i32 {
    i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).unwrap_or_default()
}

/// Removes a directory with all in it, if an agent of this user made it. An empty one is of an agent that was killed while it made it.
fn remove_made(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    if !found.is_dir() || found.uid() != own_user() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "no agent of this user made it; it is left as it is"));
    }
    match open_marked(&path.join(MARKER)) {
        Ok(_) => fs::remove_dir_all(path),
        Err(_) => fs::remove_dir(path).map_err(|error| io::Error::new(error.kind(), format!("no agent made it; it is left: {error}"))),
    }
}

/// Whether that open file is what lies at `path` now.
fn is_at(file: &File, path: &Path) -> bool {
    let place = |found: fs::Metadata| (found.dev(), found.ino());
    fs::symlink_metadata(path).is_ok_and(|now| file.metadata().is_ok_and(|held| place(now) == place(held)))
}

/// Takes a lock without waiting; false when somebody alive holds it.
fn take(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Makes a lock file, or takes the one that is there, without waiting; none when somebody alive holds it.
fn make_lock(path: &Path) -> io::Result<Option<File>> {
    // An agent that ends removes its lock file. Who opened it just before holds a lock that no one else will see: try again then.
    for _ in 0..100 {
        let mut options = OpenOptions::new();
        let mut file = options.create(true).truncate(false).read(true).write(true).mode(0o644).custom_flags(no_follow()).open(path)?;
        if !take(&file)? {
            return Ok(None);
        }
        if !is_at(&file, path) {
            continue;
        }
        if file.metadata()?.len() == 0 {
            file.write_all(MARK)?;
        }
        // Of anyone who made it otherwise, and no lock of ours.
        open_marked(path)?;
        return Ok(Some(file));
    }
    Err(io::Error::other("its lock file is made and removed without end"))
}

/// Removes directories of agents of this user that live no more. What others made is left, and so is what cannot be removed.
fn sweep_others(root: &Path, own: &str) -> usize {
    let Ok(entries) = fs::read_dir(root) else { return 0 };
    let mut swept = 0;
    for entry in entries.filter_map(Result::ok) {
        let file_name = entry.file_name();
        let name = file_name.to_str().and_then(|name| name.strip_suffix(".lock")).filter(|name| is_strict(name) && *name != own);
        let Some(name) = name else { continue };
        let lock_path = entry.path();
        // A lock of anything else is not even taken.
        let Ok(held) = open_marked(&lock_path) else { continue };
        let removed = match take(&held) {
            Ok(false) => continue,
            Ok(true) if !is_at(&held, &lock_path) => continue,
            Ok(true) => remove_made(&root.join(name)).and_then(|()| fs::remove_file(&lock_path)),
            Err(error) => Err(error),
        };
        match removed {
            Ok(()) => swept += 1,
            Err(error) => tracing::warn!(path = %lock_path.display(), %error, "what another agent left cannot be swept"),
        }
    }
    swept
}
