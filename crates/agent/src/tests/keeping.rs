//! Copies of a version that are still under way when all of it was sent: engines switch meanwhile, and the trainer keeps its tensors until a copy
//! is whole or every member has them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::fixture::*;
use super::trainer::*;
use crate::lead::table::{Failure, Switching};
use crate::lead::{Keep, Plan, Stage};
use crate::source::retain::{Keeper, Retained};
use weightsync_core::protocol::{HeldVersion, UpdatePhase};
use weightsync_core::weights::{DigestAlgorithm, Manifest};

/// What becomes of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Copied {
    AtOnce,
    NotAtAll,
    /// It is under way for as long as the attempt lasts.
    Later,
}

struct Copying(Copied);

#[async_trait]
impl Keep for Copying {
    fn keep(&self, bytes: Bytes) -> Bytes {
        bytes
    }

    fn take(&self, _: Bytes) {}

    fn give_up(&self) {}

    async fn whole(&self, buckets: u32, _: Duration) -> bool {
        assert!(buckets > 1);
        if self.0 == Copied::Later {
            std::future::pending::<()>().await;
        }
        self.0 == Copied::AtOnce
    }
}

/// Waits for the release where a trainer would say when engines switch.
struct Watching(Arc<AtomicBool>);

#[async_trait]
impl Stage for Watching {
    fn progress(&mut self, _: UpdatePhase, _: u64) {}

    fn streamed(&mut self, _: &Manifest, _: &HeldVersion) -> Result<(), Failure> {
        assert!(!self.0.load(Ordering::SeqCst), "members have not said that they hold it");
        Ok(())
    }

    async fn staged(&mut self) -> Result<(), Failure> {
        let released = async {
            while !self.0.load(Ordering::SeqCst) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(SOON, released).await.expect("every member holds it");
        Ok(())
    }

    fn switching(&mut self, _: Switching) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn trainer_is_released_once_members_hold_the_version() {
    for (version, copied) in (1..).zip([Copied::Later, Copied::NotAtAll, Copied::AtOnce]) {
        let mut fixture = Fixture::new();
        let (source, rollouts) = (fixture.source(), fixture.rollouts(1));
        fixture.form(&[&source, &rollouts[0]], Some(&source)).await;
        let mut bytes = TestSource::of(1);
        let (epoch, layout) = (source.core.epoch().unwrap(), bytes.layout.clone());
        let plan = Plan {
            members: epoch.rollouts(),
            epoch,
            version,
            attempt: 1,
            feeding: false,
            manual: false,
            algorithm: DigestAlgorithm::Xxh3_128,
            min_ready: 1,
            known: None,
            must: None,
            stage: &mut Watching(bytes.released.clone()),
            keep: Some(Arc::new(Copying(copied))),
            source: &mut bytes,
        };
        let brought = tokio::time::timeout(SOON, source.leader.lead(plan)).await.expect("it ends");
        assert_eq!(brought.unwrap().installed.len(), 1, "{copied:?}");
        assert_eq!(rollouts[0].engine.serves(), Some(served(&layout, &weights(1).1)), "{copied:?}");
    }
}

#[tokio::test]
async fn copy_is_whole_with_every_bucket_and_failure_ends_wait() {
    let (layout, bytes) = weights(1);
    let buckets = layout.bucket_count();
    let cut = |bucket: u32| {
        let bucket = layout.bucket(bucket).unwrap();
        let at = |offset: u64| usize::try_from(offset).unwrap();
        Bytes::copy_from_slice(&bytes[at(bucket.offset)..at(bucket.offset + bucket.bytes)])
    };
    let keeper = Arc::new(Keeper::default());
    for bucket in 1..layout.bucket_count() {
        keeper.take(cut(bucket - 1));
    }
    assert!(!keeper.is_whole(buckets) && !keeper.whole(buckets, Duration::from_millis(1)).await);
    let waiting = tokio::spawn({
        let keeper = keeper.clone();
        async move { keeper.whole(buckets, SOON).await }
    });
    keeper.take(cut(layout.bucket_count() - 1));
    assert!(waiting.await.unwrap() && keeper.is_whole(buckets));
    // Another attempt reads it from the start; its last bucket fails to be copied.
    assert!(keeper.rewind(buckets, SOON).await && !keeper.is_whole(1));
    keeper.take(cut(0));
    keeper.give_up();
    assert!(!tokio::time::timeout(SOON, keeper.whole(buckets, SOON * 100)).await.expect("it is not waited for"));
    let held = HeldVersion { version: 1, manifest: "ab".into() };
    assert!(Retained::in_memory(held, DigestAlgorithm::Gsum64, &layout, keeper.empty()).is_some(), "all of it is here all the same");
}
