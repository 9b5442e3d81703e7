//! What only reads between members have: keys that end with their epoch, and announcements that lie.

use std::sync::Arc;

use super::{FabricRing, RingWanted};
use crate::tests::bed::fabric::{WITHIN, library, worker};
use weightsync_core::protocol::{EpochId, FabricPlan, MemberName};

async fn ring(name: &str, epoch: u64) -> Arc<FabricRing> {
    let epoch = EpochId { weightsync: "ws".into(), created: 1, term: 1, epoch };
    let worker = worker(name).await;
    FabricRing::register(RingWanted {
        epoch,
        me: MemberName(name.into()),
        worker,
        plan: FabricPlan { slots: 2, slot_bytes: 64 << 10 },
        within: WITHIN,
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn slot_of_a_ring_that_is_closed_is_read_by_no_member() {
    if library().is_none() {
        return;
    }
    let (source, member) = (ring("source", 1).await, ring("member", 1).await);
    let mut offered = source.take(WITHIN).await.unwrap();
    offered.write(&[7; 1000]);
    let memory = source.memory().clone();
    let place = memory.at(offered.index(), 1000).unwrap();
    let peer = member.peer(&memory, WITHIN).await.unwrap();
    let mut slot = member.take(WITHIN).await.unwrap();
    slot.read(&peer, place, 1000, WITHIN).await.unwrap();
    assert_eq!(slot.freeze(), vec![7; 1000]);

    source.close().await.unwrap();
    offered.write(&[8; 1000]);
    let mut slot = member.take(WITHIN).await.unwrap();
    slot.read(&peer, place, 1000, WITHIN).await.unwrap_err();
    assert_eq!(slot.freeze(), Vec::<u8>::new());
}

#[tokio::test]
async fn piece_beyond_the_offered_slots_is_no_place() {
    if library().is_none() {
        return;
    }
    let ring = ring("alone", 1).await;
    let memory = ring.memory();
    assert_eq!(memory.at(1, 64 << 10).map(|place| place.address), memory.at(0, 1).map(|place| place.address + (64 << 10)));
    assert_eq!((memory.at(2, 1), memory.at(0, (64 << 10) + 1), memory.at(u32::MAX, 1)), (None, None, None));
}
