//! Decides which status changes may wait for further ones, so that an update costs the API server two writes instead of one for each step.
//!
//! Pure. Only progress of a running update may wait, for a limited time. A loss, a member that must not serve, a condition that needs an
//! action, and the end of the update are written at once.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::api::{ConditionType, MemberStateName, MemberStatus, WeightSyncStatus};
use weightsync_core::membership::MembershipView;

/// The longest that a change waits.
pub(super) const HOLD: Duration = Duration::from_secs(2);

/// Whether `now` differs from the written status only by progress of the running update.
pub(super) fn may_wait(written: &WeightSyncStatus, now: &WeightSyncStatus, view: &MembershipView) -> bool {
    let runs = view.update.as_ref().is_some_and(|update| !update.phase.is_over());
    runs && settled(written) == settled(now)
}

/// The parts of a status that an update does not change by itself.
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

/// Their texts count replicas; one of them shows only that an update runs.
fn condition(condition: &Condition) -> Option<Condition> {
    let moved = condition.type_ == ConditionType::Progressing.as_str();
    (!moved).then(|| Condition { reason: String::new(), message: String::new(), ..condition.clone() })
}

fn member(member: &MemberStatus) -> MemberStatus {
    match member.state {
        MemberStateName::Ready | MemberStateName::Updating | MemberStateName::Behind => MemberStatus {
            state: MemberStateName::Updating,
            version: None,
            proven_by: None,
            retained: Vec::new(),
            paused_until: None,
            last_transfer: None,
            gdr: None,
            reason: String::new(),
            message: String::new(),
            ..member.clone()
        },
        MemberStateName::Dirty | MemberStateName::Unknown | MemberStateName::Forming | MemberStateName::Waiting | MemberStateName::Out => {
            member.clone()
        }
    }
}
