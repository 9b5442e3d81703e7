//! Names, sizes and versions of a world: slot 0 is the source, the others are rollouts.

use weightsync_core::membership::MembershipConfig;
use weightsync_core::protocol::*;

pub(super) fn member(slot: usize) -> MemberName {
    MemberName(if slot == 0 { "trainer/t".to_owned() } else { format!("actors/r{slot}") })
}

pub(super) fn slot_of(name: &MemberName) -> usize {
    name.0.strip_prefix("actors/r").map_or(0, |slot| slot.parse().unwrap())
}

/// Ranks of a member: not all the same, so that a wrong offset shows.
pub(super) fn size(slot: usize) -> u32 {
    if slot != 0 && slot.is_multiple_of(2) { 2 } else { 1 }
}

pub(super) fn held(version: Version) -> HeldVersion {
    HeldVersion { version, manifest: format!("m{version}") }
}

/// The manifest that a lying member claims for its versions.
pub(super) const INVENTED: &str = "invented";

/// Rules with the usual times, and short updates.
pub(super) fn config(min_ready: u32) -> MembershipConfig {
    let policy = UpdatePolicy {
        pause: PausePolicy::Keep,
        kv_cache: KvCachePolicy::Reset,
        min_ready,
        silence_ms: super::agent::SILENCE,
        update_timeout_ms: 10_000,
        retain_bytes: 1,
        keep: 1,
        max_unavailable: 0,
        max_skew: None,
        bucket_bytes: 0,
        delivery: weightsync_core::protocol::Delivery::default(),
        digest: weightsync_core::protocol::Digest::Blake3,
        data_tls: false,
        transport: TransportPolicy::default(),
        health: HealthPolicy { period_ms: 1_000, timeout_ms: 1_000, failure_threshold: 3, success_threshold: 1 },
        canary: None,
    };
    MembershipConfig::new("ws", 1, policy)
}
