use super::*;

#[test]
fn start_may_owe_one_answer_after_one_on_the_same_way() {
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
