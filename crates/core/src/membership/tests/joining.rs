//! How members join.

use super::desk::*;
use crate::membership::{JoinPolicy, MemberStanding, Observation};
use crate::protocol::*;

/// A group of a source and one rollout that holds version 3; rollout 2 has just announced itself.
fn with_joiner(join: JoinPolicy, min_ready: u32) -> Desk {
    let mut rules = config();
    rules.join = join;
    rules.policy.min_ready = min_ready;
    let mut desk = Desk::restored(rules, 2, crate::membership::Restored::default());
    let mut decisions = desk.plan(&[0, 1], Vec::new());
    decisions.extend(desk.announce(0));
    decisions.extend(desk.announce(1));
    desk.obey(decisions);
    for n in [0, 1] {
        desk.tell(n, |state| (state.retained, state.installed) = (Some(held(3)), Some(held(3))));
    }
    desk.wait(5_000, &[0, 1]);
    desk.plan(&[0, 1, 2], Vec::new());
    desk.announce(2);
    desk
}

/// Story F41.
#[test]
fn joiner_waits_for_next_epoch_and_feeding() {
    let mut desk = with_joiner(JoinPolicy::Immediate, 1);
    assert_eq!((desk.member(2).standing, desk.member(2).rank_offset), (MemberStanding::Waiting, None));
    let decisions = desk.wait(900, &[0, 1, 2]);
    assert!(!persists(&decisions), "others may come within the debounce");
    let decisions = desk.wait(200, &[0, 1, 2]);
    desk.obey(decisions);
    assert_eq!((desk.member(2).standing, desk.member(2).rank_offset), (MemberStanding::Behind, Some(2)));
    assert_eq!((desk.membership.view().ready, desk.membership.view().feeder), (1, Some(name(0))));
    desk.tell(2, |state| state.installed = Some(held(3)));
    assert_eq!(desk.member(2).standing, MemberStanding::Ready);
}

#[test]
fn a_joiner_waits_until_the_running_update_ends() {
    let mut desk = with_joiner(JoinPolicy::Immediate, 1);
    for attempt in 1..5 {
        desk.leads(4, attempt, UpdatePhase::Transfer, &[(1, InstallStep::Receiving)]);
        assert!(!persists(&desk.wait(3_000, &[0, 1, 2])));
    }
    assert_eq!(desk.member(2).reason, Reason::JoinPending);
    let done = desk.leads(4, 4, UpdatePhase::Done, &[(1, InstallStep::Installed)]);
    assert!(persists(&done));
}

#[test]
fn silent_update_does_not_delay_others() {
    let mut desk = with_joiner(JoinPolicy::Immediate, 1);
    desk.leads(4, 1, UpdatePhase::Transfer, &[(1, InstallStep::Receiving)]);
    assert!(persists(&desk.wait(5_100, &[0, 1, 2])));
}

#[test]
fn with_next_version_a_joiner_waits_for_the_version_to_rise() {
    let mut desk = with_joiner(JoinPolicy::NextVersion, 1);
    assert!(!persists(&desk.wait(60_000, &[0, 1, 2])));
    assert_eq!(desk.member(2).reason, Reason::JoinPending);
    let decisions = desk.tell(1, |state| state.installed = Some(held(4)));
    assert!(persists(&decisions));
}

#[test]
fn joiner_comes_at_once_while_too_few_for_any_version() {
    let mut desk = with_joiner(JoinPolicy::NextVersion, 2);
    assert!(persists(&desk.wait(1_100, &[0, 1, 2])));
}

#[test]
fn first_group_takes_all_or_waits_for_the_debounce() {
    let mut desk = Desk::new(2);
    desk.plan(&[0, 1, 2], Vec::new());
    desk.announce(0);
    assert!(!persists(&desk.announce(1)));
    assert!(!persists(&desk.wait(900, &[0, 1])));
    assert!(persists(&desk.wait(200, &[0, 1])));
    let mut desk = Desk::new(2);
    desk.plan(&[0, 1, 2], Vec::new());
    desk.announce(0);
    desk.announce(1);
    assert!(persists(&desk.announce(2)));
}

#[test]
fn new_rules_reach_members_in_a_new_epoch() {
    let mut desk = Desk::formed(1);
    let mut rules = config();
    rules.policy.kv_cache = KvCachePolicy::Keep;
    desk.see(Observation::Configure(Box::new(rules.clone())));
    let decisions = desk.wait(1_100, &[0, 1]);
    desk.obey(decisions);
    assert_eq!(desk.epoch(), 2);
    desk.wait(5_000, &[0, 1]);
    assert_eq!(desk.epoch(), 2);
}

#[test]
fn agent_of_another_protocol_is_left_out_naming_releases() {
    let mut desk = Desk::formed(1);
    desk.serves(3);
    desk.states.push(desk.states[1].clone());
    desk.states[2].incarnation = life(2, 1);
    desk.plan(&[0, 1, 2], Vec::new());
    let newer = Protocols { oldest: 8, newest: 9 };
    let announcement = Announcement { speaks: newer, program: "7.0.0".into(), ..desk.announcement(2) };
    desk.see(Observation::Announced(announcement));
    let shown = desk.member(2);
    assert_eq!((shown.standing, shown.reason), (MemberStanding::Out, Reason::Unsupported), "{shown:?}");
    assert!(
        shown.message.contains("(7.0.0) speaks protocol 8 to 9") && shown.message.contains("upgrade the controller first"),
        "{shown:?}"
    );
    assert_eq!(desk.member(1).standing, MemberStanding::Ready);
}

#[test]
fn member_at_a_foreign_address_is_left_out_and_named() {
    let mut desk = Desk::formed(1);
    desk.serves(3);
    desk.states.push(desk.states[1].clone());
    desk.states[2].incarnation = life(2, 1);
    desk.plan(&[0, 1, 2], Vec::new());
    let refused = |announcement: Announcement| Observation::AddressRefused { announcement, why: "not the pod's".to_owned() };
    // A pod may invent any number of incarnations.
    for instance in 0..1000 {
        let incarnation = Incarnation { instance: format!("invented-{instance}"), ..life(2, 1) };
        desk.see(refused(Announcement { incarnation, ..desk.announcement(2) }));
    }
    desk.see(refused(desk.announcement(2)));
    let shown = desk.member(2);
    assert_eq!((shown.standing, shown.reason), (MemberStanding::Out, Reason::PodMismatch), "{shown:?}");
    assert_eq!(shown.message, "not the pod's");
    // A later announcement with another address does not remove an incarnation with a correct one.
    desk.see(refused(desk.announcement(1)));
    assert_eq!(desk.member(1).standing, MemberStanding::Ready);
    // It is a member once it announces its own address.
    desk.see(Observation::Announced(desk.announcement(2)));
    assert_ne!(desk.member(2).reason, Reason::PodMismatch);
}
