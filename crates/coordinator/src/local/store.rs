//! The epoch of a group on one host: one number in a file, replaced by a rename. Decides nothing; refuses to go back.

use std::path::{Path, PathBuf};

use async_trait::async_trait;

use crate::{EpochStore, PersistError};
use weightsync_core::protocol::EpochId;

/// Keeps the highest epoch in `DIRECTORY/epoch`.
#[derive(Debug, Clone)]
pub struct FileStore {
    path: PathBuf,
}

impl FileStore {
    /// A store in a folder that exists.
    pub fn new(directory: &Path) -> Self {
        Self { path: directory.join("epoch") }
    }

    /// The stored epoch; 0 if there is none.
    pub fn read(&self) -> Result<u64, PersistError> {
        match std::fs::read_to_string(&self.path) {
            Ok(text) => {
                text.trim().parse().map_err(|_| self.other("it holds no number; remove it if no agent of this group runs any more"))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(self.other(&error.to_string())),
        }
    }

    fn other(&self, what: &str) -> PersistError {
        PersistError::Other(format!("{}: {what}", self.path.display()))
    }
}

#[async_trait]
impl EpochStore for FileStore {
    async fn persist(&self, id: &EpochId) -> Result<(), PersistError> {
        let now = self.read()?;
        if now > id.epoch {
            let found = format!("{} holds epoch {now}: another `weightsync local` uses this folder", self.path.display());
            return Err(PersistError::Conflict(found));
        }
        let partial = self.path.with_extension("partial");
        let write = std::fs::write(&partial, id.epoch.to_string()).and_then(|()| std::fs::rename(&partial, &self.path));
        write.map_err(|error| self.other(&error.to_string()))
    }
}

#[cfg(test)]
mod tests;
