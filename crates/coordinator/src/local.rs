//! The controller's loop on one host: processes instead of pods, a file instead of a resource.
//!
//! A [`Group`] starts an agent for the trainer and one for each rollout (and engines, where it was given their commands), claims them
//! for one object, and runs the same coordinator that the controller runs. It decides when a process is started again; who is in the group
//! is decided by `membership`, as everywhere. It never touches a weight.

mod group;
pub mod guard;
mod pod;
mod port;
mod process;
mod restarts;
mod store;
mod supervisor;

pub use group::{Group, GroupError, GroupSpec};
pub use pod::{EngineProgram, PodSpec};
pub use port::free_port;

use weightsync_core::protocol::{Preflight, TransportPolicy, UpdatePolicy};

/// The default rules of updates on one host: those of the resource, without TLS between processes, and without measuring a network that is
/// not there.
pub fn default_policy() -> UpdatePolicy {
    let transport = TransportPolicy { preflight: Preflight::Off, ..TransportPolicy::default() };
    UpdatePolicy { data_tls: false, transport, ..UpdatePolicy::default() }
}
