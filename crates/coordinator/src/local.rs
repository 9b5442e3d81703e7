//! The controller's loop on one host: processes instead of pods, a file instead of a resource.
//!
//! A [`Group`] starts one agent for the trainer and one for each rollout, and the engines whose commands it was given. It claims them for
//! one object, and runs the same coordinator as the controller. It decides when a process is restarted; `membership` decides the members of
//! the group. It never touches a weight.

mod folder;
mod group;
pub mod guard;
mod page;
mod pod;
mod port;
mod process;
mod restarts;
mod spec;
mod store;
mod supervisor;

pub use group::{Group, GroupError};
pub use page::PageServer;
pub use pod::{EngineProgram, PodSpec};
pub use port::free_port;
pub use spec::GroupSpec;

use weightsync_core::protocol::{Preflight, TransportPolicy, UpdatePolicy};

/// The default rules of updates on one host: those of the resource, without TLS between processes, and without measuring a network that is
/// not there.
pub fn default_policy() -> UpdatePolicy {
    let transport = TransportPolicy { preflight: Preflight::Off, ..TransportPolicy::default() };
    UpdatePolicy { data_tls: false, transport, ..UpdatePolicy::default() }
}
