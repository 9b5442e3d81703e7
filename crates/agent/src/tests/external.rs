//! An update by the trainer's own data plane, as the rollout's state machine sees it.

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::fixture::{Fixture, SOON};
use crate::external::Teller;
use crate::lead::ExternalPlan;
use crate::rollout::machine::{Machine, Opening};
use weightsync_core::protocol::*;
use weightsync_engine::{EngineStart, Left};

fn begin(epoch: u64, version: Version, attempt: u32, manifest: &str) -> ExternalBegin {
    let epoch = EpochId { weightsync: "w".into(), created: 1, term: 0, epoch };
    let held = HeldVersion { version, manifest: manifest.into() };
    ExternalBegin { update: UpdateId { epoch, version, attempt }, held, timeout_ms: 1000, statement: None }
}

fn start() -> EngineStart {
    EngineStart("1".into())
}

/// Brings a version to the end.
fn bring(machine: &mut Machine, request: &ExternalBegin) {
    assert_eq!(machine.begin_external(request), Ok(Opening::Check));
    machine.opened(&request.update, true).unwrap();
    assert_eq!(machine.delivered_external(&request.update, request.held.clone()), Ok(true));
    machine.install_confirmed(request.held.clone(), start(), ProvenBy::Nothing, Vec::new());
}

#[test]
fn nothing_is_installed_before_it_was_proven() {
    let mut machine = Machine::default();
    let one = begin(1, 1, 1, "a");
    assert!(machine.delivered_external(&one.update, one.held.clone()).is_err());
    machine.begin_external(&one).unwrap();
    assert!(machine.delivered_external(&one.update, one.held.clone()).is_err(), "the engine is not marked yet");
    machine.opened(&one.update, true).unwrap();
    assert!(machine.installed().is_none());
    assert_eq!(machine.delivered_external(&one.update, one.held.clone()), Ok(true));
    assert_eq!(machine.delivered_external(&one.update, one.held.clone()), Ok(false), "said twice, proven once");
    assert!(machine.installed().is_none());
    machine.install_confirmed(one.held.clone(), start(), ProvenBy::Nothing, Vec::new());
    assert_eq!(machine.installed().map(|installed| &installed.held), Some(&one.held));
}

#[test]
fn current_version_may_repeat_and_older_or_other_may_not() {
    let mut machine = Machine::default();
    bring(&mut machine, &begin(1, 3, 1, "a"));
    assert!(machine.begin_external(&begin(1, 2, 1, "b")).is_err());
    assert!(machine.begin_external(&begin(1, 3, 2, "b")).is_err());
    bring(&mut machine, &begin(1, 3, 3, "a"));
    bring(&mut machine, &begin(2, 4, 1, "c"));
}

#[test]
fn end_between_mark_and_proof_leaves_engine_dirty() {
    let mut machine = Machine::default();
    bring(&mut machine, &begin(1, 1, 1, "a"));
    let two = begin(1, 2, 1, "b");
    machine.begin_external(&two).unwrap();
    machine.opened(&two.update, true).unwrap();
    assert!(machine.epoch_over("fenced"));
    machine.install_failed("fenced".into(), Left::Mixture, None, Some(start()));
    assert!(machine.dirty().is_some() && machine.installed().is_none());
    assert!(machine.status().unwrap().dirty);
    bring(&mut machine, &begin(2, 2, 2, "b"));
    assert!(machine.dirty().is_none());
}

/// The coordinator prepares members one after another. One that heard of the next epoch first is not the one that was lost.
#[tokio::test(flavor = "multi_thread")]
async fn member_in_next_epoch_is_not_blamed_for_its_cause() {
    let mut fixture = Fixture::new();
    fixture.policy.delivery = Delivery::External;
    let (source, first, second) = (fixture.source(), fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    let members = [&source, &first, &second];
    fixture.form(&members, None).await;
    let epoch = source.core.epoch().unwrap();
    fixture.epoch += 1;
    let next = |member| PrepareRequest { why: "actors/r-1 was lost".into(), ..fixture.prepare_request(&members, member) };
    fixture.ask(&first, &next(&first)).await.unwrap();

    let (leader, (tell, _replies), (_words, mut words)) = (source.leader.clone(), Teller::new(), mpsc::unbounded_channel());
    let led = tokio::spawn(async move {
        let held = HeldVersion { version: 1, manifest: "one".into() };
        let (deadline, words, tell) = (Instant::now() + SOON, &mut words, &tell);
        let plan = ExternalPlan { epoch, held, attempt: 1, feeding: false, engine_version: None, deadline, words, tell };
        leader.lead_external(plan).await.unwrap_err()
    });
    let mut updates = source.core.events().updates();
    let refused =
        updates.wait_for(|updates| updates.since(&mut 0).any(|view| view.members.iter().any(|member| member.member == first.name)));
    tokio::time::timeout(SOON, refused).await.unwrap().unwrap();
    fixture.ask(&source, &next(&source)).await.unwrap();
    let failure = led.await.unwrap();
    assert_eq!((failure.code, failure.member), (PublishErrorCode::Fenced, None), "{}", failure.message);
    assert!(failure.message.contains("actors/r-1 was lost"), "{}", failure.message);
}
