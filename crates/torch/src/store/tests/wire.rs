use proptest::prelude::*;

use super::super::wire::{MAGIC, Nonsense, Read, Request, read};
use super::super::{MAX_KEY, MAX_LIST, MAX_VALUE, nccl_id_keys, prefixed};
use super::bytes;

/// A length in front of bytes.
fn blob(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

#[test]
fn requests_are_the_bytes_of_torch() {
    let (key, value) = (blob(b"/key"), blob(b"v"));
    let one = 1_u64.to_le_bytes().to_vec();
    let table: [(Request<'_>, Vec<Vec<u8>>); 19] = [
        (Request::Validate(MAGIC), vec![vec![0, 0xce, 0xf7, 0x85, 0x3c]]),
        (Request::Set(b"/key", b"v"), vec![vec![1], key.clone(), value.clone()]),
        (Request::CompareSet(b"/key", b"", b"v"), vec![vec![2], key.clone(), blob(b""), value.clone()]),
        (Request::Get(b"/key"), vec![vec![3], key.clone()]),
        (Request::Add(b"init/", -2), vec![vec![4], blob(b"init/"), vec![0xfe, 255, 255, 255, 255, 255, 255, 255]]),
        (Request::Check(vec![b"/key"]), vec![vec![5], one.clone(), key.clone()]),
        (Request::Wait(vec![b"/key"]), vec![vec![6], one.clone(), key.clone()]),
        (Request::CountKeys, vec![vec![7]]),
        (Request::Delete(b"/key"), vec![vec![8], key.clone()]),
        (Request::Append(b"/key", b"v"), vec![vec![9], key.clone(), value.clone()]),
        (Request::MultiGet(vec![b"/key"]), vec![vec![10], one.clone(), key.clone()]),
        (Request::MultiSet(vec![(b"/key", b"v")]), vec![vec![11], one.clone(), key.clone(), value.clone()]),
        (Request::CancelWait, vec![vec![12]]),
        (Request::Ping(0x0102_0304), vec![vec![13, 4, 3, 2, 1]]),
        (Request::QueuePush(b"/key", b"v"), vec![vec![14], key.clone(), value.clone()]),
        (Request::QueuePop(b"/key"), vec![vec![15], key.clone()]),
        (Request::QueueLength(b"/key"), vec![vec![16], key.clone()]),
        (Request::ListKeys, vec![vec![17]]),
        (Request::Barrier(b"/key", 3), vec![vec![18], key, 3_u64.to_le_bytes().to_vec()]),
    ];
    for (request, expected) in table {
        let expected = expected.concat();
        assert_eq!(bytes(&request), expected, "{request:?}");
        assert_eq!(read(&expected), Ok(Read::Whole(request, expected.len())));
    }
}

#[test]
fn the_id_of_a_group_lies_where_each_torch_looks_for_it() {
    // Seen on the wire with torch 2.9.0 and 2.15.0 (the gloo twin), and in a public log of SGLang.
    assert_eq!(nccl_id_keys("weights-7"), ["/weights-7/weights-7//cuda//0", "/weights-7/weights-7//cuda//weights-7/nccl_storekey_0"]);
    assert_eq!(prefixed(&[], "key"), "/key");
}

#[test]
fn length_unknown_to_torch_is_refused_before_its_bytes() {
    let head = |code: u8, length: usize| [vec![code], (length as u64).to_le_bytes().to_vec()].concat();
    assert!(matches!(read(&head(3, MAX_KEY + 1)), Err(Nonsense::TooLong { what: "key", .. })));
    assert!(matches!(read(&head(6, MAX_LIST + 1)), Err(Nonsense::TooLong { what: "list", .. })));
    assert!(matches!(read(&head(3, usize::MAX)), Err(Nonsense::TooLong { length: u64::MAX, .. })));
    let value = [head(1, 1), vec![b'k'], (MAX_VALUE as u64 + 1).to_le_bytes().to_vec()].concat();
    assert!(matches!(read(&value), Err(Nonsense::TooLong { what: "value", .. })));
    assert_eq!(read(&[19]), Err(Nonsense::Unknown(19)));
    // Two values that each are short enough make a request that is not.
    let mut sum = bytes(&Request::CompareSet(b"k", &vec![0; MAX_VALUE], b""));
    sum.truncate(1 + 8 + 1 + 8 + MAX_VALUE);
    sum.extend((MAX_VALUE as u64).to_le_bytes());
    assert!(matches!(read(&sum), Err(Nonsense::TooLong { what: "request", .. })));
}

proptest! {
    #[test]
    fn partial_request_asks_for_no_more_than_there_is(
        key in proptest::collection::vec(any::<u8>(), 0..40),
        values in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 1..6),
        rest in proptest::collection::vec(any::<u8>(), 0..10),
    ) {
        let items = values.iter().map(|value| (key.as_slice(), value.as_slice())).collect();
        let whole = bytes(&Request::MultiSet(items));
        for end in 0..whole.len() {
            let Read::Partly(needed) = read(&whole[..end]).unwrap() else { panic!("a part is no request") };
            prop_assert!(needed > end && needed <= whole.len());
        }
        let Read::Whole(_, length) = read(&[whole.clone(), rest].concat()).unwrap() else { panic!("it is whole") };
        prop_assert_eq!(length, whole.len());
    }

    #[test]
    fn no_bytes_do_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(Read::Whole(_, length)) = read(&bytes) {
            prop_assert!(length > 0 && length <= bytes.len());
        }
    }
}
