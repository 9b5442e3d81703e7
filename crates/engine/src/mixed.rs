//! When an engine answered requests while its weights were a mixture of two versions.
//!
//! Keeps the last windows of one engine, whatever the result of their installs: later readers also learn of a failed load. It never closes
//! a window by time alone: it stays open until the weights are complete or the engine is paused.

use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use weightsync_core::protocol::MixedWindow;

/// Windows that are kept.
const KEPT: usize = 8;

#[derive(Debug, Default)]
pub(crate) struct Mixed(Mutex<VecDeque<MixedWindow>>);

impl Mixed {
    /// The engine may serve a mixture from now on. An open window ends where this one begins.
    pub(crate) fn open(&self, version: u64, begin_ms: u64) {
        self.close(begin_ms);
        let mut windows = self.0.lock();
        if windows.len() == KEPT {
            windows.pop_front();
        }
        windows.push_back(MixedWindow { version, begin_ms, end_ms: None });
    }

    /// The weights are complete, or the engine is paused.
    pub(crate) fn close(&self, end_ms: u64) {
        if let Some(last) = self.0.lock().back_mut().filter(|last| last.end_ms.is_none()) {
            last.end_ms = Some(end_ms.max(last.begin_ms));
        }
    }

    /// The engine never accepted a byte: removes the open window.
    pub(crate) fn withdraw(&self) {
        let mut windows = self.0.lock();
        if windows.back().is_some_and(|last| last.end_ms.is_none()) {
            windows.pop_back();
        }
    }

    /// The oldest first.
    pub(crate) fn windows(&self) -> Vec<MixedWindow> {
        self.0.lock().iter().cloned().collect()
    }
}

/// The time of day in ms since 1970.
pub(crate) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
