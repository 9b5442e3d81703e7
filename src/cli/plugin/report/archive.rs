//! The file of a report: an uncompressed tar (POSIX ustar) that every system's own `tar` reads. Only its maker may read it.
//!
//! Decides the format of names and texts in the file. It never changes them, and never overwrites a file.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::bail;

/// Longest name of a file in bytes.
pub(super) const LONGEST_NAME: usize = 99;

const BLOCK: usize = 512;
/// A field of 12 bytes holds so many octal digits and a zero byte.
const DIGITS: usize = 11;

pub(super) struct Archive {
    file: File,
    /// Time of every file in it, in seconds since 1970, octal.
    made: String,
}

impl Archive {
    /// Creates the file, with its time in seconds since 1970. Fails if it exists.
    pub(super) fn create(path: &Path, made: i64) -> std::io::Result<Self> {
        let file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(path)?;
        Ok(Self { file, made: format!("{:011o}", made.max(0)) })
    }

    pub(super) fn add(&mut self, name: &str, text: &str) -> anyhow::Result<()> {
        let size = format!("{:011o}", text.len());
        if name.is_empty() || name.len() > LONGEST_NAME {
            bail!("the name of a file in the report must have 1 to {LONGEST_NAME} bytes: {name:?}");
        }
        if size.len() > DIGITS {
            bail!("{name} has {} bytes, more than a tar file can hold", text.len());
        }
        // The checksum is computed with spaces in its own field.
        let sum: u32 = header(name, &size, &self.made, "        ").iter().copied().map(u32::from).sum();
        self.file.write_all(&header(name, &size, &self.made, &format!("{sum:06o}\0 ")))?;
        self.file.write_all(text.as_bytes())?;
        let padding = text.len().next_multiple_of(BLOCK) - text.len();
        self.file.write_all(&vec![0; padding])?;
        Ok(())
    }

    /// Writes the end: two empty blocks.
    pub(super) fn finish(mut self) -> std::io::Result<()> {
        self.file.write_all(&[0; 2 * BLOCK])?;
        self.file.sync_all()
    }
}

/// The block in front of a file: its fields with their widths, filled up with zero bytes.
fn header(name: &str, size: &str, made: &str, sum: &str) -> Vec<u8> {
    let (mode, owner, regular) = ("0000600", "0000000", "0");
    let fields = [(name, 100), (mode, 8), (owner, 8), (owner, 8), (size, 12), (made, 12), (sum, 8), (regular, 1), ("", 100)];
    let mut block = Vec::with_capacity(BLOCK);
    let mut end = 0;
    for (text, width) in fields.into_iter().chain([("ustar", 6), ("00", 2)]) {
        block.extend_from_slice(text.as_bytes());
        end += width;
        block.resize(end, 0);
    }
    block.resize(BLOCK, 0);
    block
}

#[cfg(test)]
mod tests;
