//! Versions that go into an engine through shared memory: out of the files of a version, or through a ring where there is no room for files.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::engine::Fault;
use super::fixture::*;
use super::trainer::*;
use crate::space::Cgroups;
use weightsync_core::protocol::*;
use weightsync_core::weights::{Dtype, Layout, TensorSpec};
use weightsync_engine::HostDigest;

const MIB: u64 = 1 << 20;

/// A group whose rollouts have so many bytes of memory, in which versions lie; the folder says so.
fn fixture_with_memory(bytes: u64) -> (Fixture, tempfile::TempDir) {
    let group = tempfile::tempdir().unwrap();
    for (name, text) in [("memory.max", bytes.to_string()), ("memory.current", "0".into()), ("memory.stat", "inactive_file 0".into())] {
        std::fs::write(group.path().join(name), text).unwrap();
    }
    let cgroups = Cgroups::at(group.path().to_owned(), "0::/".to_owned());
    (Fixture { cgroups, versions: tempfile::tempdir_in("/dev/shm").unwrap(), ..Fixture::new() }, group)
}

/// 14 MB in tensors of many lengths, in buckets of 1 MiB.
fn large(seed: u8) -> TestSource {
    let spec = |index: u64| {
        let dtype = if index.is_multiple_of(3) { Dtype::U8 } else { Dtype::BF16 };
        let shape = if index % 5 == 4 { vec![] } else { vec![1 + index % 7, 90_001] };
        TensorSpec::new(format!("layer.{index}"), dtype, shape)
    };
    let layout = Layout::new("model", (0..30).map(spec).collect(), MIB).unwrap();
    let mut bytes = vec![0; usize::try_from(layout.total_bytes).unwrap()];
    for entry in &layout.entries {
        let start = usize::try_from(entry.offset).unwrap();
        for (index, byte) in bytes[start..].iter_mut().take(usize::try_from(entry.bytes).unwrap()).enumerate() {
            *byte = u8::try_from((index * 31 + start + usize::from(seed) * 7) % 251).unwrap();
        }
    }
    TestSource { layout, bytes: bytes.into(), ..TestSource::of(seed) }
}

/// Waits until an engine that started again serves that version.
async fn until_serves(member: &Member, seed: u8) {
    let serves = async {
        while member.engine.serves() != Some(expected(seed)) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, serves).await.expect("it is fed");
}

fn expected(seed: u8) -> String {
    let source = large(seed);
    served(&source.layout, &source.bytes)
}

#[tokio::test(flavor = "multi_thread")]
async fn version_in_files_loads_by_shared_memory_and_feeds_others() {
    for digest in [HostDigest::Blake3, HostDigest::Xxh3_128] {
        let mut fixture = Fixture::new();
        let (source, first) = (fixture.source(), fixture.rollout("actors/r-0"));
        first.engine.set(|inside| inside.memory = Some(digest));
        fixture.form(&[&source, &first], Some(&source)).await;
        publish(&source, 1, large(1)).outcome().await.unwrap();
        assert_eq!(first.engine.serves(), Some(expected(1)));
        let held = first.state().retained.unwrap();
        // The file of the version itself, and no ring: more than the weights, which have a header before them.
        let total = large(1).layout.total_bytes;
        assert!(first.engine.get(|inside| inside.shared.iter().all(|bytes| *bytes < total + MIB)));

        // An engine that starts again gets the kept copy, without anybody else.
        first.engine.restart();
        first.engine.set(|inside| inside.memory = Some(digest));
        until_serves(&first, 1).await;
        first.until_installed(1).await;

        // A joiner is fed by this member.
        let second = fixture.rollout("actors/r-1");
        fixture.current = Some(held);
        fixture.form(&[&source, &first, &second], Some(&first)).await;
        second.until_installed(1).await;
        assert_eq!(second.engine.serves(), Some(expected(1)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn version_goes_through_a_smaller_ring_without_room_for_files() {
    for digest in [HostDigest::Blake3, HostDigest::Xxh3_128] {
        let (mut fixture, _group) = fixture_with_memory(8 * MIB);
        let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
        rollout.engine.set(|inside| inside.memory = Some(digest));
        fixture.form(&[&source, &rollout], Some(&source)).await;
        for version in 1..=3 {
            publish(&source, version, large(u8::try_from(version).unwrap())).outcome().await.unwrap();
            assert_eq!(rollout.engine.serves(), Some(expected(u8::try_from(version).unwrap())));
            assert_eq!(rollout.rollout().ready(), Ok(()));
        }
        let largest = rollout.engine.get(|inside| inside.shared.iter().copied().max());
        assert!(largest.is_some_and(|bytes| bytes < 6 * MIB), "{largest:?}");
        // Nothing is kept: others are fed by members that have it.
        assert_eq!(rollout.state().retained, None);
        // One that starts again is fed by the source.
        rollout.engine.restart();
        rollout.engine.set(|inside| inside.memory = Some(digest));
        fixture.current = source.state().retained;
        fixture.form(&[&source, &rollout], Some(&source)).await;
        until_serves(&rollout, 3).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_without_the_way_says_that_there_is_no_room() {
    let (mut fixture, _group) = fixture_with_memory(8 * MIB);
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    let error = publish(&source, 1, large(1)).outcome().await.unwrap_err();
    assert!(error.message.contains("do not read shared memory"), "{}", error.message);
    assert_eq!(rollout.engine.get(|inside| inside.installs), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_serves_until_the_ring_is_full() {
    let (mut fixture, _group) = fixture_with_memory(8 * MIB);
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    rollout.engine.set(|inside| inside.memory = Some(HostDigest::Blake3));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, large(1)).outcome().await.unwrap();

    // Two buckets of the wire: the ring is not full.
    let gate = Arc::new(Semaphore::new(2));
    let publishing = publish(&source, 2, TestSource { gate: Some(gate.clone()), ..large(2) });
    rollout.until("receiving", |state| state.phase == MemberPhase::Updating).await;
    let served = || rollout.engine.serves();
    assert_eq!(served(), Some(expected(1)));
    assert!(!rollout.engine.get(|inside| inside.paused));

    // More than the ring holds: the engine is held and takes what is there.
    gate.add_permits(7);
    let paused = async {
        while !rollout.engine.get(|inside| inside.paused) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, paused).await.expect("the ring is full");
    fixture.fence(&[&source, &rollout]).await;
    let dirty = rollout.until("dirty", |state| state.phase == MemberPhase::Dirty).await;
    assert!(dirty.reason.is_some_and(|reason| reason.contains("given up")));
    assert!(rollout.rollout().ready().is_err());
    drop(publishing);

    // It is fed in full in the next epoch.
    fixture.current = source.state().retained.filter(|held| held.version == 1);
    fixture.form(&[&source, &rollout], Some(&source)).await;
    gate.add_permits(100);
    let healed = rollout.until("healed", |state| state.phase == MemberPhase::Ready && state.installed.is_some()).await;
    let version = healed.installed.unwrap().version;
    assert_eq!(rollout.engine.serves(), Some(expected(u8::try_from(version).unwrap())));
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_that_fails_taking_a_ring_is_dirty_and_named() {
    let (mut fixture, _group) = fixture_with_memory(8 * MIB);
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    rollout.engine.set(|inside| inside.memory = Some(HostDigest::Blake3));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    rollout.engine.set(|inside| inside.fault = Fault::FailsInLoad);
    let error = publish(&source, 1, large(1)).outcome().await.unwrap_err();
    assert!(error.message.contains("out of memory"), "{}", error.message);
    rollout.until("dirty", |state| state.phase == MemberPhase::Dirty).await;
    rollout.engine.set(|inside| inside.fault = Fault::None);
    publish(&source, 2, large(2)).outcome().await.unwrap();
    assert_eq!(rollout.engine.serves(), Some(expected(2)));
    assert_eq!(rollout.rollout().ready(), Ok(()));
}
