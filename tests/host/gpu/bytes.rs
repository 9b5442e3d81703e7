//! Bytes that arrive wrong although every call succeeded: the digest shows it.

use super::fixture::{Machine, Member, SLOT, abort, all, form, gsum64, pattern};
use crate::world::SOON;

/// Sends two buckets to two receivers under a fault; gives the digests of each rank, and those of what was sent.
async fn sums_under(faults: &str) -> (Vec<[u64; 2]>, [u64; 2]) {
    let machine = Machine::new();
    let members = machine.members(3).await;
    let members: Vec<&Member> = members.iter().collect();
    form(1, &members).await;
    let buckets = [pattern(1, SLOT as usize), pattern(2, SLOT as usize)];
    let mut slots = Vec::new();
    for member in &members {
        slots.push([member.ring.take(SOON).await.unwrap(), member.ring.take(SOON).await.unwrap()]);
    }
    for (slot, bucket) in slots[0].iter().zip(&buckets) {
        members[0].fill(slot, bucket).await;
    }
    machine.order(faults);
    let sums = all(members.iter().zip(&slots).map(async |(member, [first, second])| {
        // Both under way at once, in order.
        let (first, second) = futures::future::join(member.broadcast(1, first, SLOT, SOON), member.broadcast(1, second, SLOT, SOON)).await;
        [first.unwrap().sums[0], second.unwrap().sums[0]]
    }));
    let sums = sums.await;
    abort(1, &members).await;
    (sums, [gsum64(&buckets[0]), gsum64(&buckets[1])])
}

// The first broadcast of a worker is the one that proves its group: faults are for the second and the third.

#[tokio::test(flavor = "multi_thread")]
async fn one_flipped_bit_changes_the_digest_of_that_receiver_alone() {
    let (sums, sent) = sums_under("ncclBroadcast@2 3 flip 777777").await;
    assert_eq!((sums[0], sums[1]), (sent, sent));
    assert_eq!(sums[2][0], sent[0]);
    assert_ne!(sums[2][1], sent[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_bucket_shows_in_its_digest() {
    let (sums, sent) = sums_under("ncclBroadcast@1 2 drop").await;
    assert_eq!((sums[0], sums[2]), (sent, sent));
    assert_ne!(sums[1][0], sent[0]);
    assert_eq!(sums[1][1], sent[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_exchanged_tensors_show_in_the_buckets_digest() {
    let (sums, sent) = sums_under("ncclBroadcast@1 2 swap 0 65536 4096").await;
    assert_eq!((sums[0], sums[2]), (sent, sent));
    assert_ne!(sums[1][0], sent[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_exchanged_buckets_show_in_both_digests() {
    let (sums, sent) = sums_under("ncclBroadcast@0 2 swap").await;
    // The source digests its own memory, where nothing is wrong.
    assert_eq!(sums[0], sent);
    let exchanged = [sent[1], sent[0]];
    assert_eq!((sums[1], sums[2]), (exchanged, exchanged));
}
