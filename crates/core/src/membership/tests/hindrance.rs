//! The report to a trainer about a group that cannot take its version.

use super::desk::*;
use crate::plan::{LeftOut, LeftOutCode};
use crate::protocol::*;

fn hindrance(desk: &Desk) -> Hindrance {
    desk.membership.latest().hindrance.clone().expect("no group can take a version")
}

/// Forms a group of a source and two rollouts, of which the second refuses with `code`.
fn refused(min_ready: u32, code: RefusalCode) -> Desk {
    let mut config = config();
    config.policy.min_ready = min_ready;
    let message = "SGLang 0.5.23 has no pause that lets running requests end".to_owned();
    Desk::refused_by_second(config, Refusal { code, message })
}

#[test]
fn hindrance_names_what_the_engine_lacks_and_is_permanent() {
    let Hindrance { message, permanent } = hindrance(&refused(2, RefusalCode::Unsupported));
    assert!(message.contains("actors/r2: Unsupported: SGLang 0.5.23 has no pause"), "{message}");
    assert!(permanent);
}

#[test]
fn hindrance_that_time_or_others_can_end_is_not_permanent() {
    assert!(!hindrance(&refused(2, RefusalCode::EngineRefused)).permanent);
    // One of the two is enough; it is only not in a group yet.
    assert!(!hindrance(&refused(1, RefusalCode::Unsupported)).permanent);
}

#[test]
fn hindrance_names_missing_agents_and_rollouts() {
    let mut desk = Desk::new(1);
    desk.plan(&[0, 1], Vec::new());
    desk.announce(0);
    let Hindrance { message, permanent } = hindrance(&desk);
    assert!(message.contains("actors/r1: AgentMissing: no agent has announced itself from pod pod-1"), "{message}");
    assert!(!permanent);
    desk.plan(&[0], Vec::new());
    assert!(hindrance(&desk).message.contains("there are 0 rollouts, 1 are needed"), "{}", hindrance(&desk).message);
}

#[test]
fn hindrance_of_many_members_stays_short() {
    let mut desk = Desk::new(40);
    let left = |n| LeftOut { who: name(n), role: Role::Rollout, pods: Vec::new(), code: LeftOutCode::NotReady, message: "m".repeat(5_000) };
    desk.plan(&[0], (1..=40).map(left).collect());
    let message = hindrance(&desk).message;
    assert!(message.len() < 4_000 && message.contains(" more"), "{} bytes", message.len());
}
