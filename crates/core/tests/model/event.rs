//! What can be on its way in a world, and what is in one of its slots. Holds values only.

use std::rc::Rc;

use weightsync_core::membership::Observation;
use weightsync_core::protocol::*;

use super::agent::{Agent, PeerMessage, Reminder};

/// What is on its way.
#[derive(Clone)]
pub(super) enum Event {
    /// To the controller of that reign.
    Observe {
        reign: u32,
        observation: Rc<Observation>,
        stream_of: Option<usize>,
    },
    /// The controller reads the plan, as it is when it reads it.
    Plan {
        reign: u32,
    },
    /// The API server has the number; it answers.
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
    /// The agent announces itself, unless somebody listens to it.
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
    /// What it will find when it wakes up.
    pub backlog: Vec<Event>,
    /// The reign that listens to its events.
    pub attached: Option<u32>,
    /// Nothing of its stream arrives before that.
    pub stream_floor: u64,
    /// All that it sends takes this much longer, until then.
    pub slow: (u64, u64),
    /// Other agents cannot reach it, nor it them; the controller can.
    pub unreachable_until: u64,
    /// Whether a fault was aimed at it: only such members may be held off.
    pub guilty: bool,
    /// Versions whose answers its canary will refuse.
    pub sour: Vec<Version>,
    /// Whether its engine takes no version now.
    pub deaf: bool,
    pub engine_start: u32,
    /// Whether what it says about itself is not so.
    pub lies: bool,
}
