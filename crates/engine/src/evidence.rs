//! Evidence that does not depend on the engine's report: the kernel shows whether a process opened the weight files of a version.
//!
//! This detects an engine that acknowledges a load without reading anything (lightseekorg/tokenspeed#1373: "reports success without
//! transferring"). Decides only "at least one weight file was opened"; digests and log-probs show that the bytes were right.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

/// Watches the weight files of one directory from its construction on.
pub(super) struct Evidence(OwnedFd);

impl Evidence {
    /// `None` if the files cannot be watched (no inotify left for this user, or none of them visible here): then nothing is proven.
    pub(super) fn watch(directory: &Path) -> Option<Self> {
        let queue = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
        let mut watched = false;
        for entry in std::fs::read_dir(directory).ok()?.flatten() {
            let path = entry.path();
            // The file, not the directory, is watched: an engine may reach it by another path to the same mount, or by another name.
            if path.extension().is_some_and(|extension| extension == "safetensors" || extension == "pdparams") {
                watched |= inotify::add_watch(&queue, &path, WatchFlags::OPEN).is_ok();
            }
        }
        watched.then_some(Self(queue))
    }

    /// Whether a weight file was opened since [`watch`](Self::watch).
    pub(super) fn was_opened(&self) -> bool {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&self.0, &mut buffer);
        loop {
            match events.next() {
                Ok(event) if event.events().intersects(ReadFlags::OPEN | ReadFlags::QUEUE_OVERFLOW) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}
