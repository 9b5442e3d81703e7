use super::*;

#[test]
fn a_start_may_owe_an_answer_behind_one_that_it_gave_on_the_same_way_and_only_for_so_long() {
    let (start, other) = (EngineStart("1".into()), EngineStart("2".into()));
    let proven = Proven::default();
    assert!(!proven.may_owe(&start, "group"), "it never answered");
    proven.answered(&start, "group");
    assert!(proven.may_owe(&start, "group") && proven.may_owe(&start, "group"));
    assert!(!proven.may_owe(&other, "group") && !proven.may_owe(&start, "update_weights"));
    proven.with(|known| known.as_mut().unwrap().owes = Instant::now().checked_sub(MOST_OWED));
    assert!(!proven.may_owe(&start, "group"), "it was never asked meanwhile");
    proven.settle(true);
    assert!(proven.may_owe(&start, "group"));
    proven.settle(false);
    assert!(!proven.may_owe(&start, "group"), "it failed to compute");
}
