//! What a group of processes on this host is made of.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::pod::PodSpec;
use weightsync_core::membership::JoinPolicy;
use weightsync_core::protocol::{UpdatePolicy, Version};

#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct GroupSpec {
    pub name: String,
    /// Where everything of the group listens, engines and the web page too: a loopback address of this host.
    pub address: IpAddr,
    /// Folder for logs and the epoch; must exist.
    pub directory: PathBuf,
    /// Folder in memory for versions.
    pub versions: PathBuf,
    /// The trainer's pod first.
    pub pods: Vec<PodSpec>,
    pub policy: UpdatePolicy,
    /// When a rollout may join.
    pub join: JoinPolicy,
    /// How long a joining replica waits for others.
    pub debounce: Duration,
    /// The version to which the group returns, and at which it stays.
    pub target: Option<Version>,
    /// The program that is started as an agent: this one.
    pub program: PathBuf,
    /// The program whose command `guard` ends the processes of the group if this one is killed: this one.
    pub guard: PathBuf,
}
