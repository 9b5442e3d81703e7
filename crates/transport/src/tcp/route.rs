//! The connection for each frame: all frames on one, or block by block on several, in a ring.
//!
//! Decides where a stream is cut. Both ends of a hop decide alike by counting, so the order of the bytes needs no numbers on the wire. It
//! never waits and never reads a bucket's content.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tokio::sync::mpsc;

use super::writer::{Item, Sent};
use weightsync_core::protocol::{BucketHeader, LentPiece};
use weightsync_core::weights::BLOCK_BYTES;

/// The number of connections of a hop, once both ends agreed; one before.
#[derive(Clone)]
pub(super) struct Count(Arc<AtomicUsize>);

impl Count {
    pub(super) fn set(&self, lanes: usize) {
        self.0.store(lanes, Ordering::Release);
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::Acquire).max(1)
    }
}

/// The stream on its way to the connections. Used only after the stream was admitted: both ends know their number then.
pub(super) struct Route {
    lanes: Vec<mpsc::UnboundedSender<Item>>,
    pub(super) count: Count,
    current: usize,
    /// Remaining bytes of the present block.
    left: usize,
}

impl Route {
    /// A route over at most so many connections, and the queue of each.
    pub(super) fn new(lanes: usize) -> (Self, Vec<mpsc::UnboundedReceiver<Item>>) {
        let (lanes, to_send) = (0..lanes.max(1)).map(|_| mpsc::unbounded_channel()).unzip();
        (Self { lanes, count: Count(Arc::new(AtomicUsize::new(1))), current: 0, left: BLOCK_BYTES }, to_send)
    }

    pub(super) fn head(&mut self, header: BucketHeader) {
        self.left = BLOCK_BYTES;
        self.give(Item::Head(header));
    }

    pub(super) fn part(&mut self, mut part: Bytes, sent: Option<&Sent>) {
        while !part.is_empty() {
            let now = part.split_to(part.len().min(self.left));
            self.left -= now.len();
            self.give(Item::Part(now, sent.cloned()));
            if self.left == 0 {
                self.cut();
            }
        }
    }

    pub(super) fn digest(&mut self, digest: u128) {
        if self.left < BLOCK_BYTES {
            self.cut();
        }
        self.give(Item::Digest(digest));
    }

    pub(super) fn lent(&mut self, piece: LentPiece) {
        self.give(Item::Lent(piece));
    }

    pub(super) fn end(&mut self) {
        self.give(Item::End);
    }

    fn cut(&mut self) {
        self.left = BLOCK_BYTES;
        let count = self.count.get();
        if count > 1 {
            self.give(Item::Cut);
            self.current = (self.current + 1) % count;
        }
    }

    fn give(&self, item: Item) {
        if let Some(lane) = self.lanes.get(self.current) {
            // Items after a failure are dropped.
            let _ = lane.send(item);
        }
    }
}
