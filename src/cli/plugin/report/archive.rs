//! The zip file of a report. Its permissions let only its maker read it: what redaction missed should not be read by others of the machine.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use zip::ZipWriter;
use zip::write::SimpleFileOptions;

/// A zip file that is being written.
pub(super) struct Archive(ZipWriter<File>);

impl Archive {
    /// Makes the file; one that is there stays as it is.
    pub(super) fn create(path: &Path) -> std::io::Result<Self> {
        let file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(path)?;
        Ok(Self(ZipWriter::new(file)))
    }

    /// Adds a file.
    pub(super) fn add(&mut self, name: &str, text: &str) -> anyhow::Result<()> {
        let options = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
        self.0.start_file(name, options)?;
        self.0.write_all(text.as_bytes())?;
        Ok(())
    }

    /// Writes the table of contents.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        self.0.finish()?.sync_all()?;
        Ok(())
    }
}
