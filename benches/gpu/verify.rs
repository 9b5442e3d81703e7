//! A source and receivers, all workers of ours: every byte of every bucket compared, every digest against the CPU's.

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use weightsync_core::protocol::worker::Part;
use weightsync_core::weights::{gsum64, gsum64_from};
use weightsync_gpu::worker::Broadcast;

use crate::fleet::{self, AMPLE, Member};
use crate::{Settings, pattern};

pub async fn run(settings: &Settings) -> Result<()> {
    let members = fleet::start(settings).await?;
    let (group, _, _) = fleet::form(&members).await?;
    let full = usize::try_from(settings.mib << 20)?;
    // Whole buckets, and lengths that are not those of words, pairs of words, or threads.
    let lengths = [full, full - 64, (full / 3) | 1, 8, 7, 1, 4096 + 3, full];
    let mut compared = 0;
    for (bucket, length) in (0_u64..).zip(lengths) {
        compared += one(&members, group, bucket, length).await?;
    }
    println!("verify: {} buckets, {compared} bytes compared on {} receivers, all digests right", lengths.len(), members.len() - 1);
    Ok(())
}

async fn one(members: &[Member], group: u64, bucket: u64, length: usize) -> Result<usize> {
    let sent = pattern::bytes(bucket, length);
    let slots = fleet::slots(members).await?;
    members[0].fill(&slots[0], &sent).await?;
    // What a receiver had there before must not pass for the bucket.
    let junk = vec![0xEE; length];
    try_join_all(members[1..].iter().zip(&slots[1..]).map(|(member, slot)| member.fill(slot, &junk))).await?;
    let parts = parts(length);
    let asked = members.iter().zip(&slots).map(|(member, slot)| {
        let broadcast = Broadcast { group, root: 0, at: slot.at(0), bytes: length as u64, parts: parts.clone(), after: None };
        member.worker.broadcast_now(broadcast, AMPLE)
    });
    let wanted: Vec<u64> = parts.iter().map(|part| on_cpu(&sent, part)).collect();
    for (rank, sums) in try_join_all(asked).await?.iter().enumerate() {
        ensure!(sums.sums == wanted, "bucket {bucket} of {length} bytes, rank {rank}: digests {:x?}, wanted {wanted:x?}", sums.sums);
    }
    for (rank, (member, slot)) in members.iter().zip(&slots).enumerate().skip(1) {
        let read = member.read(slot, length).await?;
        let wrong = || read.iter().zip(&sent).position(|(read, sent)| read != sent);
        ensure!(read == sent, "bucket {bucket} of {length} bytes, rank {rank}: byte {:?} differs", wrong());
    }
    Ok(length * (members.len() - 1))
}

/// The whole, and parts as tensors cut it: at multiples of 8, with first words of their own.
fn parts(length: usize) -> Vec<Part> {
    let length = length as u64;
    let mut parts = fleet::whole(length);
    let (a, b) = (length / 3 / 8 * 8, length / 2 / 8 * 8);
    for (from, to) in [(0, a), (a, b), (b, length)] {
        parts.push(Part { offset: from, bytes: to - from, first_word: 0 });
        parts.push(Part { offset: from, bytes: to - from, first_word: from / 8 });
        parts.push(Part { offset: from, bytes: to - from, first_word: 1 << 40 });
    }
    parts
}

fn on_cpu(bytes: &[u8], part: &Part) -> u64 {
    let from = usize::try_from(part.offset).unwrap();
    let part_bytes = &bytes[from..from + usize::try_from(part.bytes).unwrap()];
    if part.first_word == 0 { gsum64(part_bytes) } else { gsum64_from(part.first_word, part_bytes) }
}
