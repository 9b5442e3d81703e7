//! The name of the engine's last group. It outlives the agent if there is a place for a file: without a request to leave, an engine keeps
//! the communicator and its memory until it ends. Decides nothing: a lost name costs only that memory.

use std::path::PathBuf;

use parking_lot::Mutex;

/// Longest accepted name in bytes; ours have a few dozen.
const MOST: usize = 512;

pub(super) struct LastGroup {
    file: Option<PathBuf>,
    name: Mutex<Option<String>>,
}

impl LastGroup {
    /// As the agent's previous incarnation left it.
    pub(super) fn new(file: Option<PathBuf>) -> Self {
        let left = file.as_deref().and_then(|file| std::fs::read_to_string(file).ok());
        let name = left.filter(|name| !name.is_empty() && name.len() <= MOST && name.chars().all(|c| c.is_ascii_graphic()));
        Self { file, name: Mutex::new(name) }
    }

    pub(super) fn get(&self) -> Option<String> {
        self.name.lock().clone()
    }

    pub(super) fn set(&self, name: Option<String>) {
        let mut known = self.name.lock();
        if let Some(file) = &self.file {
            let noted = match &name {
                Some(name) => std::fs::write(file, name),
                None if file.exists() => std::fs::remove_file(file),
                None => Ok(()),
            };
            if let Err(error) = noted {
                tracing::warn!(file = %file.display(), %error, "the engine's group cannot be noted: a later life of this agent cannot leave it");
            }
        }
        *known = name;
    }
}
