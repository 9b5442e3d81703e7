//! A folder of the suite's own, removed with it.

use std::path::PathBuf;

pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn make() -> std::io::Result<Self> {
        // Short, because the path of a socket is.
        let name: String = uuid::Uuid::new_v4().simple().to_string().chars().take(12).collect();
        let path = std::env::temp_dir().join(format!("ws-{name}"));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _left = std::fs::remove_dir_all(&self.0);
    }
}
