//! The rules of updates, as members are sent them with each epoch: agents need no other configuration.
//!
//! Values only; `api` and `local` make them of what a user writes.

use serde::{Deserialize, Serialize};

use super::{CanaryPolicy, TransportPolicy, Version};

/// What the object's spec asks of members during updates; sent with each epoch, so that agents need no other configuration.
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
    /// How far versions in service may be apart, by their numbers; none lets replicas serve that are newer than what counts or wait for their
    /// turn, and no others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_skew: Option<Version>,
    /// A wait with no byte moving ends after this long.
    pub silence_ms: u64,
    /// An update ends after this long even if bytes move; also the longest that an engine stays paused by us.
    pub update_timeout_ms: u64,
    /// Bytes of host memory that a source may keep to retry and to feed joiners, and a rollout for earlier versions; 0 keeps nothing.
    pub retain_bytes: u64,
    /// Versions that are kept, the current one counted; 1 keeps no earlier one.
    #[serde(default = "one")]
    pub keep: u32,
    /// Length of a bucket in bytes; 0 lets the source choose by the size of the model.
    pub bucket_bytes: u64,
    /// How tensors of a version are digested where bytes pass through members. A coordinator that does not say means [`Digest::Xxh3`]: what
    /// its members of earlier releases know.
    #[serde(default)]
    pub digest: Digest,
    /// Whether the data path uses TLS; without it, members prove themselves by the epoch's secret.
    pub data_tls: bool,
    #[serde(default)]
    pub transport: TransportPolicy,
    pub health: HealthPolicy,
    /// The prompt that each engine must answer after a switch, before its replica reports the version.
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

/// How tensors are digested where bytes pass through members (the TCP chain, feeding). Between GPUs it is gsum64.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Digest {
    /// blake3: a member that passes on other bytes than it got is found out.
    Blake3,
    /// xxh3-128: faster on few cores, and no protection from members.
    #[default]
    Xxh3,
}

/// Who joins the group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Delivery {
    /// Agents join, and hand over to their engine.
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
    /// As `Abort`; but an engine without a pause answers while it loads, from a mixture. Requests that run when the load begins or ends are
    /// aborted, and the time between is reported.
    AbortAwake,
    /// The trainer pauses by itself; we do not.
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

/// When an engine counts as unhealthy and healthy again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthPolicy {
    /// Time between two probes.
    pub period_ms: u64,
    /// Longest that one probe may take.
    pub timeout_ms: u64,
    /// Failures in a row that make an engine unhealthy.
    pub failure_threshold: u32,
    /// Successes in a row that make it healthy again.
    pub success_threshold: u32,
}
