//! Leaders' reports about updates, and their consequences.

use super::desk::*;
use crate::membership::{Decision, MemberStanding, Observation, Restored};
use crate::protocol::*;

#[test]
fn misses_of_a_member_that_left_are_forgotten() {
    let mut desk = Desk::formed(3);
    desk.serves(1);
    let steps = [(1, InstallStep::Installed), (2, InstallStep::Refused), (3, InstallStep::Installed)];
    desk.leads(2, 1, UpdatePhase::Done, &steps);
    for members in [&[0, 1, 3][..], &[0, 1, 2, 3]] {
        let decisions = desk.plan(members, Vec::new());
        desk.obey(decisions);
        let decisions = desk.wait(15_000, &[0, 1, 2, 3]);
        desk.obey(decisions);
    }
    desk.leads(3, 2, UpdatePhase::Done, &steps);
    assert_eq!(desk.event(Reason::MemberFailed), None, "it missed one update since it is here");
}

#[test]
fn a_leaders_word_does_not_move_the_version_and_replicas_do() {
    let mut desk = Desk::formed(2);
    desk.leads(1, 1, UpdatePhase::Done, &[(1, InstallStep::Installed), (2, InstallStep::Installed)]);
    assert_eq!(desk.membership.view().version, None);
    desk.tell(1, |state| state.installed = Some(held(1)));
    assert_eq!(desk.membership.view().version, Some(held(1)));
    assert!(desk.event(Reason::VersionReached).is_some());
}

#[test]
fn fewer_than_min_ready_replicas_do_not_move_the_version() {
    let mut rules = config();
    rules.policy.min_ready = 2;
    let mut desk = Desk::restored(rules, 3, crate::membership::Restored::default());
    desk.form(3);
    desk.tell(1, |state| state.installed = Some(held(1)));
    desk.tell(2, |state| (state.phase, state.installed) = (MemberPhase::Dirty, Some(held(1))));
    assert_eq!(desk.membership.view().version, None);
    desk.tell(3, |state| state.installed = Some(held(1)));
    assert_eq!(desk.membership.view().version, Some(held(1)));
}

#[test]
fn the_version_does_not_go_back() {
    let mut desk = Desk::formed(1);
    desk.serves(5);
    desk.serves(4);
    assert_eq!(desk.membership.view().version, Some(held(5)));
    assert_eq!(desk.member(1).standing, MemberStanding::Behind);
}

#[test]
fn equal_numbers_with_other_weights_are_not_the_version() {
    let mut desk = Desk::formed(2);
    desk.serves(5);
    desk.tell(2, |state| state.installed = Some(HeldVersion { version: 5, manifest: "other".to_owned() }));
    assert_eq!(desk.member(2).standing, MemberStanding::Behind);
}

#[test]
fn a_failed_update_gets_one_new_epoch_and_later_ones_come_later() {
    let mut desk = Desk::formed(2);
    let mut waits = Vec::new();
    for attempt in 1..=5 {
        let begin = desk.now;
        let steps = [(1, InstallStep::Failed), (2, InstallStep::Failed)];
        let mut decisions = desk.leads(1, attempt, UpdatePhase::Failed, &steps);
        while !persists(&decisions) {
            decisions.extend(desk.wait(50, &[0, 1, 2]));
        }
        waits.push(desk.now - begin);
        desk.obey(decisions);
    }
    assert_eq!(desk.epoch(), 6);
    assert!(waits.windows(2).all(|pair| pair[1] > pair[0]), "{waits:?}");
    assert!(waits[0] <= 300, "{waits:?}");
    assert_eq!(desk.membership.view().version, None);
}

/// The source itself feeds a member that is late, before the new epoch is due.
#[test]
fn feeding_by_any_leader_does_not_heal_a_failed_publish() {
    for leader in [0, 1] {
        for ends in [&[UpdatePhase::Done][..], &[UpdatePhase::Failed, UpdatePhase::Done]] {
            let mut desk = Desk::formed(2);
            desk.serves(1);
            let mut decisions = desk.leads(2, 1, UpdatePhase::Failed, &[(1, InstallStep::Refused), (2, InstallStep::Refused)]);
            let (from, id) = (desk.states[leader].incarnation.clone(), desk.id());
            for (attempt, phase) in (2..).zip(ends) {
                let fed = UpdateView { feeding: true, ..update(&id, 1, attempt, *phase, &[(2, InstallStep::Installed)]) };
                decisions.extend(desk.see(Observation::Update { from: from.clone(), update: Box::new(fed) }));
            }
            for _ in 0..20 {
                decisions.extend(desk.wait(50, &[0, 1, 2]));
            }
            assert!(persists(&decisions), "the publish waits for another epoch, and {leader} fed: {ends:?}");
        }
    }
}

#[test]
fn feeding_that_goes_well_after_one_that_failed_forms_no_group() {
    let mut desk = Desk::formed(2);
    desk.serves(1);
    let (from, id) = (desk.states[0].incarnation.clone(), desk.id());
    let mut decisions = Vec::new();
    for (attempt, phase) in [(2, UpdatePhase::Failed), (3, UpdatePhase::Done)] {
        let fed = UpdateView { feeding: true, ..update(&id, 1, attempt, phase, &[(2, InstallStep::Installed)]) };
        decisions.extend(desk.see(Observation::Update { from: from.clone(), update: Box::new(fed) }));
    }
    for _ in 0..20 {
        decisions.extend(desk.wait(50, &[0, 1, 2]));
    }
    assert!(!persists(&decisions), "{decisions:?}");
}

#[test]
fn a_member_that_refuses_twice_is_left_out_of_the_next_epoch() {
    let mut desk = Desk::formed(2);
    for version in 1..=2 {
        let steps = [(1, InstallStep::Installed), (2, InstallStep::Refused)];
        let decisions = desk.leads(version, 1, UpdatePhase::Done, &steps);
        assert_eq!(persists(&decisions), version == 2, "{decisions:?}");
        if version == 2 {
            desk.obey(decisions);
        }
    }
    assert_eq!(desk.event(Reason::MemberFailed).unwrap(), (Some(name(2)), "full disk".to_owned()));
    let shown = desk.member(2);
    assert_eq!((shown.standing, shown.reason), (MemberStanding::Out, Reason::BackingOff));
    assert!(shown.message.contains("full disk"), "{}", shown.message);
    assert_eq!(desk.membership.view().world_size, 2);
}

#[test]
fn what_all_refuse_is_the_leaders_fault() {
    let mut desk = Desk::formed(2);
    for version in 1..=4 {
        let decisions = desk.leads(version, 1, UpdatePhase::Failed, &[(1, InstallStep::Refused), (2, InstallStep::Refused)]);
        desk.obey(decisions);
        let decisions = desk.wait(5_000, &[0, 1, 2]);
        desk.obey(decisions);
    }
    assert!(desk.event(Reason::MemberFailed).is_none());
    assert_eq!(desk.membership.view().world_size, 3);
}

#[test]
fn a_doubled_or_late_word_about_an_update_changes_nothing() {
    let mut desk = Desk::formed(2);
    let old = desk.id();
    let decisions = desk.lose(2);
    desk.obey(decisions);
    let late = Box::new(update(&old, 1, 1, UpdatePhase::Failed, &[(1, InstallStep::Failed)]));
    let before = desk.epoch();
    for _ in 0..2 {
        desk.see(crate::membership::Observation::Update { from: life(0, 1), update: late.clone() });
    }
    desk.wait(20_000, &[0, 1]);
    assert_eq!(desk.epoch(), before);
}

#[test]
fn replica_that_served_while_it_loaded_is_named_with_times() {
    let mut desk = Desk::restored(config(), 2, Restored::default());
    desk.form(2);
    desk.serves(1);
    let window = |version, end_ms| MixedWindow { version, begin_ms: version * 10, end_ms };
    desk.tell(1, |state| state.mixed = vec![window(1, Some(15))]);
    let message = desk.member(1).message;
    assert!(message.contains("while version 1 was loaded, from 10 to 15"), "{message}");
    assert!(!desk.member(2).message.contains("mixture"));
    desk.tell(1, |state| state.mixed.push(window(2, None)));
    assert!(desk.member(1).message.contains("since 20"), "{}", desk.member(1).message);
    desk.tell(1, |state| state.mixed = vec![window(7, Some(75))]);
    assert!(!desk.member(1).message.contains("mixture"), "a load of other weights than it holds: {}", desk.member(1).message);
}

/// An agent may find that out before it has a name in a group: it must not be lost then.
#[test]
fn member_compared_with_nothing_says_so_once_it_has_a_name() {
    let mut desk = Desk::restored(config(), 2, Restored::default());
    let why = |state: &mut MemberState| {
        if let Some(engine) = &mut state.engine {
            engine.unchecked = Some("there are pickles only".into());
        }
    };
    desk.tell(1, why);
    assert_eq!(desk.event(Reason::EngineUnproven), None);
    desk.form(2);
    desk.serves(1);
    let wanted = "the names and shapes of a first version are compared with nothing: there are pickles only";
    assert_eq!(desk.event(Reason::EngineUnproven), Some((Some(name(1)), wanted.to_owned())));
    assert!(desk.member(1).message.ends_with(&format!("; {wanted}")), "{}", desk.member(1).message);
    assert!(!desk.member(2).message.contains("compared"), "{}", desk.member(2).message);
    let decisions = desk.tell(1, |state| state.healthy = true);
    assert!(!decisions.iter().any(|decision| matches!(decision, Decision::Event { .. })), "it is known: {decisions:?}");
}
