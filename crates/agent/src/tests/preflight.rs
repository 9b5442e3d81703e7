//! Edges between real agents are measured between updates, once, and never while bytes of an update move.

use std::time::Duration;

use super::fixture::*;
use weightsync_core::protocol::*;

async fn measured(source: &Member) -> PreflightReport {
    let state = source.until("with all edges measured", |state| state.preflight.as_ref().is_some_and(|report| report.done)).await;
    *state.preflight.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn edges_are_measured_once_for_a_pair_of_places() {
    let mut fixture = Fixture::new();
    fixture.policy.transport.preflight = Preflight::Auto;
    let (source, one, other) = (fixture.source(), fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    let members = [&source, &one, &other];
    fixture.form(&members, None).await;
    let report = measured(&source).await;
    assert!(report.measured >= 3, "the chain and the edge that closes the ring: {report:?}");
    let mut order = report.arrangement.order.clone();
    order.sort();
    assert_eq!(order, [one.name.clone(), other.name.clone()]);
    for edge in &report.edges {
        let EdgeOutcome::Verified(figures) = &edge.outcome else { panic!("{edge:?}") };
        assert!(figures.bytes >= 1 << 20 && figures.rate() > 1 && figures.round_trip_us.is_some() && figures.mtu.is_some(), "{figures:?}");
        assert!(figures.clock_ms.is_some_and(|ms| ms.abs() < 10_000), "one host has one clock: {figures:?}");
    }
    let next = fixture.form(&members, None).await;
    let done = |state: &MemberState| state.preflight.as_ref().is_some_and(|report| report.id == next && report.done);
    let again = source.until("arranged again", done).await.preflight.unwrap();
    // A machine may be so busy that an edge looked slow: that one is measured again, and no other.
    assert!(again.measured == 0 || report.arrangement != Arrangement { order: report.arrangement.order.clone(), ..Arrangement::default() });
}

#[tokio::test(flavor = "multi_thread")]
async fn object_with_preflight_off_measures_nothing() {
    let mut fixture = Fixture::new();
    fixture.policy.transport.preflight = Preflight::Off;
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], None).await;
    let measures = tokio::time::timeout(Duration::from_millis(300), measured(&source));
    assert!(measures.await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn member_in_an_update_refuses_measurement() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], None).await;
    let epoch = source.core.epoch().unwrap();
    rollout.core.set_facts(|facts| facts.updating = true);
    let outcome = source.leader.measure(&epoch, &rollout.name, SOON).await;
    assert!(matches!(&outcome, EdgeOutcome::Unmeasured { cause } if cause.contains("an update runs here")), "{outcome:?}");
    rollout.core.set_facts(|facts| facts.updating = false);
    let outcome = source.leader.measure(&epoch, &rollout.name, SOON).await;
    assert!(matches!(outcome, EdgeOutcome::Verified(_)), "{outcome:?}");
}
