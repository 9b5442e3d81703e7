//! A pod on one host: an agent, and an engine if its command was given. Holds values only.

use std::collections::BTreeMap;

use weightsync_core::protocol::{EngineAssignment, MemberName, Role};
use weightsync_core::weights::IgnoredTensors;

/// A pod that the group keeps alive.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct PodSpec {
    /// Its name; part of log file names.
    pub name: String,
    /// The pool of a rollout; none for the source.
    pub pool: Option<String>,
    pub size: u32,
    /// UUIDs of the GPUs that its agent uses, in the order of its ranks; empty: TCP only.
    pub gpus: Vec<String>,
    /// Its engine; none for a source.
    pub engine: Option<EngineProgram>,
}

/// An engine on this host.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineProgram {
    /// Its settings for the agent.
    pub assignment: EngineAssignment,
    /// Tensors that a version is not compared by.
    pub ignored: IgnoredTensors,
    /// The command that starts it; empty if another program starts it.
    pub command: Vec<String>,
    /// Environment in addition to our own.
    pub environment: BTreeMap<String, String>,
}

impl PodSpec {
    /// Its name in the roster.
    pub fn member(&self) -> MemberName {
        MemberName(format!("{}/{}", self.pool.as_deref().unwrap_or("trainer"), self.name))
    }

    /// A pod without a pool is the source.
    pub fn role(&self) -> Role {
        if self.pool.is_some() { Role::Rollout } else { Role::Source }
    }
}
