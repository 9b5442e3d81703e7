//! Numbers of attempts: no two attempts of one agent at one version share one, published or fed.

use std::collections::VecDeque;
use std::sync::Mutex;

use super::locks::lock;
use weightsync_core::protocol::Version;

/// Versions that are remembered; one that comes back after so many others begins from 1 again, in another epoch.
const REMEMBERED: usize = 64;

#[derive(Debug, Default)]
pub struct Attempts(Mutex<VecDeque<(Version, u32)>>);

impl Attempts {
    /// The next number for a version, from 1.
    pub fn next(&self, version: Version) -> u32 {
        let mut known = lock(&self.0);
        if let Some((_, last)) = known.iter_mut().find(|(of, _)| *of == version) {
            *last = last.saturating_add(1);
            return *last;
        }
        if known.len() >= REMEMBERED {
            known.pop_front();
        }
        known.push_back((version, 1));
        1
    }
}
