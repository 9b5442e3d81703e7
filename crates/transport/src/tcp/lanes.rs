//! How the further connections of a stream find it: by a name that only the two ends of the hop know, sent to the admitted sender.
//!
//! Decides which connections belong to which stream. A connection without the name of a waiting stream is closed, as a stranger. It never
//! decides which streams are admitted, and never reads a byte after the name.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::frame::StreamId;
use super::socket::Link;
use weightsync_net::identity::PeerIdentity;

/// Default number of connections of one hop: one for each four cores, at most three. One core sends or receives a stream no faster than one
/// copy in the kernel; on small machines, more connections would only alternate. A fourth made a hop slower on 32 cores (3.2 GB/s instead
/// of 5.2: `docs/benchmarks.md`).
pub(crate) fn default_lanes() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get() / 4).clamp(1, 3)
}

/// Streams that wait for further connections.
#[derive(Clone, Default)]
pub(super) struct Meeting(Arc<Mutex<HashMap<StreamId, Place>>>);

struct Place {
    secured: bool,
    peer: Option<PeerIdentity>,
    links: mpsc::Sender<(usize, Link)>,
}

impl Meeting {
    /// Registers a stream that waits for the lanes from 1 up to `lanes`, with or without TLS and from the same peer as its first
    /// connection.
    pub(super) fn open(&self, lanes: usize, secured: bool, peer: Option<PeerIdentity>) -> Expected {
        let id = uuid::Uuid::new_v4().into_bytes();
        let (links, coming) = mpsc::channel(lanes.max(1));
        self.0.lock().insert(id, Place { secured, peer, links });
        Expected { id, coming, meeting: self.clone() }
    }

    /// Passes a connection to its waiting stream; drops it if there is none.
    pub(super) fn give(&self, id: &StreamId, lane: usize, link: Link) -> bool {
        let table = self.0.lock();
        let place = table.get(id).filter(|place| (place.secured, &place.peer) == (link.secured, &link.peer));
        place.is_some_and(|place| place.links.try_send((lane, link)).is_ok())
    }
}

/// The waiting end of a [`Meeting`]; dropping it makes the name invalid.
pub(super) struct Expected {
    pub(super) id: StreamId,
    coming: mpsc::Receiver<(usize, Link)>,
    meeting: Meeting,
}

impl Expected {
    /// The next connection and its lane. Dropping the future loses none.
    pub(super) async fn next(&mut self) -> (usize, Link) {
        match self.coming.recv().await {
            Some(link) => link,
            // The sender is in the table while this exists.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.meeting.0.lock().remove(&self.id);
    }
}
