use std::sync::Weak;

use proptest::prelude::*;

use super::*;
use crate::rollout::machine::{Activating, Opening};
use crate::tests::machine::{begin, finish, held, id, start};
use weightsync_core::protocol::{HealthPolicy, KvCachePolicy, PausePolicy, ProvenBy, Version};
use weightsync_engine::{EngineError, Holding, InstallError, InstallReport, Left, Settled};

const LIMIT: Duration = Duration::from_secs(60);
const HEALTH: HealthPolicy = HealthPolicy { period_ms: 1_000, timeout_ms: 3_000, failure_threshold: 2, success_threshold: 2 };

#[derive(Debug)]
struct Files(HeldVersion);

impl Archived for Files {
    fn held(&self) -> &HeldVersion {
        &self.0
    }

    fn memory(&self) -> u64 {
        100
    }
}

fn at(seconds: u64) -> Now {
    Now { elapsed: Duration::from_secs(seconds), unix_ms: 1_000_000 + seconds * 1_000 }
}

fn files(version: Version) -> Arc<Files> {
    Arc::new(Files(held(version, "m")))
}

fn layout() -> Arc<Layout> {
    Arc::new(crate::tests::trainer::weights(1).0)
}

fn confirmed(by: u32) -> Outcome {
    let report = InstallReport { start: start(by), steps_ms: Vec::new(), owes_answer: false };
    Outcome::Confirmed(report, ProvenBy::Digests)
}

fn failed(step: &'static str, left: Left, source: EngineError) -> Outcome {
    Outcome::Failed(InstallError { step, left, source })
}

fn refused() -> EngineError {
    EngineError::Status { url: "http://engine".into(), status: 500, body: "no".into() }
}

/// A state that knows its engine, by one start.
fn healthy() -> State<Files> {
    let mut state = State::default();
    state.engine_answered(start(1), None);
    state.engine.passed(&HEALTH, true, None);
    state
}

/// Switches to a version in files, with this end.
fn switch(state: &mut State<Files>, version: &Arc<Files>, outcome: Outcome, seconds: u64) {
    let switch = state.switch_begins(LIMIT, layout(), at(seconds));
    state.versions.touch(version);
    assert!(state.is_switching());
    state.switch_ended(Ended { held: &version.0, files: Some(version), outcome, switch, limit: LIMIT }, at(seconds));
    state.settle(at(seconds));
    assert!(!state.is_switching());
}

/// Receives a version into files, up to the request to switch.
fn deliver(state: &mut State<Files>, version: Version) -> Arc<Files> {
    let update = id(1, version, 1);
    let by = crate::group::LedBy { role: weightsync_core::protocol::Role::Source, pod_uid: "trainer".into() };
    assert_eq!(state.begins(&begin(&update, false, None), by, None), Ok(Opening::Check));
    state.machine.opened(&update, false).unwrap();
    assert!(state.receives(&update, Takes::Files));
    state.machine.streamed(&update, 1).unwrap();
    state.machine.finish(&finish(&update, "m")).unwrap();
    state.verified(&update, Ok((held(version, "m"), Some(Files(held(version, "m"))))), 1).unwrap();
    let files = state.versions.find(&held(version, "m")).cloned().unwrap();
    assert_eq!(state.machine.activate(&update), Ok(Activating::Install(held(version, "m"))));
    files
}

#[test]
fn switch_confirmed_installs_and_ends_the_attempt() {
    let mut state = healthy();
    let files = deliver(&mut state, 1);
    switch(&mut state, &files, confirmed(1), 1);
    assert_eq!(state.machine.installed().map(|installed| &installed.held), Some(&files.0));
    assert_eq!(state.last(), Some(&files.0));
    assert!(state.versions.kept().is_some_and(|kept| Arc::ptr_eq(kept, &files)));
    assert_eq!(state.take_effects().stop.as_deref(), Some("it is installed"));
    assert!(state.took().is_some_and(|took| took.held == files.0));
}

#[test]
fn switch_confirmed_drops_what_the_object_does_not_keep() {
    let mut state = healthy();
    for version in 1..=3 {
        let files = deliver(&mut state, version);
        switch(&mut state, &files, confirmed(1), version);
    }
    let gone: Vec<Version> = state.take_effects().dropped.iter().map(|files| files.0.version).collect();
    assert_eq!(gone, [1, 2]);
}

#[test]
fn switch_failed_before_a_change_keeps_the_engine_in_service() {
    let mut state = healthy();
    let first = deliver(&mut state, 1);
    switch(&mut state, &first, confirmed(1), 1);
    let second = deliver(&mut state, 2);
    switch(&mut state, &second, failed("pause", Left::AsBefore, EngineError::Cancelled), 2);
    assert!(!state.machine.must_not_serve());
    assert_eq!(state.machine.installed().map(|installed| installed.held.version), Some(1));
}

#[test]
fn half_an_update_keeps_its_files_until_put_back() {
    let mut state = healthy();
    let (files, seen) = {
        let files = deliver(&mut state, 1);
        let seen = Arc::downgrade(&files);
        (files, seen)
    };
    switch(&mut state, &files, failed("load", Left::Mixture, EngineError::Cancelled), 1);
    drop(files);
    state.versions.unstage();
    assert!(seen.upgrade().is_some(), "the engine may still read them");
    assert!(state.why_not_serve().is_some());
    assert!(!state.must_put_back(LIMIT, at(60)) && state.must_put_back(LIMIT, at(61)));
    state.put_back();
    state.settle(at(62));
    assert!(seen.upgrade().is_none() && state.why_not_serve().is_none());
    assert!(!state.must_put_back(LIMIT, at(500)));
}

#[test]
fn put_back_that_failed_waits_a_whole_deadline() {
    let mut state = healthy();
    let files = files(1);
    switch(&mut state, &files, Outcome::NoEnd, 1);
    assert!(state.must_put_back(LIMIT, at(61)));
    state.put_back_tried(at(61));
    assert!(!state.must_put_back(LIMIT, at(120)) && state.must_put_back(LIMIT, at(121)));
}

#[test]
fn unproven_end_keeps_the_files_once_the_engine_confirms() {
    let mut state = healthy();
    let files = files(1);
    switch(&mut state, &files, failed("resume", Left::Unknown, EngineError::Cancelled), 1);
    assert!(state.must_ask() && state.versions.kept().is_none());
    let settled = Settled { start: start(1), holding: Holding::Version(files.0.clone()), resumed: true };
    assert_eq!(state.engine_settled(&settled), Some(files.0.clone()));
    assert!(state.versions.kept().is_some_and(|kept| Arc::ptr_eq(kept, &files)));
    assert!(!state.must_ask());
}

#[test]
fn second_version_refused_by_the_loader_makes_it_suspect() {
    let load = |state: &mut State<Files>, version| switch(state, &files(version), failed("load", Left::Mixture, refused()), version);
    let mut state = healthy();
    load(&mut state, 1);
    load(&mut state, 1);
    assert!(!state.refusals.is_suspect(), "one version may be wrong");
    state.engine_answered(start(2), None);
    load(&mut state, 2);
    assert!(!state.refusals.is_suspect(), "another start refused the other one");
    load(&mut state, 3);
    assert!(state.must_put_back(LIMIT, at(3)), "its start-up weights show which is wrong");
    state.not_put_back(&refused());
    assert!(state.engine.unhealthy() && state.engine.is_wedged());
}

#[test]
fn engine_that_fails_probes_is_unhealthy_at_the_threshold() {
    let mut state = healthy();
    assert_eq!(state.engine_failed(&HEALTH, "no answer", false), None);
    assert!(!state.engine.unhealthy());
    assert_eq!(state.engine_failed(&HEALTH, "no answer", false), Some(2));
    state.engine.passed(&HEALTH, false, None);
    assert!(state.engine.unhealthy() && state.ill().as_deref() == Some("no answer"));
    state.engine.passed(&HEALTH, false, None);
    assert!(!state.engine.unhealthy() && state.ill().is_none());
}

#[test]
fn engine_is_known_when_its_first_answer_counts_and_not_before() {
    let mut state: State<Files> = State::default();
    let answered = state.engine_answered(start(1), None);
    assert!(answered.is_new && answered.is_first);
    let mut facts = Facts::default();
    state.show(&mut facts, None);
    assert_eq!((facts.engine, facts.healthy, facts.reason), (None, false, None), "it was not asked yet");
    let known = crate::tests::engine::facts();
    state.engine.passed(&HEALTH, answered.is_first, Some(&known));
    let mut facts = Facts::default();
    state.show(&mut facts, None);
    assert_eq!((facts.engine, facts.healthy), (Some(known), true));
    assert!(!state.engine_answered(start(1), None).is_new);
}

#[test]
fn engine_being_switched_is_not_judged() {
    let mut state = healthy();
    let switch = state.switch_begins(LIMIT, layout(), at(1));
    for _ in 0..5 {
        assert_eq!(state.engine_failed(&HEALTH, "no answer", true), None);
    }
    assert!(!state.engine.unhealthy());
    state.install_given_up("over".into(), Left::AsBefore, switch);
    state.engine_failed(&HEALTH, "no answer", true);
    assert_eq!(state.engine_failed(&HEALTH, "no answer", true), Some(2));
}

#[test]
fn process_that_ended_is_not_healed_by_an_answer() {
    let mut state = healthy();
    state.engine_ended("exit code 1");
    state.engine.passed(&HEALTH, true, None);
    assert!(state.engine.unhealthy() && state.engine.gone());
    assert_eq!(state.ill().as_deref(), Some("exit code 1"));
}

#[test]
fn attempt_that_the_engine_takes_gives_way_to_a_later_one() {
    for (takes, gives_way) in [(Takes::Engine, true), (Takes::Files, false)] {
        let mut state = healthy();
        let first = id(1, 1, 1);
        let by = crate::group::LedBy { role: weightsync_core::protocol::Role::Source, pod_uid: "trainer".into() };
        state.begins(&begin(&first, false, None), by, None).unwrap();
        state.machine.opened(&first, takes == Takes::Engine).unwrap();
        assert!(state.receives(&first, takes) && !state.receives(&first, takes));
        state.make_way(&first);
        assert_eq!(state.take_effects().stop, None, "it does not give way to itself");
        state.make_way(&id(1, 2, 1));
        assert_eq!(state.take_effects().stop.is_some(), gives_way);
    }
}

#[derive(Debug, Clone)]
enum Happens {
    Delivered(Version),
    Switch(Version, u8),
    GivenUp(u8),
    Answers(u32),
    Reports(Version),
    Settles(Version, bool),
    PutBack(bool),
    OwesAnswer(Version),
    Probe(bool),
    EpochOver,
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        (1..4_u64).prop_map(Happens::Delivered),
        (1..4_u64, 0..8_u8).prop_map(|(version, end)| Happens::Switch(version, end)),
        (0..3_u8).prop_map(Happens::GivenUp),
        (1..3_u32).prop_map(Happens::Answers),
        (1..4_u64).prop_map(Happens::Reports),
        (1..4_u64, any::<bool>()).prop_map(|(version, half)| Happens::Settles(version, half)),
        any::<bool>().prop_map(Happens::PutBack),
        (1..4_u64).prop_map(Happens::OwesAnswer),
        any::<bool>().prop_map(Happens::Probe),
        Just(Happens::EpochOver),
    ]
}

fn left(end: u8) -> Left {
    match end % 3 {
        0 => Left::AsBefore,
        1 => Left::Mixture,
        _ => Left::Unknown,
    }
}

fn end(number: u8, running: u32) -> Outcome {
    match number {
        0 | 1 => confirmed(running),
        2 => Outcome::NoEnd,
        3 => failed("canary", Left::Mixture, EngineError::CanaryRefused { measured: "far off".into() }),
        4 => failed("load", Left::Mixture, refused()),
        _ => failed("load", left(number), EngineError::Cancelled),
    }
}

proptest! {
    /// Whatever happens: an engine that may hold half an update holds no version, and its files stay; no switch is forgotten.
    #[test]
    fn events_in_any_order_keep_the_promises(events in prop::collection::vec(happens(), 1..60)) {
        let (mut state, mut running) = (healthy(), 1);
        // The files that the engine may be reading, by the last switch that left half of them.
        let mut read: Option<Weak<Files>> = None;
        for (seconds, event) in (1..).zip(events) {
            match event {
                Happens::Delivered(version) => {
                    let update = id(1, version, 1);
                    let by = crate::group::LedBy { role: weightsync_core::protocol::Role::Source, pod_uid: "trainer".into() };
                    if state.begins(&begin(&update, false, None), by, None) == Ok(Opening::Check) {
                        state.machine.opened(&update, false).unwrap();
                        prop_assert!(state.receives(&update, Takes::Files));
                        state.machine.streamed(&update, 1).unwrap();
                        state.verified(&update, Ok((held(version, "m"), Some(Files(held(version, "m"))))), 1).unwrap();
                    }
                }
                Happens::Switch(version, number) => {
                    let files = state.versions.find(&held(version, "m")).cloned().unwrap_or_else(|| files(version));
                    let outcome = end(number, running);
                    let half = match &outcome {
                        Outcome::Confirmed(..) => false,
                        Outcome::Failed(error) => error.left == Left::Mixture,
                        Outcome::NoEnd => true,
                    };
                    let before = state.machine.installed().cloned();
                    switch(&mut state, &files, outcome, seconds);
                    read = half.then(|| Arc::downgrade(&files));
                    prop_assert!(state.machine.installed().is_none_or(|now| before.as_ref() == Some(now) || now.held == files.0));
                }
                Happens::GivenUp(end) => {
                    let switch = state.switch_begins(LIMIT, layout(), at(seconds));
                    state.install_given_up("given up".into(), left(end), switch);
                    prop_assert!(!state.is_switching());
                }
                Happens::Answers(number) => {
                    running = number;
                    state.engine_answered(start(number), None);
                }
                Happens::Reports(version) => {
                    let answered = state.engine_answered(start(running), Some(&Holding::Version(held(version, "m"))));
                    prop_assert!(!answered.differs || state.machine.installed().is_none());
                }
                Happens::Settles(version, half) => {
                    let of = held(version, "m");
                    let holding = if half { Holding::HalfAnUpdate(of) } else { Holding::Version(of) };
                    let unproven = state.machine.unproven().is_some();
                    let counts = state.engine_settled(&Settled { start: start(running), holding, resumed: false });
                    prop_assert!(counts.is_none() || unproven && !half);
                    read = read.filter(|_| !unproven || half);
                }
                Happens::PutBack(true) => {
                    state.put_back();
                    read = None;
                }
                Happens::PutBack(false) => state.put_back_tried(at(seconds)),
                Happens::OwesAnswer(version) => state.token_failed(&held(version, "m"), Left::Mixture, "no token", at(seconds)),
                Happens::Probe(true) => state.engine.passed(&HEALTH, false, None),
                Happens::Probe(false) => drop(state.engine_failed(&HEALTH, "no answer", false)),
                Happens::EpochOver => state.epoch_over("the epoch is over"),
            }
            state.settle(at(seconds));
            let mut facts = Facts::default();
            state.show(&mut facts, None);
            prop_assert!(!state.machine.must_not_serve() || state.machine.installed().is_none(), "a mixture counts as a version");
            prop_assert!(!state.machine.must_not_serve() || facts.reason.is_some());
            prop_assert!(read.as_ref().is_none_or(|files| files.upgrade().is_some()), "files that the engine may read are gone");
            prop_assert!(facts.refused.len() <= 4);
            prop_assert_eq!(state.must_put_back(Duration::ZERO, at(seconds)), state.machine.live().is_none() && (state.machine.must_not_serve() || state.refusals.is_suspect()));
        }
    }
}

#[test]
fn external_pause_is_not_reported_as_ours() {
    let mut state = healthy();
    let mut policy = crate::rollout::supervise::usual_policy();
    policy.pause = PausePolicy::External;
    policy.kv_cache = KvCachePolicy::Keep;
    state.prepared(&policy);
    let _switch = state.switch_begins(LIMIT, layout(), at(1));
    let mut facts = Facts::default();
    state.show(&mut facts, None);
    assert_eq!(facts.paused_until, None);
}
