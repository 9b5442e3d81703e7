use std::sync::Arc;

use super::*;

#[test]
fn slot_freed_after_the_end_is_not_lent_again() {
    let (lent, slot) = (LentSlots::default(), Arc::new(()));
    assert!(!lent.lend(0, slot.clone()), "nothing was lent yet");
    lent.lend_all(BTreeMap::from([(0, slot.clone()), (1, slot.clone())]));
    assert!(lent.take(1).is_some() && lent.take(1).is_none());
    assert!(lent.lend(1, slot.clone()));
    lent.take_all_back();
    assert!(!lent.lend(1, slot.clone()) && lent.take(0).is_none());
    assert_eq!(Arc::strong_count(&slot), 1, "all are free");
    lent.lend_all(BTreeMap::new());
    assert!(lent.lend(1, slot.clone()));
}
