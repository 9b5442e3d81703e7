use super::*;

#[test]
fn buckets_come_in_order_and_slots_are_written_when_free() {
    let mut slots = Slots::new(1, 2, 3);
    assert_eq!(slots.fill(1, 0, 1), Ok(Fill::Next));
    assert!(slots.fill(1, 1, 1).unwrap_err().contains("still reads"));
    assert!(slots.fill(1, 2, 0).unwrap_err().contains("bucket 1 was due"));
    assert_eq!(slots.fill(1, 1, 0), Ok(Fill::Next));
    slots.free(1, 1);
    assert!(slots.end(1).unwrap_err().contains("2 of 3"));
    assert_eq!(slots.fill(1, 2, 1), Ok(Fill::Next));
    assert_eq!(slots.end(1), Ok(true));
    assert!(slots.end(1).unwrap_err().contains("twice"));
    slots.free(1, 0);
    assert!(slots.fill(1, 3, 0).unwrap_err().contains("after the end"));
}

#[test]
fn message_in_flight_at_an_attempts_end_is_stale() {
    let mut slots = Slots::new(1, 2, 3);
    assert_eq!(slots.fill(1, 0, 0), Ok(Fill::Next));
    slots.again();
    assert_eq!(slots.fill(1, 1, 1), Ok(Fill::Stale));
    assert_eq!(slots.end(1), Ok(false));
    assert!(slots.fill(2, 0, 0).unwrap_err().contains("still reads"), "slot 0 is held by a reader of attempt 1");
    assert_eq!(slots.fill(2, 0, 1), Ok(Fill::Next));
    assert!(slots.fill(3, 1, 0).is_err());
    assert!(slots.end(3).is_err());
}

#[test]
fn numbers_outside_the_ring_are_nonsense() {
    let mut slots = Slots::new(1, 2, 1);
    assert!(slots.fill(1, 0, 2).unwrap_err().contains("the ring has 2"));
    assert!(slots.fill(1, 0, u32::MAX).is_err());
    assert!(slots.fill(1, u32::MAX, 0).is_err());
    slots.free(1, u32::MAX);
    assert!(!slots.free(2, 0), "a slot of another ring");
    let mut nothing = Slots::new(1, 1, 0);
    assert_eq!(nothing.end(1), Ok(true), "a version of empty tensors has no bucket");
}
