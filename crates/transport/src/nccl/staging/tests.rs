use super::best;

#[test]
fn shortest_memory_that_fits_is_taken() {
    for (lengths, bytes, taken) in [
        (&[12, 10, 11][..], 10, Some(1)),
        (&[12, 10, 11], 11, Some(2)),
        (&[12, 10], 11, Some(0)),
        (&[9, 21], 10, None),
        (&[20], 10, Some(0)),
        (&[], 1, None),
    ] {
        assert_eq!(best(lengths.iter().copied(), bytes), taken, "{bytes} of {lengths:?}");
    }
}
