//! A member's report about itself, true or false, changes nothing for the others.

use super::desk::*;
use crate::membership::{Decision, MemberStanding, MembershipConfig, Observation, Restored};
use crate::protocol::*;

/// An epoch that no controller wrote.
fn claimed(epoch: u64) -> EpochId {
    EpochId { weightsync: "ws".to_owned(), created: 1, term: 0, epoch }
}

#[test]
fn epoch_claimed_far_above_the_written_changes_nothing() {
    let mut desk = Desk::formed(3);
    let decisions = desk.tell(3, |state| state.epoch = Some(claimed((1 << 63) - 2)));
    desk.obey(decisions);
    assert_named(&desk, "it reports epoch 9223372036854775806, the last one that a controller wrote is 1");
    let decisions = desk.wait(5_000, &[0, 1, 2, 3]);
    desk.obey(decisions);
    let written = desk.decisions.iter().filter_map(|decision| match decision {
        Decision::PersistEpoch { epoch } => Some(*epoch),
        _ => None,
    });
    assert!(written.clone().all(|epoch| epoch < 10), "{:?}", written.collect::<Vec<_>>());
    let view = desk.membership.view();
    assert!(view.committed && view.epoch < 10, "the others go on: {view:?}");
    assert_eq!((desk.member(1).rank_offset, desk.member(2).rank_offset), (Some(1), Some(2)));
}

#[test]
fn epoch_claimed_before_the_first_group_changes_nothing() {
    let mut desk = Desk::new(2);
    desk.states[2].epoch = Some(claimed(u64::MAX));
    desk.form(2);
    assert!(desk.epoch() < 10, "{}", desk.epoch());
}

#[test]
fn rollout_that_calls_itself_a_source_is_not_preferred() {
    let mut desk = Desk::formed(2);
    desk.serves(3);
    desk.tell(0, |state| state.retained = None);
    let decisions = desk.tell(2, |state| state.role = Role::Source);
    desk.obey(decisions);
    assert_named(&desk, "it claims to be a source and is a rollout");
    let decisions = desk.lose(0);
    desk.obey(decisions);
    desk.reborn(0, 2);
    let decisions = desk.announce(0);
    desk.obey(decisions);
    assert_eq!(desk.membership.view().feeder, Some(name(1)));
}

#[test]
fn dirty_rollout_that_calls_itself_a_source_is_fed() {
    let mut desk = Desk::formed(2);
    desk.serves(3);
    desk.tell(2, |state| (state.role, state.installed, state.phase) = (Role::Source, None, MemberPhase::Dirty));
    let decisions = desk.wait(2_100, &[0, 1, 2]);
    assert!(persists(&decisions), "{decisions:?}");
}

#[test]
fn update_reported_by_a_member_that_leads_nothing_is_ignored() {
    let mut desk = Desk::formed(3);
    desk.serves(3);
    let (from, id) = (desk.states[3].incarnation.clone(), desk.id());
    for attempt in 1..=3 {
        let steps = [(1, InstallStep::Refused), (2, InstallStep::Refused), (3, InstallStep::Installed)];
        let update = Box::new(update(&id, 4, attempt, UpdatePhase::Failed, &steps));
        desk.see(Observation::Update { from: from.clone(), update });
    }
    let decisions = desk.wait(5_000, &[0, 1, 2, 3]);
    assert!(!persists(&decisions), "{decisions:?}");
    assert_eq!((desk.epoch(), desk.event(Reason::MemberFailed), desk.membership.view().update), (1, None, None));
}

#[test]
fn update_of_a_pod_that_only_calls_itself_a_source_is_ignored() {
    let mut desk = Desk::formed(3);
    desk.serves(3);
    let from = Incarnation { pod_uid: "uid-3".to_owned(), instance: "another".to_owned() };
    let announcement = Announcement { incarnation: from.clone(), role: Role::Source, engine_port: None, ..desk.announcement(3) };
    desk.see(Observation::Announced(announcement));
    let id = desk.id();
    // In the present group and in the next one.
    for (attempt, epoch) in [(1, id.epoch), (2, id.epoch), (3, id.epoch + 1)] {
        let id = EpochId { epoch, ..id.clone() };
        let steps = [(1, InstallStep::Refused), (2, InstallStep::Refused), (3, InstallStep::Installed)];
        let update = Box::new(update(&id, 4, attempt, UpdatePhase::Failed, &steps));
        desk.see(Observation::Update { from: from.clone(), update });
    }
    let decisions = desk.wait(2_500, &[0, 1, 2, 3]);
    assert!(!persists(&decisions), "{decisions:?}");
    assert_eq!((desk.event(Reason::MemberFailed), desk.membership.view().update), (None, None));
}

#[test]
fn feeder_that_feeds_no_member_is_followed_by_another() {
    let mut desk = Desk::formed(3);
    desk.serves(3);
    desk.tell(0, |state| state.retained = None);
    let decisions = desk.tell(3, |state| (state.installed, state.retained) = (None, None));
    desk.obey(decisions);
    let mut feeders = Vec::new();
    for _ in 0..2 {
        let before = desk.epoch();
        while desk.epoch() == before {
            let decisions = desk.wait(500, &[0, 1, 2, 3]);
            desk.obey(decisions);
        }
        feeders.push(desk.membership.view().feeder.unwrap());
    }
    feeders.sort();
    assert_eq!(feeders, [name(1), name(2)]);
}

#[test]
fn lives_that_one_pod_announces_are_bounded() {
    let mut desk = Desk::formed(2);
    for number in 2..2_000 {
        desk.reborn(2, number);
        let announcement = desk.announcement(2);
        desk.see(Observation::Announced(announcement));
        desk.lose(2);
    }
    let lives = desk.membership.agents.iter().count();
    assert!(lives < 200, "{lives} lives are remembered");
}

fn other(version: Version) -> HeldVersion {
    HeldVersion { version, manifest: "poison".to_owned() }
}

/// The first false claim was refused in status and in an Event, with this text and the member that made it.
fn assert_named(desk: &Desk, claim: &str) {
    let view = desk.membership.view();
    let shown = view.degraded.iter().find(|one| one.reason == Reason::ClaimRefused);
    let shown = shown.and_then(|one| Some((one.member.clone()?, one.message.clone())));
    let event = desk.event(Reason::ClaimRefused).and_then(|(member, message)| Some((member?, message)));
    assert_eq!(event.as_ref().map(|(_, message)| message.as_str()), Some(claim));
    assert_eq!(shown, event);
}

#[test]
fn invented_higher_version_is_named_and_fed_over() {
    let mut desk = lied_to(99, policy());
    assert_named(&desk, "it claims to hold version 99, which no source announced");
    assert_eq!(desk.member(2).standing, MemberStanding::Behind);
    desk.stated = Some(1);
    desk.tell(2, |state| (state.installed, state.retained) = (Some(held(3)), Some(held(3))));
    assert!(desk.membership.view().degraded.iter().all(|one| one.reason != Reason::ClaimRefused));
}

/// Member 2 claims versions that no source announced.
fn lied_to(version: Version, policy: UpdatePolicy) -> Desk {
    let mut desk = Desk::restored(MembershipConfig { policy, ..config() }, 2, Restored::default());
    desk.form(2);
    desk.serves(3);
    desk.stated = None;
    let decisions = desk.tell(2, |state| (state.installed, state.retained) = (Some(other(version)), Some(other(version))));
    desk.obey(decisions);
    let decisions = desk.wait(10_000, &[0, 1, 2]);
    desk.obey(decisions);
    desk
}

#[test]
fn version_that_no_source_announced_moves_nothing() {
    let desk = lied_to(99, policy());
    let view = desk.membership.view();
    assert_eq!((view.version, view.wanted, view.feeder), (Some(held(3)), Some(held(3)), Some(name(0))));
    let mut desk = Desk::formed(2);
    desk.stated = None;
    desk.tell(2, |state| state.installed = Some(other(99)));
    assert_eq!(desk.membership.view().version, None, "not even the first");
}

#[test]
fn other_weights_of_the_current_version_are_never_fed() {
    let mut desk = lied_to(3, policy());
    desk.tell(0, |state| state.retained = None);
    desk.tell(1, |state| state.installed = None);
    let decisions = desk.wait(60_000, &[0, 1, 2]);
    desk.obey(decisions);
    let view = desk.membership.view();
    assert_eq!((view.version, view.feeder), (Some(held(3)), Some(name(1))));
    assert_eq!(desk.member(2).standing, MemberStanding::Behind);
}

#[test]
fn target_that_only_unproven_members_keep_is_not_gone_to() {
    let mut desk = lied_to(2, policy());
    desk.see(Observation::Configure(Box::new(MembershipConfig { target: Some(2), ..config() })));
    let view = desk.membership.view();
    assert_eq!((view.wanted, view.version), (Some(held(3)), Some(held(3))));
}

#[test]
fn refusal_of_an_unannounced_version_is_not_counted() {
    let canary = Some(CanaryPolicy { prompt: "p".into(), max_tokens: 1, least_log_prob_milli: -4000, greatest_log_prob_milli: 0 });
    let mut desk = lied_to(3, UpdatePolicy { canary, ..policy() });
    desk.tell(2, |state| {
        state.refused = vec![RefusedVersion { held: other(99), measured: "bad".to_owned() }];
    });
    assert_eq!(desk.membership.view().refused, Vec::<Version>::new());
    desk.stated = Some(1);
    desk.tell(1, |state| state.installed = Some(held(4)));
    assert_eq!(desk.membership.view().version, Some(held(4)), "the trainer is not locked out");
}

#[test]
fn newest_version_in_service_is_one_that_exists() {
    let desk = lied_to(5, UpdatePolicy { max_skew: Some(2), ..policy() });
    assert_eq!(desk.membership.view().newest, Some(3));
}

#[test]
fn statements_let_a_new_controller_take_over_without_a_source() {
    let mut working = Desk::formed(2);
    working.serves(3);
    let restored = Restored { term: 2, epoch: working.epoch(), ..Restored::default() };
    let mut desk = Desk::restored(config(), 0, restored);
    desk.states.clone_from(&working.states);
    desk.plan(&[1, 2], Vec::new());
    desk.announce(1);
    desk.announce(2);
    assert_eq!(desk.membership.view().version, Some(held(3)));
}

#[test]
fn number_used_again_means_the_weights_of_the_later_statement() {
    let mut desk =
        Desk::restored(MembershipConfig { policy: UpdatePolicy { min_ready: 2, ..policy() }, ..config() }, 3, Restored::default());
    desk.form(3);
    desk.tell(1, |state| (state.installed, state.retained) = (Some(held(8)), Some(held(8))));
    assert_eq!(desk.membership.view().version, None, "too few hold it");
    desk.stated = Some(5);
    let again = HeldVersion { manifest: "again".to_owned(), ..held(8) };
    for n in [0, 2, 3] {
        desk.tell(n, |state| (state.installed, state.retained) = (Some(again.clone()), Some(again.clone())));
    }
    desk.stated = Some(1);
    desk.tell(1, |_| ());
    assert_eq!(desk.membership.view().version, Some(again));
    assert_eq!(desk.member(1).standing, MemberStanding::Behind);
}

#[test]
fn statement_of_an_unwritten_epoch_proves_nothing() {
    let mut desk = Desk::formed(2);
    desk.stated = Some((1 << 63) - 2);
    desk.tell(2, |state| state.installed = Some(other(99)));
    assert_eq!(desk.membership.view().version, None);
}

#[test]
fn member_with_a_foreign_data_address_is_refused_alone() {
    let mut desk = Desk::new(3);
    let candidates = (0..=3u8).map(|n| {
        let mut candidate = candidate(n.into());
        // The third member responds from 10.0.0.3.
        let last = if n == 3 { 9 } else { n };
        candidate.pods[0].ips = vec![[10, 0, 0, last].into()];
        candidate
    });
    let mut decisions = desk.see(Observation::Candidates { candidates: candidates.collect(), left_out: Vec::new() });
    for n in 0..=3 {
        decisions.extend(desk.announce(n));
    }
    decisions.extend(desk.wait(1_000, &[0, 1, 2, 3]));
    desk.obey(decisions);
    let decisions = desk.wait(3_000, &[0, 1, 2, 3]);
    desk.obey(decisions);
    assert!(desk.membership.view().committed, "{:?}", desk.membership.view());
    assert_eq!((desk.member(1).rank_offset, desk.member(2).rank_offset, desk.member(3).rank_offset), (Some(1), Some(2), None));
    assert!(desk.event(Reason::FormationFailed).is_some_and(|(_, message)| message.contains("10.0.0.3:2")), "{:?}", desk.member(3));
}
