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
    /// Engines of the pod take part once they registered with its agent, at most so many. None: the one of `assignment` takes part.
    pub registered: Option<usize>,
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

    /// The name of one of its registered engines: the one at the port of the pod's own engine has the pod's name.
    pub fn member_at(&self, port: u16) -> MemberName {
        match &self.engine {
            Some(engine) if engine.assignment.port != port => MemberName(format!("{}:{port}", self.member().0)),
            _ => self.member(),
        }
    }

    /// A pod without a pool is the source.
    pub fn role(&self) -> Role {
        if self.pool.is_some() { Role::Rollout } else { Role::Source }
    }
}
