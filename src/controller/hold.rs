//! Which changes of a status may wait for more, so that an update costs the API server two writes and not one for each of its steps.
//!
//! Pure. Only what a running update moves may wait, and only for so long: a loss, a member that must not serve, a condition that people act on
//! and the end of the update are informed at once.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::api::{ConditionType, MemberStateName, MemberStatus, WeightSyncStatus};
use weightsync_core::membership::MembershipView;

/// The longest that a change waits.
pub(super) const HOLD: Duration = Duration::from_secs(2);

/// Whether `now` differs from what was written only by what the update that runs moves.
pub(super) fn may_wait(written: &WeightSyncStatus, now: &WeightSyncStatus, view: &MembershipView) -> bool {
    let runs = view.update.as_ref().is_some_and(|update| !update.phase.is_over());
    runs && settled(written) == settled(now)
}

/// What no update moves by itself.
fn settled(status: &WeightSyncStatus) -> WeightSyncStatus {
    WeightSyncStatus {
        version: None,
        manifest: None,
        last_update: None,
        replicas: None,
        conditions: status.conditions.iter().filter_map(condition).collect(),
        members: status.members.iter().map(member).collect(),
        ..status.clone()
    }
}

/// Their texts count replicas; two of them say no more than that an update is under way.
fn condition(condition: &Condition) -> Option<Condition> {
    let moved = [ConditionType::Progressing, ConditionType::Synced].iter().any(|kind| kind.as_str() == condition.type_);
    (!moved).then(|| Condition { reason: String::new(), message: String::new(), ..condition.clone() })
}

fn member(member: &MemberStatus) -> MemberStatus {
    match member.state {
        MemberStateName::Ready | MemberStateName::Updating | MemberStateName::Behind => MemberStatus {
            state: MemberStateName::Updating,
            version: None,
            retained: Vec::new(),
            paused_until: None,
            reason: String::new(),
            message: String::new(),
            ..member.clone()
        },
        MemberStateName::Dirty | MemberStateName::Unknown | MemberStateName::Forming | MemberStateName::Waiting | MemberStateName::Out => {
            member.clone()
        }
    }
}
