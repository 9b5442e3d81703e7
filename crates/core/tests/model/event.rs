//! Events in flight in a world, and the contents of its slots. Holds values only.

use std::rc::Rc;

use weightsync_core::membership::Observation;
use weightsync_core::protocol::*;

use super::agent::{Agent, PeerMessage, Reminder};

/// An event in flight.
#[derive(Clone)]
pub(super) enum Event {
    /// To the controller with that number.
    Observe {
        reign: u32,
        observation: Rc<Observation>,
        stream_of: Option<usize>,
    },
    /// The controller reads the plan, in its state at that moment.
    Plan {
        reign: u32,
    },
    /// The number reached the API server, which responds.
    Persist {
        reign: u32,
        epoch: u64,
    },
    Prepare {
        slot: usize,
        life: Incarnation,
        reign: u32,
        request: Rc<PrepareRequest>,
    },
    Commit {
        slot: usize,
        life: Incarnation,
        reign: u32,
        request: Rc<CommitRequest>,
    },
    /// Fence or release.
    End {
        slot: usize,
        life: Incarnation,
        id: EpochId,
    },
    Peer {
        from: usize,
        slot: usize,
        life: Option<Incarnation>,
        message: PeerMessage,
    },
    Remind {
        slot: usize,
        life: Incarnation,
        reminder: Reminder,
    },
    /// The agent announces itself, unless a controller reads its events.
    Announce {
        slot: usize,
        life: Incarnation,
    },
    /// A slot gets a new pod, or its engine or agent changes.
    Cluster {
        slot: usize,
        change: Change,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    NewPod,
    Healthy,
    Thaw,
    Gone,
    Honest,
    ApiBack,
}

#[derive(Clone)]
pub(super) struct Slot {
    pub generation: u32,
    pub exists: bool,
    pub terminating: bool,
    pub agent: Option<Agent>,
    pub frozen: bool,
    /// Events that it will receive when it continues.
    pub backlog: Vec<Event>,
    /// The controller that reads its events.
    pub attached: Option<u32>,
    /// No event of its stream arrives before this time.
    pub stream_floor: u64,
    /// Extra delay of everything that it sends, and the end of that delay.
    pub slow: (u64, u64),
    /// Until this time other agents cannot reach it, nor it them; the controller can.
    pub unreachable_until: u64,
    /// Whether a fault affected it: only such members may be backed off.
    pub guilty: bool,
    /// Versions that its canary will refuse.
    pub sour: Vec<Version>,
    /// Whether its engine accepts no version now.
    pub deaf: bool,
    pub engine_start: u32,
    /// Whether it reports false facts about itself.
    pub lies: bool,
}
