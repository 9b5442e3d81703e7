//! The rollout's state machine: tables for what is refused, and random walks that never break its promises.

use proptest::prelude::*;

use super::trainer::weights;
use crate::rollout::machine::{Activating, Finishing, Machine, Opening};
use weightsync_core::protocol::*;
use weightsync_core::weights::DigestAlgorithm;
use weightsync_engine::{EngineStart, Left};

pub(crate) fn id(epoch: u64, version: Version, attempt: u32) -> UpdateId {
    UpdateId { epoch: EpochId { weightsync: "w".into(), created: 1, term: 0, epoch }, version, attempt }
}

pub(crate) fn begin(update: &UpdateId, feeding: bool, manifest: Option<&str>) -> BeginRequest {
    let (layout, _) = weights(1);
    BeginRequest {
        update: update.clone(),
        layout_digest: layout.digest(),
        layout,
        algorithm: DigestAlgorithm::default(),
        feeding,
        manual: false,
        manifest_digest: manifest.map(str::to_owned),
        statement: None,
    }
}

pub(crate) fn finish(update: &UpdateId, manifest: &str) -> FinishRequest {
    FinishRequest { update: update.clone(), tensor_digests: Vec::new(), manifest_digest: manifest.into(), statement: None, check: false }
}

pub(crate) fn held(version: Version, manifest: &str) -> HeldVersion {
    HeldVersion { version, manifest: manifest.into() }
}

pub(crate) fn start(number: u32) -> EngineStart {
    EngineStart(number.to_string())
}

/// Takes a version all the way.
fn install(machine: &mut Machine, update: &UpdateId, manifest: &str) {
    assert_eq!(machine.begin(&begin(update, false, None), &[]), Ok(Opening::Check));
    machine.opened(update, false).unwrap();
    machine.streamed(update, 1).unwrap();
    assert_eq!(machine.finish(&finish(update, manifest)), Ok(Finishing::Verify));
    machine.verified(update, Ok(held(update.version, manifest)), 1).unwrap();
    assert_eq!(machine.activate(update), Ok(Activating::Install(held(update.version, manifest))));
    machine.install_confirmed(held(update.version, manifest), start(1), ProvenBy::Digests, Vec::new());
}

#[test]
fn feeding_replaces_other_weights_under_the_same_number() {
    let mut machine = Machine::default();
    install(&mut machine, &id(1, 8, 1), "m1");
    let fed = id(2, 8, 1);
    assert_eq!(machine.begin(&begin(&fed, true, Some("m2")), &[held(8, "m1")]), Ok(Opening::Check));
    machine.opened(&fed, false).unwrap();
    machine.streamed(&fed, 1).unwrap();
    assert_eq!(machine.finish(&finish(&fed, "m2")), Ok(Finishing::Verify));
    machine.verified(&fed, Ok(held(8, "m2")), 1).unwrap();
    assert_eq!(machine.activate(&fed), Ok(Activating::Install(held(8, "m2"))));
    machine.install_confirmed(held(8, "m2"), start(1), ProvenBy::Digests, Vec::new());
    assert_eq!(machine.installed().unwrap().held, held(8, "m2"));
}

#[test]
fn version_is_not_installed_while_the_process_may_differ() {
    let mut machine = Machine::default();
    install(&mut machine, &id(1, 1, 1), "m");
    machine.engine_is_certain(false);
    assert_eq!(machine.certainly_installed(), None);
    let again = id(2, 1, 2);
    assert_eq!(machine.begin(&begin(&again, true, Some("m")), &[held(1, "m")]), Ok(Opening::Known));
    assert_eq!(machine.status().unwrap().step, InstallStep::Delivered, "it is to be switched once more");
    machine.abort(&again, "over");
    machine.engine_is_certain(true);
    let again = id(2, 1, 3);
    assert_eq!(machine.begin(&begin(&again, true, Some("m")), &[held(1, "m")]), Ok(Opening::Known));
    assert_eq!(machine.status().unwrap().step, InstallStep::Installed);
}

#[test]
fn no_step_can_be_skipped() {
    let update = id(1, 1, 1);
    let mut machine = Machine::default();
    assert!(machine.activate(&update).is_err());
    machine.begin(&begin(&update, false, None), &[]).unwrap();
    assert!(machine.streamed(&update, 0).is_err());
    assert!(machine.finish(&finish(&update, "m")).is_err());
    machine.opened(&update, false).unwrap();
    assert!(machine.finish(&finish(&update, "m")).is_err());
    assert!(machine.activate(&update).is_err());
    machine.streamed(&update, 0).unwrap();
    assert!(machine.activate(&update).is_err());
    machine.verified(&update, Err("tensor head differs".into()), 0).unwrap();
    assert_eq!(machine.status().unwrap().step, InstallStep::Failed);
    assert_eq!(machine.activate(&update), Ok(Activating::Known));
    assert!(machine.installed().is_none());
}

#[test]
fn a_lower_number_is_refused_and_a_feeding_may_lower() {
    let mut machine = Machine::default();
    install(&mut machine, &id(1, 5, 1), "five");
    let lower = machine.begin(&begin(&id(1, 4, 1), false, None), &[]).unwrap_err();
    assert_eq!(lower.code, RefusalCode::VersionNotHigher);
    let other = machine.begin(&begin(&id(1, 5, 2), false, Some("other")), &[]).unwrap_err();
    assert_eq!(other.code, RefusalCode::VersionNotHigher);
    assert_eq!(machine.begin(&begin(&id(2, 4, 1), true, Some("four")), &[]), Ok(Opening::Check));
}

#[test]
fn what_is_held_is_not_received_again() {
    let mut machine = Machine::default();
    install(&mut machine, &id(1, 5, 1), "five");
    assert_eq!(machine.begin(&begin(&id(2, 5, 2), false, Some("five")), &[held(5, "five")]), Ok(Opening::Known));
    assert_eq!(machine.status().unwrap().step, InstallStep::Installed);
    // The engine started again: the files are there, the engine must be switched.
    assert!(machine.engine_seen(&start(2)));
    assert_eq!(machine.begin(&begin(&id(2, 5, 3), true, Some("five")), &[held(5, "five")]), Ok(Opening::Known));
    assert_eq!(machine.status().unwrap().step, InstallStep::Delivered);
}

#[test]
fn fence_ends_arrival_and_lets_a_switching_engine_finish() {
    let update = id(1, 1, 1);
    let mut machine = Machine::default();
    machine.begin(&begin(&update, false, None), &[]).unwrap();
    machine.opened(&update, false).unwrap();
    assert!(machine.epoch_over("fenced"));
    let ended = machine.status().unwrap();
    assert_eq!((ended.step, ended.fenced), (InstallStep::Failed, true));
    let update = id(2, 1, 2);
    machine.begin(&begin(&update, false, None), &[]).unwrap();
    machine.opened(&update, false).unwrap();
    machine.streamed(&update, 0).unwrap();
    machine.verified(&update, Ok(held(1, "one")), 0).unwrap();
    machine.activate(&update).unwrap();
    assert!(!machine.epoch_over("fenced"));
    assert_eq!(machine.begin(&begin(&id(3, 1, 3), false, Some("one")), &[]), Ok(Opening::Busy));
    machine.install_confirmed(held(1, "one"), start(1), ProvenBy::Digests, Vec::new());
    assert_eq!(machine.begin(&begin(&id(3, 1, 3), false, Some("one")), &[]), Ok(Opening::Known));
}

#[test]
fn an_older_version_does_not_push_a_newer_one_aside() {
    let mut machine = Machine::default();
    machine.begin(&begin(&id(1, 6, 1), false, None), &[]).unwrap();
    let late = machine.begin(&begin(&id(1, 5, 1), true, None), &[]).unwrap_err();
    assert_eq!(late.code, RefusalCode::WrongPhase);
    // In another epoch the attempt of the one before is over, whatever its number.
    assert_eq!(machine.begin(&begin(&id(2, 5, 1), true, None), &[]), Ok(Opening::Check));
}

#[test]
fn dirty_engine_is_clean_only_after_install_or_new_start() {
    let update = id(1, 1, 1);
    let dirty = |machine: &mut Machine| {
        machine.begin(&begin(&update, false, None), &[]).unwrap();
        machine.opened(&update, false).unwrap();
        machine.streamed(&update, 0).unwrap();
        machine.verified(&update, Ok(held(1, "one")), 0).unwrap();
        machine.activate(&update).unwrap();
        machine.install_failed("load failed".into(), Left::Mixture, None, Some(start(1)));
    };
    let mut machine = Machine::default();
    dirty(&mut machine);
    machine.epoch_over("fenced");
    assert!(!machine.engine_seen(&start(1)));
    assert!(machine.dirty().is_some() && machine.status().unwrap().dirty);
    assert_eq!(machine.begin(&begin(&id(2, 1, 2), true, Some("one")), &[held(1, "one")]), Ok(Opening::Known));
    assert_eq!(machine.activate(&id(2, 1, 2)), Ok(Activating::Install(held(1, "one"))));
    machine.install_confirmed(held(1, "one"), start(1), ProvenBy::Digests, Vec::new());
    assert!(machine.dirty().is_none());
    let mut machine = Machine::default();
    dirty(&mut machine);
    assert!(machine.engine_seen(&start(2)) && machine.dirty().is_none() && machine.installed().is_none());
}

/// One thing that may happen to a machine.
#[derive(Debug, Clone)]
enum Happens {
    Begin(u64, Version, u32, bool, bool),
    Opened(u64, Version, u32),
    Streamed(u64, Version, u32),
    Verified(u64, Version, u32, bool),
    Activate(u64, Version, u32),
    Confirmed,
    Failed(bool),
    Abort(u64, Version, u32),
    EpochOver,
    Engine(u32),
}

fn happens() -> impl Strategy<Value = Happens> {
    let update = || (1..3_u64, 1..4_u64, 1..3_u32);
    prop_oneof![
        (update(), any::<bool>(), any::<bool>()).prop_map(|((e, v, a), feeding, known)| Happens::Begin(e, v, a, feeding, known)),
        update().prop_map(|(e, v, a)| Happens::Opened(e, v, a)),
        update().prop_map(|(e, v, a)| Happens::Streamed(e, v, a)),
        (update(), any::<bool>()).prop_map(|((e, v, a), well)| Happens::Verified(e, v, a, well)),
        update().prop_map(|(e, v, a)| Happens::Activate(e, v, a)),
        Just(Happens::Confirmed),
        any::<bool>().prop_map(Happens::Failed),
        update().prop_map(|(e, v, a)| Happens::Abort(e, v, a)),
        Just(Happens::EpochOver),
        (1..3_u32).prop_map(Happens::Engine),
    ]
}

proptest! {
    #[test]
    fn installed_means_verified_then_confirmed_by_this_start(story in prop::collection::vec(happens(), 1..60)) {
        let mut machine = Machine::default();
        let (mut verified, mut present, mut installing): (Vec<HeldVersion>, u32, Option<HeldVersion>) = (Vec::new(), 1, None);
        for step in story {
            let before = machine.sequence();
            let attempt_before = machine.status();
            match step {
                Happens::Begin(e, v, a, feeding, known) => {
                    let manifest = format!("m{v}");
                    let request = begin(&id(e, v, a), feeding, known.then_some(manifest.as_str()));
                    let answer = machine.begin(&request, &verified);
                    prop_assert!(installing.is_none() || !matches!(answer, Ok(Opening::Check)), "an engine that is being switched is left alone");
                }
                Happens::Opened(e, v, a) => { let _ = machine.opened(&id(e, v, a), false); }
                Happens::Streamed(e, v, a) => { let _ = machine.streamed(&id(e, v, a), 0); }
                Happens::Verified(e, v, a, well) => {
                    let outcome = if well { Ok(held(v, &format!("m{v}"))) } else { Err("differs".to_owned()) };
                    if machine.verified(&id(e, v, a), outcome, 0).is_ok() && well {
                        verified.push(held(v, &format!("m{v}")));
                    }
                }
                Happens::Activate(e, v, a) => {
                    if let Ok(Activating::Install(wanted)) = machine.activate(&id(e, v, a)) {
                        prop_assert!(verified.contains(&wanted), "only what was verified is installed");
                        prop_assert!(installing.is_none());
                        installing = Some(wanted);
                    }
                }
                Happens::Confirmed => if let Some(wanted) = installing.take() {
                    machine.install_confirmed(wanted, start(present), ProvenBy::Digests, Vec::new());
                },
                Happens::Failed(touched) => if installing.take().is_some() {
                    let left = if touched { Left::Mixture } else { Left::AsBefore };
                    machine.install_failed("failed".into(), left, None, Some(start(present)));
                    prop_assert_eq!(machine.dirty().is_some(), touched || machine.dirty().is_some());
                },
                Happens::Abort(e, v, a) => { machine.abort(&id(e, v, a), "given up"); }
                Happens::EpochOver => { machine.epoch_over("fenced"); }
                Happens::Engine(number) => {
                    present = number;
                    machine.engine_seen(&start(number));
                }
            }
            prop_assert!(machine.sequence() >= before);
            prop_assert!(machine.sequence() > before || machine.status() == attempt_before, "a change that no one would hear of");
            if let Some(installed) = machine.installed() {
                prop_assert!(verified.contains(&installed.held));
                prop_assert_eq!(&installed.start, &start(present));
                prop_assert!(machine.dirty().is_none(), "a dirty engine holds no version");
            }
            prop_assert_eq!(machine.installing(), installing.is_some());
        }
    }
}

#[test]
fn engine_fed_while_buckets_came_ends_whole_or_dirty() {
    let mut machine = Machine::default();
    let (first, again) = (id(1, 7, 1), id(1, 7, 2));
    let bring = |machine: &mut Machine, update: &UpdateId, fed: bool| {
        assert_eq!(machine.begin(&begin(update, true, None), &[]), Ok(Opening::Check));
        machine.opened(update, fed).unwrap();
        machine.streamed(update, 1).unwrap();
        machine
            .finish(&FinishRequest {
                update: update.clone(),
                tensor_digests: vec![],
                manifest_digest: "m".into(),
                statement: None,
                check: false,
            })
            .unwrap();
    };
    let held = HeldVersion { version: 7, manifest: "m".into() };
    bring(&mut machine, &first, true);
    machine.verified(&first, Ok(held.clone()), 1).unwrap();
    assert_eq!(machine.activate(&first), Ok(Activating::Install(held.clone())));
    machine.install_confirmed(held.clone(), EngineStart("s".into()), ProvenBy::Digests, vec![]);

    // The same version once more: what lies in files is held already, what the engine took must be finished.
    bring(&mut machine, &again, true);
    machine.verified(&again, Ok(held.clone()), 1).unwrap();
    assert_eq!(machine.activate(&again), Ok(Activating::Install(held)));

    let third = id(1, 8, 1);
    machine.install_confirmed(HeldVersion { version: 7, manifest: "m".into() }, EngineStart("s".into()), ProvenBy::Digests, vec![]);
    machine.begin(&begin(&third, false, None), &[]).unwrap();
    machine.opened(&third, true).unwrap();
    assert!(machine.abort(&third, "the stream broke"));
    machine.install_failed("an install was given up".into(), Left::Mixture, None, None);
    assert!(machine.dirty().is_some() && machine.installed().is_none());
    assert!(machine.status().unwrap().dirty, "the leader is reported");
}
