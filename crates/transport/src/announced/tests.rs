use super::{Announcements, Disorder};
use weightsync_core::protocol::{BucketHeader, LentPiece};

fn head(bytes: u64) -> BucketHeader {
    BucketHeader { sequence: 0, flags: BucketHeader::CARRIED, offset: 0, bytes }
}

fn piece(offset: u64, bytes: u64) -> LentPiece {
    LentPiece { number: 0, slot: 0, offset, bytes }
}

#[test]
fn pieces_in_order_and_a_later_digest_are_taken() {
    let mut announced = Announcements::default();
    for bytes in [10, 3] {
        announced.head(head(bytes)).unwrap();
        for at in 0..bytes {
            assert_eq!(announced.piece(&piece(at, 1)), Ok(head(bytes)));
        }
    }
    assert_eq!((announced.digest(), announced.digest(), announced.digest()), (Ok(()), Ok(()), Err(Disorder::Short)));
}

#[test]
fn piece_that_does_not_follow_is_refused() {
    for (first, second) in
        [((0, 4), (3, 2)), ((0, 4), (5, 1)), ((0, 4), (4, 0)), ((0, 4), (4, 7)), ((0, 10), (0, 1)), ((0, 4), (4, u64::MAX))]
    {
        let mut announced = Announcements::default();
        announced.head(head(10)).unwrap();
        announced.piece(&piece(first.0, first.1)).unwrap();
        assert_eq!(announced.piece(&piece(second.0, second.1)), Err(Disorder::Piece), "{second:?}");
    }
    assert_eq!(Announcements::default().piece(&piece(0, 1)), Err(Disorder::Piece));
}

#[test]
fn bucket_that_is_too_short_is_refused() {
    let mut announced = Announcements::default();
    announced.head(head(10)).unwrap();
    announced.piece(&piece(0, 9)).unwrap();
    assert_eq!(announced.digest(), Err(Disorder::Short));
    assert_eq!(announced.head(head(1)), Err(Disorder::Short));
}
