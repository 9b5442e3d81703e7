use super::{REGION, best, lacking};

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

#[test]
fn memory_that_waits_is_not_made_once_more() {
    let mib = |lengths: &[u64]| lengths.iter().map(|length| length * REGION).collect::<Vec<_>>();
    for (free, wanted, made) in [
        (&[][..], &[4, 8][..], &[8, 4][..]),
        (&[8, 4], &[4, 8], &[]),
        (&[8], &[4, 8], &[4]),
        (&[8], &[8, 8], &[8]),
        (&[16], &[4], &[4]),
        (&[4], &[], &[]),
    ] {
        assert_eq!(lacking(mib(free), &mib(wanted)), mib(made), "{wanted:?} next to {free:?}");
    }
    assert_eq!(lacking(Vec::new(), &[1, 0, REGION + 1]), [2 * REGION, REGION]);
}
