//! Bytes from one GPU to others.

use std::time::Duration;

use weightsync_core::protocol::worker::{Part, WorkerAnswer, WorkerFaultCode};
use weightsync_gpu::worker::{Broadcast, Copy};

use super::fixture::{Machine, Member, SLOT, abort, all, fault, form, gsum64, pattern, verified_broadcast};
use crate::world::SOON;

#[tokio::test(flavor = "multi_thread")]
async fn three_receivers_hold_the_bytes_that_one_source_sent() {
    let machine = Machine::new();
    let members = machine.members(4).await;
    let members: Vec<&Member> = members.iter().collect();
    for (rank, joined) in form(1, &members).await.into_iter().enumerate() {
        assert_eq!((joined.rank as usize, joined.world), (rank, 4));
    }
    // A whole slot, an odd length, one word, one byte.
    for (seed, length) in [(1, SLOT as usize), (2, 300_003), (3, 8), (4, 1)] {
        verified_broadcast(1, &members, &pattern(seed, length)).await;
    }
    abort(1, &members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_of_several_hosts_move_bytes_over_tcp() {
    // Each machine has memory and files of its own, as hosts do.
    let hosts = [(); 2].map(|()| Machine::new().with("FAKEGPU_NCCL_ADDRESS", "127.0.0.1"));
    let places = [(&hosts[0], 0), (&hosts[1], 1), (&hosts[1], 2)];
    let members = all(places.map(async |(host, gpu)| Member::new(host.worker(gpu).await).await)).await;
    let members: Vec<&Member> = members.iter().collect();
    form(1, &members).await;
    for (seed, length) in [(1, SLOT as usize), (2, 300_003), (3, 1)] {
        verified_broadcast(1, &members, &pattern(seed, length)).await;
    }
    // One that is gone is not noticed: the others wait until they abort.
    members[2].worker.kill("the test says so");
    members[2].worker.ended().await;
    let slots = all(members[..2].iter().map(|member| member.ring.take(SOON))).await;
    let waits = members[1].broadcast(1, slots[1].as_ref().unwrap(), SLOT, Duration::from_millis(300)).await.unwrap_err();
    assert_eq!(fault(&waits), WorkerFaultCode::Late, "{waits}");
    abort(1, &members[..2]).await;
    drop(slots);
    form(2, &members[..2]).await;
    verified_broadcast(2, &members[..2], &pattern(4, SLOT as usize)).await;
    abort(2, &members[..2]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_are_filled_sent_and_read_in_the_order_of_the_requests() {
    let machine = Machine::new().with("FAKEGPU_JITTER_US", 2000);
    let members = machine.members(2).await;
    let members: Vec<&Member> = members.iter().collect();
    form(1, &members).await;
    let [source, receiver] = members[..] else { panic!() };
    // Eight buckets through four slots; no one waits for a broadcast before asking for the next one.
    let mut answers = Vec::new();
    let buckets: Vec<Vec<u8>> = (0..8).map(|seed| pattern(seed, SLOT as usize)).collect();
    for bucket in &buckets {
        let (from, to) = (source.ring.take(SOON).await.unwrap(), receiver.ring.take(SOON).await.unwrap());
        source.fill(&from, bucket).await;
        let whole = |slot: &weightsync_gpu::worker::Slot| Broadcast {
            group: 1,
            root: 0,
            at: slot.at(0),
            bytes: SLOT,
            parts: vec![Part { offset: 0, bytes: SLOT, first_word: 0 }],
            after: None,
        };
        let sent = tokio::spawn(source.worker.broadcast_now(whole(&from), SOON));
        let received = tokio::spawn(receiver.worker.broadcast_now(whole(&to), SOON));
        answers.push((sent, received));
    }
    for ((sent, received), bucket) in answers.into_iter().zip(&buckets) {
        let want = [gsum64(bucket)];
        assert_eq!(sent.await.unwrap().unwrap().sums, want);
        assert_eq!(received.await.unwrap().unwrap().sums, want);
    }
    abort(1, &members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_readers_do_not_wait_and_writers_wait_for_all() {
    // A broadcast of a slot takes a second.
    let machine = Machine::new().with("FAKEGPU_NCCL_MBPS", 1);
    let members = machine.members(2).await;
    let members: Vec<&Member> = members.iter().collect();
    form(1, &members).await;
    let [source, receiver] = members[..] else { panic!() };
    let (from, to) = (source.ring.take(SOON).await.unwrap(), receiver.ring.take(SOON).await.unwrap());
    let (old, new) = (pattern(1, SLOT as usize), pattern(2, SLOT as usize));
    source.fill(&from, &old).await;
    let sent = tokio::spawn(
        source.worker.broadcast_now(Broadcast { group: 1, root: 0, at: from.at(0), bytes: SLOT, parts: Vec::new(), after: None }, SOON),
    );
    let received = async { receiver.broadcast(1, &to, SLOT, SOON).await.unwrap() };
    let alongside = async {
        assert_eq!(source.read(&from, SLOT as usize).await, old);
        assert!(!sent.is_finished(), "the copy to the host waited for the broadcast");
        source.fill(&from, &new).await;
        assert_eq!(source.read(&from, SLOT as usize).await, new);
    };
    let (received, ()) = tokio::join!(received, alongside);
    assert_eq!(received.sums, [gsum64(&old)], "the slot was written while it was sent");
    sent.await.unwrap().unwrap();
    abort(1, &members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn digest_does_not_wait_for_another_buckets_copy() {
    // A copy of a slot to the host takes a second.
    let machine = Machine::new().with("FAKEGPU_TO_HOST_MBPS", 1);
    let member = Member::new(machine.worker(0).await).await;
    let (copied, digested) = (member.ring.take(SOON).await.unwrap(), member.ring.take(SOON).await.unwrap());
    let bytes = pattern(3, SLOT as usize);
    member.fill(&digested, &bytes).await;
    let copy = Copy { from: copied.at(0), to: member.host.at(copied.offset()), bytes: SLOT, after: None, then: None };
    let copy = tokio::spawn(member.worker.copy_now(copy, SOON));
    let sums = member.worker.digest(digested.at(0), vec![Part { offset: 0, bytes: SLOT, first_word: 0 }], None, SOON).await.unwrap();
    assert!(!copy.is_finished(), "the sums went to the host after the bucket");
    assert_eq!(sums.sums, [gsum64(&bytes)]);
    copy.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn digests_of_parts_add_up_to_the_digest_of_the_whole() {
    let machine = Machine::new();
    let member = Member::new(machine.worker(2).await).await;
    let slot = member.ring.take(SOON).await.unwrap();
    let bytes = pattern(9, 100_005);
    member.fill(&slot, &bytes).await;
    let parts = [(0, 4096), (4096, 8), (4104, 100_005 - 4104)];
    let parts = parts.map(|(offset, bytes)| Part { offset, bytes, first_word: offset / 8 });
    let sums = member.worker.digest(slot.at(0), parts.to_vec(), None, SOON).await.unwrap().sums;
    assert_eq!(sums.iter().fold(0, |sum: u64, part| sum.wrapping_add(*part)), gsum64(&bytes));
    // A tensor's digest counts words from the tensor's own beginning.
    let own = member.worker.digest(slot.at(0), vec![Part { offset: 4096, bytes: 8000, first_word: 0 }], None, SOON).await.unwrap();
    assert_eq!(own.sums, [gsum64(&bytes[4096..12_096])]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_is_never_sent_beyond_its_slot() {
    let machine = Machine::new();
    let members = machine.members(2).await;
    let members: Vec<&Member> = members.iter().collect();
    form(1, &members).await;
    let slot = members[0].ring.take(SOON).await.unwrap();
    let error = members[0].broadcast(1, &slot, SLOT + 8, SOON).await.unwrap_err();
    assert_eq!(fault(&error), WorkerFaultCode::Invalid, "{error}");
    abort(1, &members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forty_groups_leave_no_resources() {
    let machine = Machine::new();
    let members = machine.members(2).await;
    let members: Vec<&Member> = members.iter().collect();
    let held = async || {
        let answers = all(members.iter().map(|member| member.worker.stats(SOON))).await;
        let rows = answers.into_iter().map(|answer| match answer.unwrap() {
            WorkerAnswer::Stats { descriptors, threads, groups, gpu_free_bytes, .. } => (descriptors, threads, groups, gpu_free_bytes),
            other => panic!("{other:?}"),
        });
        rows.collect::<Vec<_>>()
    };
    let mut first = None;
    for epoch in 1..=40 {
        form(epoch, &members).await;
        verified_broadcast(epoch, &members, &pattern(epoch, 10_000)).await;
        abort(epoch, &members).await;
        if epoch == 3 {
            first = Some(held().await);
        }
    }
    // A thread that ends is still counted for a moment.
    let first = first.unwrap();
    let settled = async {
        while held().await.iter().zip(&first).any(|(now, then)| now.0 > then.0 || now.1 > then.1 || now.2 != 0 || now.3 != then.3) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert!(tokio::time::timeout(SOON, settled).await.is_ok(), "after 3 epochs {first:?}, after 40 {:?}", held().await);
}
