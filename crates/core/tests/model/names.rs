//! Names, sizes and versions of a world: slot 0 is the source, the others are rollouts.

use weightsync_core::membership::{BackoffConfig, MembershipConfig};
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

/// Rules with the usual times where they differ from each other, and short updates.
pub(super) fn config(min_ready: u32) -> MembershipConfig {
    let policy = UpdatePolicy {
        pause: PausePolicy::Keep,
        kv_cache: KvCachePolicy::Reset,
        min_ready,
        silence_ms: super::agent::SILENCE,
        update_timeout_ms: 9_000,
        retain_bytes: 1,
        keep: 1,
        max_unavailable: 0,
        max_skew: None,
        bucket_bytes: 0,
        delivery: weightsync_core::protocol::Delivery::default(),
        digest: weightsync_core::protocol::Digest::Blake3,
        data_tls: false,
        transport: TransportPolicy::default(),
        health: HealthPolicy { period_ms: 1_200, timeout_ms: 800, failure_threshold: 3, success_threshold: 2 },
        canary: None,
    };
    let usual = MembershipConfig::new("ws", 1, policy);
    let backoff = BackoffConfig { base_ms: 950, ..usual.backoff };
    MembershipConfig { agent_silence_ms: 3_100, leave_grace_ms: 11_000, resend_ms: 1_050, backoff, ..usual }
}

#[test]
fn no_two_times_of_the_model_are_equal() {
    let MembershipConfig { policy: UpdatePolicy { silence_ms, update_timeout_ms, health, .. }, backoff, .. } = config(1);
    let config = config(1);
    let all = [
        config.debounce_ms,
        config.prepare_deadline_ms,
        config.commit_deadline_ms,
        config.agent_silence_ms,
        config.adopt_window_ms,
        config.persist_retry_ms,
        config.leave_grace_ms,
        config.feed_grace_ms,
        config.resend_ms,
        backoff.base_ms,
        backoff.max_ms,
        backoff.reset_ms,
        silence_ms,
        update_timeout_ms,
        health.period_ms,
        health.timeout_ms,
    ];
    assert_eq!(std::collections::BTreeSet::from(all).len(), all.len(), "{all:?}");
}
