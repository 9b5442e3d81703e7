//! What only reads between members have: keys that end with their epoch, and announcements that lie.

use std::sync::Arc;

use super::{FabricRing, RingWanted, Slots};
use crate::tcp::{TcpOptions, TcpTransport};
use crate::tests::fixture::fabric::{WITHIN, transport, worker};
use crate::tests::fixture::{Door, Fixture, PATIENT, Refuse, epoch, hello};
use weightsync_core::protocol::{BucketHeader, DataHello, EpochId, FabricPlan, LentPiece, MemberName, StreamFailure};
use weightsync_core::weights::gsum64;

async fn ring(name: &str, epoch: u64) -> Arc<FabricRing> {
    let epoch = EpochId { weightsync: "ws".into(), created: 1, term: 1, epoch };
    let worker = worker(name).await;
    FabricRing::register(RingWanted {
        epoch,
        me: MemberName(name.into()),
        worker,
        plan: FabricPlan { slots: 2, slot_bytes: 64 << 10, on_gpus: false },
        within: WITHIN,
    })
    .await
    .unwrap()
}

#[tokio::test]
#[ignore = "needs NIXL: make gdr-test"]
async fn slot_of_a_ring_that_is_closed_is_read_by_no_member() {
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
#[ignore = "needs NIXL: make gdr-test"]
async fn piece_beyond_the_offered_slots_is_no_place() {
    let ring = ring("alone", 1).await;
    let memory = ring.memory();
    assert_eq!(memory.at(1, 64 << 10).map(|place| place.address), memory.at(0, 1).map(|place| place.address + (64 << 10)));
    assert_eq!((memory.at(2, 1), memory.at(0, (64 << 10) + 1), memory.at(u32::MAX, 1)), (None, None, None));
}

/// The leader announces a digest that its bytes do not have.
#[tokio::test]
#[ignore = "needs NIXL: make gdr-test"]
async fn bucket_with_another_digest_is_never_completed() {
    let fixture = Fixture::gdr();
    let members = fixture.members(&[Refuse::Nothing; 3]).await;
    let door = Door::new("trainer/0", Refuse::Admission);
    let tcp = TcpTransport::bind("127.0.0.1:0".parse().unwrap(), door, TcpOptions::default()).await.unwrap();
    let (gdr, carried) = transport(tcp, MemberName("trainer/0".into()), epoch()).await;
    let hello = DataHello { carried: Some(carried), ..hello(&members, PATIENT) };
    let mut chain = gdr.nccl.chain().open_alongside(hello, &members[0].address).await.unwrap();
    let Some(Slots::Host(ring)) = gdr.present.of(&epoch()) else { panic!("no ring") };
    let bytes = vec![9; 50_000];
    let mut out = Vec::new();
    for (sequence, digest) in [(0, gsum64(&bytes)), (1, gsum64(&bytes) ^ 1)] {
        let mut slot = ring.take(WITHIN).await.unwrap();
        slot.write(&bytes);
        chain.head(BucketHeader { sequence, flags: BucketHeader::CARRIED, offset: 50_000 * u64::from(sequence), bytes: 50_000 });
        chain.lent(LentPiece { number: sequence, slot: slot.index(), offset: 0, bytes: 50_000 });
        out.push(slot);
        chain.digest(digest.into());
        if sequence == 0 {
            members[2].record().until(|seen| seen.buckets == [0]).await;
        }
    }
    assert!(matches!(chain.failed().await, StreamFailure::Corrupt { sequence: 1, .. }));
    for member in &members {
        let (peer, cause) = member.record().broken().await;
        assert!(peer.is_some() && cause.contains("bucket 1 with a wrong digest"), "{cause}");
        let seen = member.record().seen.borrow().clone();
        assert!(seen.buckets == [0] && !seen.ended && seen.too_late == 0, "{} took it", member.name);
    }
}
