//! How many peers watch the roster at once. Decides who may begin; a watch holds a connection for as long as it lasts.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use crate::locks::lock;

/// Watches of the roster at once.
pub(super) const WATCHERS: usize = 64;
/// Watches of the roster at once from one address.
pub(super) const WATCHERS_OF_ONE: usize = 8;

/// Who watches. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Watchers(Arc<Mutex<HashMap<IpAddr, usize>>>);

impl Watchers {
    /// A place to watch from that address, given back when it is dropped; none when there are too many.
    pub(super) fn enter(&self, from: IpAddr) -> Option<Watching> {
        let from = from.to_canonical();
        let mut watching = lock(&self.0);
        let own = watching.get(&from).copied().unwrap_or_default();
        if own >= WATCHERS_OF_ONE || watching.values().sum::<usize>() >= WATCHERS {
            return None;
        }
        watching.insert(from, own + 1);
        Some(Watching { watchers: self.clone(), from })
    }
}

pub(super) struct Watching {
    watchers: Watchers,
    from: IpAddr,
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut watching = lock(&self.watchers.0);
        if let Some(left) = watching.get_mut(&self.from) {
            *left -= 1;
        }
        watching.retain(|_, left| *left > 0);
    }
}
