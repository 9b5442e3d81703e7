//! What digests cost on one hop of the loopback device. They cannot be turned off: a member hashes whatever it receives.
//!
//! So it is measured around them, all within one run: the hop as it is; the hop whose sender knows its digests before the clock starts;
//! the processor time of both sides; and that of one core that hashes the same bytes, from memory (as a sender does) and from the cache
//! (as a member does with what it has just read).

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use weightsync_core::weights::{BucketHasher, DigestAlgorithm, Dtype, Layout, TensorSpec, bucket_digest};
use weightsync_transport::TensorDigests;
use weightsync_transport::tcp::TcpOptions;

use crate::node::{BUCKET, slots};
use crate::processes::{Node, OneHop, Sent, gigabytes, processor, send};
use crate::report::{Report, median};

pub fn measure(settings: &OneHop, runs: usize, report: &mut Report) -> Result<()> {
    let bytes = settings.gib << 30;
    let member = [Node::start(&[], "127.0.0.1:0", &settings.tuning)?];
    let known = [settings.tuning.as_slice(), &["--digests-beforehand".to_owned()]].concat();
    let (mut hops, mut quick, mut from_memory, mut from_cache) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..runs {
        from_memory.push(hash_memory(bytes)?);
        from_cache.push(hash_cache(bytes)?);
        hops.push(send(&[], &member, bytes, &settings.tuning)?);
        quick.push(send(&[], &member, bytes, &known)?);
    }
    let speeds = |sent: &[Sent]| sent.iter().map(|sent| gigabytes(bytes) / sent.seconds).collect::<Vec<_>>();
    let what = format!("loopback, one hop of {} GiB, by who hashes", settings.gib);
    report.compare(&what, "GB/s", ("sender and member hash", &speeds(&hops)), ("the member alone", &speeds(&quick)), "for comparison");
    let a_gigabyte = |seconds: &[f64]| seconds.iter().map(|seconds| seconds * 1e3 / gigabytes(bytes)).collect::<Vec<_>>();
    let of = |sent: &[Sent], side: fn(&Sent) -> f64| a_gigabyte(&sent.iter().map(side).collect::<Vec<_>>());
    let (sender, receiver) = (of(&hops, |sent| sent.leader), of(&hops, |sent| sent.members));
    let (memory, cache) = (a_gigabyte(&from_memory), a_gigabyte(&from_cache));
    let row =
        |name: &str, all: &[f64], hashing: &[f64]| (name.to_owned(), vec![("in all", median(all)), ("hashed alone", median(hashing))]);
    report.table("processor time of that hop", "ms a GB", &[row("sender", &sender, &memory), row("receiver", &receiver, &cache)]);
    let sums = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(one, other)| one + other).collect::<Vec<_>>();
    let what = "hashing as a part of the processor time of both sides";
    report.compare(what, "ms a GB", ("hashed alone", &sums(&memory, &cache)), ("the hop", &sums(&sender, &receiver)), "for comparison");
    let (mut blake3, mut xxh3) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        blake3.push(gigabytes(bytes) / digest_tensors(DigestAlgorithm::Blake3, bytes)?);
        xxh3.push(gigabytes(bytes) / digest_tensors(DigestAlgorithm::Xxh3_128, bytes)?);
    }
    let what = format!("digests of tensors of {} GiB, by `update.digest`", settings.gib);
    report.compare(&what, "GB/s", ("Blake3, by the threads of this machine", &blake3), ("Xxh3, by one core", &xxh3), "for comparison");
    Ok(())
}

/// Seconds until the tensors of so many bytes have their digests, fed in receive buffers as a member does.
fn digest_tensors(algorithm: DigestAlgorithm, bytes: u64) -> Result<f64> {
    let tensor = bytes.min(256 << 20);
    let tensors = (0..bytes / tensor.max(1)).map(|number| TensorSpec::new(format!("w{number}"), Dtype::U8, vec![tensor]));
    let layout = Arc::new(Layout::new("model", tensors.collect(), 0)?);
    let buffer = vec![7; TcpOptions::default().receive_buffer];
    let begun = Instant::now();
    let mut digests = TensorDigests::new(layout.clone(), algorithm);
    while let Some(part) = usize::try_from(layout.total_bytes - digests.position()).ok().filter(|left| *left > 0) {
        digests.update(black_box(buffer.get(..part).unwrap_or(&buffer)))?;
    }
    black_box(digests.finish()?);
    Ok(begun.elapsed().as_secs_f64())
}

/// Processor time, in seconds, in which one core hashes so many bytes that lie in memory, in the buckets that a leader sends.
fn hash_memory(bytes: u64) -> Result<f64> {
    let slots = slots(BUCKET);
    let before = processor("self")?;
    let mut left = bytes;
    for slot in slots.iter().cycle() {
        if left == 0 {
            break;
        }
        black_box(bucket_digest(slot));
        left = left.saturating_sub(slot.len() as u64);
    }
    Ok(processor("self")? - before)
}

/// Processor time, in seconds, in which one core hashes so many bytes that it has just touched: a receive buffer again and again.
fn hash_cache(bytes: u64) -> Result<f64> {
    let buffer = vec![7; TcpOptions::default().receive_buffer];
    let before = processor("self")?;
    let mut hasher = BucketHasher::new();
    let mut left = bytes;
    while left > 0 {
        hasher.update(black_box(&buffer));
        left = left.saturating_sub(buffer.len() as u64);
    }
    black_box(hasher.take());
    Ok(processor("self")? - before)
}
