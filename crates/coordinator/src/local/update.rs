//! Rules of updates on one host, with the names and defaults of the resource's fields.
//!
//! Decides defaults only. Who reads them from a file checks them.

use serde::{Deserialize, Serialize};

use weightsync_core::protocol::{Delivery, Digest, HealthPolicy, KvCachePolicy, PausePolicy, Preflight, TransportPolicy, UpdatePolicy};

/// Rules of updates; the words of the resource.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct UpdateFile {
    /// Replicas that must hold a version for it to count.
    pub min_ready: u32,
    /// Replicas that may be out of service at once because of an update; 0 for all.
    pub max_unavailable: u32,
    /// How far versions in service may be apart, by their numbers.
    pub max_skew: Option<u64>,
    pub pause: PausePolicy,
    pub kv_cache: KvCachePolicy,
    /// Longest update, and longest pause of an engine.
    pub timeout_seconds: u32,
    /// A wait with no byte moving ends after this long.
    pub silence_seconds: u32,
    /// Memory in MiB that the source may keep to retry and to feed joiners, and each rollout for earlier versions.
    #[serde(rename = "retainMiB")]
    pub retain_mib: u32,
    /// Versions that are kept, the current one counted, to go back to; within `retainMiB` in each agent.
    pub keep: u32,
    /// Size of a bucket in MiB; 0 chooses by the model's size.
    #[serde(rename = "bucketMiB")]
    pub bucket_mib: u32,
    /// How tensors are digested where bytes pass through members.
    pub digest: Digest,
    pub tls: bool,
    /// How long a joining replica waits for others before a new group is made.
    pub debounce_milliseconds: u32,
    /// Time between probes of an engine, in milliseconds.
    pub health_period_milliseconds: u32,
}

impl Default for UpdateFile {
    fn default() -> Self {
        Self {
            min_ready: 1,
            max_unavailable: 0,
            max_skew: None,
            pause: PausePolicy::default(),
            kv_cache: KvCachePolicy::default(),
            timeout_seconds: 300,
            silence_seconds: 5,
            retain_mib: 4096,
            keep: 1,
            bucket_mib: 0,
            digest: Digest::Blake3,
            tls: false,
            debounce_milliseconds: 200,
            health_period_milliseconds: 1000,
        }
    }
}

impl UpdateFile {
    /// The rules as agents are sent them.
    pub fn policy(&self) -> UpdatePolicy {
        let ms = |seconds: u32| u64::from(seconds) * 1000;
        let bytes = |mib: u32| u64::from(mib) << 20;
        let period = u64::from(self.health_period_milliseconds);
        UpdatePolicy {
            delivery: Delivery::default(),
            pause: self.pause,
            kv_cache: self.kv_cache,
            min_ready: self.min_ready,
            max_unavailable: self.max_unavailable,
            max_skew: self.max_skew,
            silence_ms: ms(self.silence_seconds),
            update_timeout_ms: ms(self.timeout_seconds),
            retain_bytes: bytes(self.retain_mib),
            keep: self.keep,
            bucket_bytes: bytes(self.bucket_mib),
            digest: self.digest,
            data_tls: self.tls,
            // One host has no network between its members.
            transport: TransportPolicy { preflight: Preflight::Off, ..TransportPolicy::default() },
            health: HealthPolicy { period_ms: period, timeout_ms: period.max(1000), failure_threshold: 3, success_threshold: 1 },
            canary: None,
        }
    }
}
