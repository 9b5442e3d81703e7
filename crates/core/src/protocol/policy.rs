//! The rules of updates, sent to members with each epoch: agents need no other configuration.
//!
//! Values only; `api` and `local` make them from the user's settings.

use serde::{Deserialize, Serialize};

use super::{CanaryPolicy, TransportPolicy, Version};

/// The object's rules for updates, sent with each epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct UpdatePolicy {
    #[serde(default)]
    pub delivery: Delivery,
    pub pause: PausePolicy,
    pub kv_cache: KvCachePolicy,
    /// Replicas that must hold a version for it to count.
    pub min_ready: u32,
    /// Replicas that may be out of service at once because of an update; 0 for all.
    #[serde(default)]
    pub max_unavailable: u32,
    /// Largest difference between versions in service, by their numbers. With `None`, a replica serves if it has the current version, a
    /// newer one, or waits for its switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_skew: Option<Version>,
    /// A wait with no byte moving ends after this long.
    pub silence_ms: u64,
    /// Longest time of an update, even if bytes move; also the longest pause of an engine by WeightSync.
    pub update_timeout_ms: u64,
    /// Bytes of host memory that a source may keep to retry and to feed joiners, and a rollout for earlier versions; 0 keeps nothing.
    pub retain_bytes: u64,
    /// Versions that are kept, the current one counted; 1 keeps no earlier one.
    #[serde(default = "one")]
    pub keep: u32,
    /// Length of a bucket in bytes; with 0 the source chooses by the model's size.
    pub bucket_bytes: u64,
    /// Digest of a version's tensors if bytes pass through members. The default is [`Digest::Xxh3`], which members of earlier releases
    /// know.
    #[serde(default)]
    pub digest: Digest,
    /// Whether the data path uses TLS; without it, members prove themselves by the epoch's secret.
    pub data_tls: bool,
    #[serde(default)]
    pub transport: TransportPolicy,
    pub health: HealthPolicy,
    /// The canary, which each engine must pass after a switch before its replica reports the version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<CanaryPolicy>,
}

/// The defaults of the resource.
impl Default for UpdatePolicy {
    fn default() -> Self {
        Self {
            delivery: Delivery::Agent,
            pause: PausePolicy::Keep,
            kv_cache: KvCachePolicy::Reset,
            min_ready: 1,
            max_unavailable: 0,
            max_skew: None,
            silence_ms: 10_000,
            update_timeout_ms: 600_000,
            retain_bytes: u64::MAX,
            keep: 1,
            bucket_bytes: 0,
            digest: Digest::Blake3,
            data_tls: true,
            transport: TransportPolicy::default(),
            health: HealthPolicy { period_ms: 2000, timeout_ms: 5000, failure_threshold: 3, success_threshold: 1 },
            canary: None,
        }
    }
}

fn one() -> u32 {
    1
}

/// Digest of tensors if bytes pass through members (the TCP chain, feeding). Between GPUs it is gsum64.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Digest {
    /// blake3: detects a member that passes on other bytes than it received.
    Blake3,
    /// xxh3-128: faster on few cores, but no protection from members.
    #[default]
    Xxh3,
}

/// Which processes join the group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Delivery {
    /// Agents join, and pass the weights to their engine.
    #[default]
    Agent,
    /// The engines' own workers join; the source's agent is rank 0.
    Engine,
    /// The user's own data plane moves the bytes.
    External,
}

/// What happens to running requests while weights are switched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PausePolicy {
    /// Requests stop and continue with the new weights.
    #[default]
    Keep,
    /// Requests end first.
    Drain,
    /// Requests are aborted, and the engine answers none until the load ended.
    Abort,
    /// As `Abort`, but an engine without a pause answers from a mixture while it loads. Requests that run when the load begins or ends are
    /// aborted, and the time between is reported.
    AbortAwake,
    /// The trainer pauses the engines; WeightSync does not.
    External,
}

/// What happens to the KV and prefix cache after the switch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvCachePolicy {
    /// Kept: answers may mix both versions.
    Keep,
    /// Emptied.
    #[default]
    Reset,
}

/// When an engine becomes unhealthy, and healthy again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthPolicy {
    /// Time between two probes.
    pub period_ms: u64,
    /// Longest time of one probe.
    pub timeout_ms: u64,
    /// Failures in a row that make an engine unhealthy.
    pub failure_threshold: u32,
    /// Successes in a row that make it healthy again.
    pub success_threshold: u32,
}
