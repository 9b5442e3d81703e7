//! The folder in which the agents of a group on one host put versions for engines.
//!
//! Decides whether another user of the host could change what lies there: agents verify a version through open files, and an engine loads it
//! by its path. Removes what the group made, and nothing else.

use std::fs::{self, DirBuilder, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The file in a folder that says that a group made it: one that was killed leaves both.
const MARKER: &str = ".weightsync-local";

/// Why versions cannot lie in a folder.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FolderError {
    #[error("{} cannot be used for versions: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} belongs to user {owner}, who could change the versions in it: set `versions` to a folder of your own", path.display())]
    Foreign { path: PathBuf, owner: u32 },
    #[error(
        "{} can be written by {who} (mode {:03o}), who could put another folder in the place of the versions: set `versions` to a folder of your \
         own, or take the right away (chmod {letter}-w)", path.display(), mode & 0o7777
    )]
    Writable { path: PathBuf, who: &'static str, letter: char, mode: u32 },
}

/// A folder for versions. What the group made of it is removed with this, where nothing is left in it.
#[derive(Debug)]
pub(super) struct VersionsFolder {
    path: PathBuf,
    /// Folders that were made, the outermost first.
    made: Vec<PathBuf>,
    /// Folders of pods, which their agents make.
    pods: Vec<PathBuf>,
}

impl VersionsFolder {
    /// Makes the folder, unless it is there. `pods` are the names of those with a folder of their own in it.
    pub(super) fn make<'a>(asked: &Path, pods: impl Iterator<Item = &'a str>) -> Result<Self, FolderError> {
        let user = rustix::process::geteuid().as_raw();
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| FolderError::Io { path, source }
        };
        let asked = std::path::absolute(asked).map_err(failed(asked))?;
        // Links are followed once, here: what is checked is what is used.
        let there = asked.ancestors().find(|path| fs::symlink_metadata(path).is_ok()).unwrap_or(Path::new("/"));
        let mut path = fs::canonicalize(there).map_err(failed(there))?;
        let before: Vec<PathBuf> = path.ancestors().map(Path::to_owned).collect();
        for outer in before.iter().rev() {
            check(outer, &fs::symlink_metadata(outer).map_err(failed(outer))?, user)?;
        }
        let mut made = Vec::new();
        for name in asked.strip_prefix(there).unwrap_or(Path::new("")).components() {
            path.push(name);
            // Readable by an engine of another user; an existing folder or link of another one, made just now, is an error.
            DirBuilder::new().mode(0o755).create(&path).map_err(failed(&path))?;
            made.push(path.clone());
        }
        let found = fs::symlink_metadata(&path).map_err(failed(&path))?;
        if found.uid() != user {
            return Err(FolderError::Foreign { path, owner: found.uid() });
        }
        let marker = path.join(MARKER);
        if made.is_empty() {
            made.extend(marker.exists().then(|| path.clone()));
        } else {
            let marked = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&marker);
            marked.map_err(failed(&marker))?;
        }
        let pods = pods.map(|pod| path.join(pod)).collect();
        Ok(Self { path, made, pods })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for VersionsFolder {
    /// A folder that is not empty stays: a record of an engine that goes on, or what agents that were killed left.
    fn drop(&mut self) {
        let removed = |path: &Path| fs::remove_dir(path).is_ok() || !path.exists();
        let left = self.pods.iter().filter(|pod| !removed(pod)).count();
        if left > 0 || self.made.is_empty() {
            return;
        }
        let _marker = fs::remove_file(self.path.join(MARKER));
        for made in self.made.iter().rev() {
            if !removed(made) {
                return;
            }
        }
    }
}

/// Refuses a folder on the way to the versions in which somebody else could put another one in the place of the next.
fn check(path: &Path, found: &Metadata, user: u32) -> Result<(), FolderError> {
    const STICKY: u32 = 0o1000;
    let (owner, mode, path) = (found.uid(), found.mode(), path.to_owned());
    if owner != 0 && owner != user {
        return Err(FolderError::Foreign { path, owner });
    }
    // In a folder with the sticky bit, such as /dev/shm, only the owner of a folder may rename it.
    if mode & STICKY != 0 {
        return Ok(());
    }
    let own_group = [0, rustix::process::getegid().as_raw()].contains(&found.gid());
    match (mode & 0o002 != 0, mode & 0o020 != 0 && !own_group) {
        (true, _) => Err(FolderError::Writable { path, who: "everybody", letter: 'o', mode }),
        (false, true) => Err(FolderError::Writable { path, who: "its group", letter: 'g', mode }),
        (false, false) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
