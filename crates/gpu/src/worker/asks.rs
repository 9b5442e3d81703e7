//! What the agent's handle is asked for, and what it gives: broadcasts, copies, READs, groups, digests. Types only.

use std::time::Duration;

use super::held::{Event, Span};
use super::peer::Peer;
use weightsync_core::protocol::worker::{Part, RemotePlace};

/// A group that was joined and proven.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub struct Joined {
    pub rank: u32,
    pub world: u32,
    pub init: Duration,
    /// The broadcast of one element.
    pub warm_up: Duration,
}

#[derive(Clone)]
#[allow(missing_docs)]
pub struct Broadcast {
    pub group: u64,
    /// Rank that sends.
    pub root: u32,
    /// From where, or to where.
    pub at: Span,
    pub bytes: u64,
    /// What to digest after it; offsets from `at`.
    pub parts: Vec<Part>,
    /// Event to wait for on the GPU before it starts.
    pub after: Option<Event>,
}

#[derive(Clone)]
#[allow(missing_docs)]
pub struct Copy {
    pub from: Span,
    pub to: Span,
    pub bytes: u64,
    /// Event to wait for on the GPU before it starts.
    pub after: Option<Event>,
    /// Event to record after it.
    pub then: Option<Event>,
}

/// A one-sided READ.
#[derive(Clone)]
#[allow(missing_docs)]
pub struct Read {
    pub peer: Peer,
    /// In memory that the peer registered.
    pub from: RemotePlace,
    /// In the memory of the region that the peer was added to.
    pub to: Span,
    pub bytes: u64,
}

/// Digests, in the order of the parts that were asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Sums {
    /// gsum64 of each part.
    pub sums: Vec<u64>,
    /// From the request to its end, as the worker measured it.
    pub took: Duration,
}
