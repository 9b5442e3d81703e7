//! The consequences of measured edges.

use super::desk::*;
use crate::membership::{MemberStanding, Observation};
use crate::protocol::*;

fn poor(n: u32, broken: bool) -> PoorMember {
    PoorMember { member: name(n), from: name(0), broken, why: format!("the edge from {} to {} is poor", name(0), name(n)) }
}

/// The leader reports its measurements of the present epoch.
fn measured(desk: &mut Desk, poor: Vec<PoorMember>) {
    let decisions = desk.tell(0, |state| {
        state.preflight = state.epoch.clone().map(|id| {
            Box::new(PreflightReport {
                id,
                transport: "tcp".to_owned(),
                asked: String::new(),
                done: true,
                measured: 3,
                took_ms: 10,
                edges: Vec::new(),
                arrangement: Arrangement { order: Vec::new(), moved: Vec::new(), poor, source: None },
            })
        });
    });
    desk.obey(decisions);
}

fn needs(min_ready: u32) -> Desk {
    let mut desk = Desk::formed(3);
    let mut config = config();
    config.policy.min_ready = min_ready;
    let decisions = desk.see(Observation::Configure(Box::new(config)));
    desk.obey(decisions);
    desk.wait(2_000, &[0, 1, 2, 3]);
    let decisions = std::mem::take(&mut desk.decisions);
    desk.obey(decisions);
    desk
}

fn out(desk: &Desk) -> Vec<(MemberName, Reason)> {
    let view = desk.membership.view();
    let out = view.members.iter().filter(|member| member.standing == MemberStanding::Out);
    out.map(|member| (member.name.clone(), member.reason)).collect()
}

#[test]
fn slow_member_is_left_out_and_named_while_enough_are_left() {
    let mut desk = Desk::formed(3);
    measured(&mut desk, vec![poor(2, false)]);
    assert_eq!(out(&desk), [(name(2), Reason::BadEdge)]);
    let view = desk.membership.view();
    assert!(view.committed && view.degraded.iter().any(|found| found.reason == Reason::BadEdge && found.message.contains(&name(0).0)));
    let events = desk.decisions.iter().filter(|decision| {
        matches!(decision, crate::membership::Decision::Event { reason: Reason::BadEdge, member: Some(member), .. } if *member == name(2))
    });
    assert_eq!(events.count(), 1);
    // It does not return at once, which would slow the others again.
    desk.wait(60_000, &[0, 1, 2, 3]);
    assert_eq!(out(&desk), [(name(2), Reason::BadEdge)]);
}

#[test]
fn slow_member_that_is_needed_stays_and_is_named() {
    let mut desk = needs(3);
    measured(&mut desk, vec![poor(2, false)]);
    assert_eq!(out(&desk), []);
    let named = |found: &crate::membership::Degradation| found.reason == Reason::BadEdge && found.member == Some(name(2));
    assert!(desk.membership.view().degraded.iter().any(named));
}

#[test]
fn member_with_a_broken_edge_is_left_out_though_it_is_needed() {
    let mut desk = needs(3);
    measured(&mut desk, vec![poor(2, true)]);
    assert_eq!(out(&desk), [(name(2), Reason::BadEdge)]);
}

#[test]
fn of_two_slow_members_the_slowest_goes_first() {
    let mut desk = needs(2);
    measured(&mut desk, vec![poor(1, false), poor(3, false)]);
    assert_eq!(out(&desk), [(name(3), Reason::BadEdge)]);
}

#[test]
fn new_request_brings_members_back_to_be_measured() {
    let mut desk = Desk::formed(3);
    measured(&mut desk, vec![poor(2, false)]);
    let mut config = config();
    config.policy.transport.preflight_asked = "again".to_owned();
    let decisions = desk.see(Observation::Configure(Box::new(config)));
    desk.obey(decisions);
    let decisions = desk.wait(2_000, &[0, 1, 2, 3]);
    desk.obey(decisions);
    let view = desk.membership.view();
    assert!(view.committed && out(&desk).is_empty(), "{view:?}");
    assert_eq!(desk.states[0].epoch.as_ref(), desk.states[2].epoch.as_ref());
}

/// Finding: each change of the annotation made an epoch and measured every edge, as often as a program wrote it.
#[test]
fn requests_in_a_row_are_followed_once_and_the_last_later() {
    let mut desk = Desk::formed(3);
    let everyone = [0, 1, 2, 3];
    let present = |desk: &Desk| {
        let prepared = desk.decisions.iter().rev().find_map(|decision| match decision {
            crate::membership::Decision::Prepare { request, .. } => Some(request.policy.transport.preflight_asked.clone()),
            _ => None,
        });
        prepared.unwrap()
    };
    let ask = |desk: &mut Desk, request: &str| {
        let mut config = config();
        config.policy.transport.preflight_asked = request.to_owned();
        let decisions = desk.see(Observation::Configure(Box::new(config)));
        desk.obey(decisions);
        let decisions = desk.wait(2_000, &everyone);
        desk.obey(decisions);
    };
    let first = desk.epoch();
    for number in 1..=8 {
        ask(&mut desk, &number.to_string());
    }
    assert_eq!(desk.epoch(), first + 1, "one epoch for the first request");
    // 16 s have passed of 30.
    let decisions = desk.wait(13_000, &everyone);
    desk.obey(decisions);
    assert_eq!(desk.epoch(), first + 1);
    let decisions = desk.wait(4_000, &everyone);
    desk.obey(decisions);
    assert_eq!((desk.epoch(), present(&desk).as_str()), (first + 2, "8"), "the newest is not lost");
    // A request that is taken back while it waits is none.
    ask(&mut desk, "9");
    ask(&mut desk, "8");
    let decisions = desk.wait(60_000, &everyone);
    desk.obey(decisions);
    assert_eq!(desk.epoch(), first + 2);
    // After the rest the next one is followed at once.
    ask(&mut desk, "10");
    assert_eq!((desk.epoch(), present(&desk).as_str()), (first + 3, "10"));
}

#[test]
fn report_of_an_earlier_epoch_changes_nothing() {
    let mut desk = Desk::formed(3);
    let old = desk.states[0].epoch.clone();
    let decisions = desk.lose(3);
    desk.obey(decisions);
    let decisions = desk.tell(0, |state| {
        let arrangement = Arrangement { poor: vec![poor(2, true)], ..Arrangement::default() };
        state.preflight = old.map(|id| {
            let (transport, asked) = ("tcp".to_owned(), String::new());
            Box::new(PreflightReport { id, transport, asked, done: true, measured: 1, took_ms: 1, edges: Vec::new(), arrangement })
        });
    });
    desk.obey(decisions);
    assert!(!out(&desk).iter().any(|(member, _)| *member == name(2)));
}
