//! Replicas that wait for their switch.

use super::desk::*;
use crate::membership::{MemberStanding, MembershipConfig, Restored};
use crate::protocol::*;

#[test]
fn replica_waiting_for_its_turn_counts_as_ready() {
    for (limit, standing) in [(1, MemberStanding::Updating), (0, MemberStanding::Behind)] {
        let rules = MembershipConfig { policy: UpdatePolicy { max_unavailable: limit, ..policy() }, ..config() };
        let mut desk = Desk::restored(rules, 2, Restored::default());
        desk.form(2);
        desk.serves(1);
        let steps = [(1, InstallStep::Installed), (2, InstallStep::Delivered)];
        desk.leads(2, 1, UpdatePhase::Activate, &steps);
        desk.tell(2, |state| state.phase = MemberPhase::Updating);
        desk.tell(1, |state| state.installed = Some(held(2)));
        assert_eq!(desk.membership.view().version.map(|held| held.version), Some(2), "minReady is 1");
        assert_eq!(desk.member(2).standing, standing, "at most {limit}");
        desk.leads(2, 1, UpdatePhase::Failed, &steps);
        assert_eq!(desk.member(2).standing, MemberStanding::Behind);
    }
}
