//! The files that an engine wants next to the weights: configuration and tokenizer, from the model directory it started with.
//!
//! Decides which files are companions (small ones that hold no weights) and shares one copy of each among all versions. A directory that
//! cannot be read is an error before an update, never a half-filled version directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Larger files are weights of some form, or nothing that a loader of weights reads.
const LARGEST: u64 = 128 << 20;

/// Endings of files that hold weights, or say which file does.
const WEIGHTS: [&str; 10] =
    [".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"];

#[derive(Debug)]
pub struct Companions {
    files: Vec<(PathBuf, PathBuf)>,
    bytes: u64,
}

impl Companions {
    pub fn find(model: &Path) -> io::Result<Self> {
        let mut found = Self { files: Vec::new(), bytes: 0 };
        for entry in fs::read_dir(model)? {
            let entry = entry?;
            let name = entry.file_name();
            // Follows links: in caches of model hubs, every file is a link.
            let Ok(about) = fs::metadata(entry.path()) else { continue };
            let text = name.to_string_lossy();
            let weights = WEIGHTS.iter().any(|ending| text.ends_with(ending));
            if about.is_file() && !weights && !text.starts_with('.') && about.len() <= LARGEST {
                found.bytes = found.bytes.saturating_add(about.len());
                found.files.push((entry.path(), PathBuf::from(name)));
            }
        }
        Ok(found)
    }

    pub fn none() -> Self {
        Self { files: Vec::new(), bytes: 0 }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Puts them into a version's directory; copies stand in `shared`, made on first use, and are linked.
    pub fn place(&self, shared: &Path, version: &Path) -> io::Result<()> {
        for (from, name) in &self.files {
            let copy = shared.join(name);
            if !copy.exists() {
                let partial = shared.join(format!("{}.partial", name.display()));
                fs::copy(from, &partial)?;
                fs::rename(&partial, &copy)?;
            }
            fs::hard_link(&copy, version.join(name))?;
        }
        Ok(())
    }
}
