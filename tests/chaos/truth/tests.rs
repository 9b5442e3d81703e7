use super::*;

fn ready(installed: u64) -> Claim {
    Claim { standing: Some(MemberStanding::Ready), installed: Some(installed), ready: true, update: false }
}

fn unknown() -> Claim {
    Claim { standing: Some(MemberStanding::Unknown), installed: None, ready: false, update: false }
}

const STOPPED: Truth = Truth { holds: Holds::Version(2), runs: false };

/// Looks once a second for so long.
fn looks(ledger: &mut Ledger, begun: Instant, seconds: std::ops::Range<u64>, claim: &Claim, truth: Truth) -> Vec<Difference> {
    let at = |second| begun + Duration::from_secs(second);
    seconds.flat_map(|second| ledger.look(at(second), claim, truth, claim)).map(|(difference, _)| difference).collect()
}

#[test]
fn claim_that_is_true_has_no_difference() {
    assert!(differences(&ready(2), Truth { holds: Holds::Version(2), runs: true }).is_empty());
    assert!(differences(&unknown(), STOPPED).is_empty());
    assert!(differences(&unknown(), Truth { holds: Holds::Mixture, runs: false }).is_empty());
}

#[test]
fn claim_that_is_wrong_is_a_difference() {
    use Difference::{PodReadyEngineMixed, PodReadyEngineStopped, RosterNamesAnotherVersion, RosterReadyEngineStopped};
    assert_eq!(differences(&ready(2), STOPPED), [RosterReadyEngineStopped, PodReadyEngineStopped]);
    assert_eq!(differences(&ready(1), Truth { runs: true, ..STOPPED }), [RosterNamesAnotherVersion]);
    let silent = Truth { holds: Holds::Silent, runs: false };
    assert_eq!(differences(&ready(1), silent), [RosterReadyEngineStopped, PodReadyEngineStopped]);
    let mixed = Truth { holds: Holds::Mixture, runs: true };
    assert_eq!(differences(&Claim { installed: None, ..ready(1) }, mixed), [PodReadyEngineMixed]);
    let lost = Claim { standing: Some(MemberStanding::Out), ready: false, ..ready(1) };
    assert!(differences(&lost, STOPPED).is_empty(), "no one says that it serves");
}

#[test]
fn difference_that_lasts_is_named_and_one_that_ends_is_not() {
    let (begun, mut ledger) = (Instant::now(), Ledger::default());
    let steady = STEADY.as_secs() + 1;
    assert!(looks(&mut ledger, begun, 0..steady, &ready(2), STOPPED).is_empty());
    looks(&mut ledger, begun, steady..steady + 1, &unknown(), STOPPED);
    assert!(looks(&mut ledger, begun, steady + 1..2 * steady, &ready(2), STOPPED).is_empty());
    assert_eq!(looks(&mut ledger, begun, 2 * steady..2 * steady + 3, &ready(2), STOPPED).len(), 2, "each of both once");
}

#[test]
fn difference_in_an_update_may_last_for_its_deadline() {
    let (begun, mut ledger) = (Instant::now(), Ledger::default());
    let updating = Claim { standing: Some(MemberStanding::Updating), update: true, ..ready(1) };
    let end = UPDATING.as_secs() + 1;
    assert!(looks(&mut ledger, begun, 0..end, &updating, STOPPED).is_empty());
    let found = looks(&mut ledger, begun, end..end + 1, &updating, STOPPED);
    assert!(found.contains(&Difference::RosterReadyEngineStopped), "{found:?}");
}

#[test]
fn difference_after_an_update_lasts_no_longer_than_others() {
    let (begun, mut ledger) = (Instant::now(), Ledger::default());
    let updating = Claim { standing: Some(MemberStanding::Updating), update: true, ..ready(2) };
    assert!(looks(&mut ledger, begun, 0..3, &updating, STOPPED).is_empty());
    let found = looks(&mut ledger, begun, 3..5 + STEADY.as_secs(), &ready(2), STOPPED);
    assert_eq!(found.len(), 2, "{found:?}");
}
