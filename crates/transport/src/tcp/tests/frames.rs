use proptest::prelude::*;

use crate::tcp::frame::{Frame, Parser};
use weightsync_core::protocol::{BucketHeader, LentPiece, MemberName, Refusal, RefusalCode, StreamFailure};

fn failures() -> impl Strategy<Value = StreamFailure> {
    let peer = || MemberName("actors/0".into());
    prop_oneof![
        Just(StreamFailure::Cancelled),
        any::<u32>().prop_map(move |sequence| StreamFailure::Corrupt { peer: peer(), sequence }),
        any::<String>().prop_map(move |cause| StreamFailure::Lost { peer: peer(), cause }),
        any::<u64>().prop_map(move |silence_ms| StreamFailure::Silent { peer: peer(), silence_ms }),
        any::<String>()
            .prop_map(move |message| StreamFailure::Refused { peer: peer(), refusal: Refusal { code: RefusalCode::OutOfSpace, message } }),
    ]
}

/// A frame from the parser, with its parts joined.
#[derive(Debug, Clone, PartialEq)]
enum Owned {
    Part(Vec<u8>),
    Other(Frame<'static>),
}

fn frames() -> impl Strategy<Value = Vec<Owned>> {
    let head = any::<(u32, u32, u64, u64)>()
        .prop_map(|(sequence, flags, offset, bytes)| Frame::Head(BucketHeader { sequence, flags, offset, bytes }));
    let lent =
        any::<(u32, u32, u64, u64)>().prop_map(|(number, slot, offset, bytes)| Frame::Lent(LentPiece { number, slot, offset, bytes }));
    let other = prop_oneof![
        head,
        lent,
        any::<u32>().prop_map(Frame::Taken),
        any::<u128>().prop_map(Frame::Digest),
        Just(Frame::End),
        Just(Frame::Alive),
        Just(Frame::Admitted),
        Just(Frame::Done),
        Just(Frame::Cut),
        any::<(u32, [u8; 16])>().prop_map(|(lanes, id)| Frame::Lanes(lanes, id)),
        failures().prop_map(Frame::Failure),
    ];
    let one = prop_oneof![other.prop_map(Owned::Other), prop::collection::vec(any::<u8>(), 1..300).prop_map(Owned::Part)];
    prop::collection::vec(one, 0..20)
}

proptest! {
    #[test]
    fn frames_are_read_as_they_were_sent_however_the_wire_cuts_them(sent in frames(), cuts in prop::collection::vec(1usize..60, 1..9)) {
        let mut wire = Vec::new();
        for frame in &sent {
            match frame {
                Owned::Part(part) => Frame::Part(part).put(&mut wire),
                Owned::Other(frame) => frame.put(&mut wire),
            }
        }
        let mut parser = Parser::default();
        let (mut read, mut in_part) = (Vec::new(), 0);
        let (mut rest, mut cut) = (wire.as_slice(), cuts.iter().cycle());
        while !rest.is_empty() {
            let (mut now, later) = rest.split_at((*cut.next().unwrap()).min(rest.len()));
            rest = later;
            while let Some(frame) = parser.next(&mut now).unwrap() {
                match frame {
                    Frame::Part(part) => {
                        let whole = match &sent[read.len() - usize::from(in_part > 0)] {
                            Owned::Part(whole) => whole.len(),
                            Owned::Other(other) => panic!("{other:?}"),
                        };
                        match read.last_mut() {
                            Some(Owned::Part(known)) if in_part > 0 => known.extend_from_slice(part),
                            _ => read.push(Owned::Part(part.to_vec())),
                        }
                        in_part = (in_part + part.len()) % whole;
                    }
                    Frame::Head(header) => read.push(Owned::Other(Frame::Head(header))),
                    Frame::Digest(digest) => read.push(Owned::Other(Frame::Digest(digest))),
                    Frame::Failure(failure) => read.push(Owned::Other(Frame::Failure(failure))),
                    Frame::End => read.push(Owned::Other(Frame::End)),
                    Frame::Alive => read.push(Owned::Other(Frame::Alive)),
                    Frame::Admitted => read.push(Owned::Other(Frame::Admitted)),
                    Frame::Done => read.push(Owned::Other(Frame::Done)),
                    Frame::Cut => read.push(Owned::Other(Frame::Cut)),
                    Frame::Lanes(lanes, id) => read.push(Owned::Other(Frame::Lanes(lanes, id))),
                    Frame::Lent(piece) => read.push(Owned::Other(Frame::Lent(piece))),
                    Frame::Taken(number) => read.push(Owned::Other(Frame::Taken(number))),
                }
            }
            prop_assert!(now.is_empty());
        }
        prop_assert_eq!(read, sent);
    }

    #[test]
    fn no_bytes_make_the_parser_panic_or_hang(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut parser = Parser::default();
        let mut input = bytes.as_slice();
        while let Ok(Some(_)) = parser.next(&mut input) {}
    }
}

#[test]
fn lengths_that_make_no_sense_are_refused_at_once() {
    for (kind, length) in [
        (1u32, 25u32),
        (2, 0),
        (2, u32::MAX),
        (3, 15),
        (4, 1),
        (6, u32::MAX),
        (7, 1),
        (8, 1),
        (0, 0),
        (9, 1),
        (10, 16),
        (11, 20),
        (12, 8),
        (13, 0),
        (u32::MAX, 0),
    ] {
        let wire = [kind.to_le_bytes(), length.to_le_bytes()].concat();
        assert!(Parser::default().next(&mut wire.as_slice()).is_err(), "kind {kind}, length {length}");
    }
    let no_failure = [6u32.to_le_bytes().as_slice(), &2u32.to_le_bytes(), b"{}"].concat();
    assert!(Parser::default().next(&mut no_failure.as_slice()).is_err());
}
