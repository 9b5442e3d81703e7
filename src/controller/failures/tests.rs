//! What is kept of failures, and for how long.

use std::collections::HashSet;

use super::{FIRST, Failures, LONGEST};

#[test]
fn failures_of_deleted_objects_are_forgotten() {
    let failures = Failures::default();
    for gone in 0..1000 {
        failures.failed(&format!("gone-{gone}"));
    }
    for _ in 0..20 {
        failures.failed("there");
    }
    failures.forget_gone(&HashSet::from(["there".to_owned(), "never failed".to_owned()]));
    assert_eq!(failures.len(), 1);
    assert!(failures.failed("there") >= LONGEST / 2, "an object that is there goes on where it was");
    // A look may end after the deletion was noticed.
    failures.failed("gone-1");
    failures.forget_gone(&HashSet::from(["there".to_owned()]));
    assert_eq!(failures.len(), 1);
}

#[test]
fn failure_after_a_success_waits_shortly_again() {
    let failures = Failures::default();
    for _ in 0..20 {
        failures.failed("uid");
    }
    failures.succeeded("uid");
    assert_eq!(failures.len(), 0);
    assert!(failures.failed("uid") <= FIRST);
}
