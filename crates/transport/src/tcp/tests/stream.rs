use std::time::Duration;

use super::Wire;
use crate::tcp::frame::Frame;
use crate::tests::fixture::{Fixture, Member, PATIENT, Refuse, hello};
use weightsync_core::protocol::{BucketHeader, StreamFailure};

const HEAD: BucketHeader = BucketHeader { sequence: 0, flags: 0, offset: 0, bytes: 100_000 };

async fn half_a_bucket(members: &[Member], silence_ms: u64) -> Wire {
    let mut wire = Wire::open(&members[0].address, &hello(members, silence_ms)).await;
    assert_eq!(wire.answer().await, Some(Ok("admitted")));
    wire.frame(Frame::Head(HEAD)).await;
    wire.frame(Frame::Part(&vec![7; 50_000])).await;
    // It is forwarded before the rest is even sent.
    for member in members {
        member.record().until(|seen| seen.bytes.len() == 50_000).await;
    }
    wire
}

#[tokio::test]
async fn a_bucket_is_forwarded_while_it_still_arrives() {
    let members = Fixture::tcp().members(&[Refuse::Nothing; 4]).await;
    let mut wire = half_a_bucket(&members, PATIENT).await;
    wire.frame(Frame::Alive).await;
    wire.frame(Frame::Part(&vec![7; 50_000])).await;
    wire.frame(Frame::Digest(weightsync_core::weights::bucket_digest(&vec![7; 100_000]))).await;
    wire.frame(Frame::End).await;
    assert_eq!(wire.answer().await, Some(Ok("done")));
    assert!(members.iter().all(|member| member.record().seen.borrow().ended));
}

#[tokio::test]
async fn a_leader_that_dies_in_the_middle_is_named_to_every_member() {
    let members = Fixture::tcp().members(&[Refuse::Nothing; 3]).await;
    drop(half_a_bucket(&members, PATIENT).await);
    for member in &members {
        let (peer, cause) = member.record().broken().await;
        assert_eq!(peer.as_deref(), Some("trainer/0"), "{cause}");
    }
}

#[tokio::test]
async fn a_leader_that_falls_silent_is_named_to_every_member() {
    let members = Fixture::tcp().members(&[Refuse::Nothing; 3]).await;
    let mut wire = half_a_bucket(&members, 400).await;
    let Some(Err(StreamFailure::Silent { peer, silence_ms: 400 })) = wire.answer().await else { panic!("not silence") };
    assert_eq!(peer.0, "trainer/0");
    for member in &members {
        let (peer, cause) = member.record().broken().await;
        assert_eq!(peer.as_deref(), Some("trainer/0"), "{cause}");
    }
}

#[tokio::test]
async fn a_stream_that_ends_in_the_middle_of_a_bucket_is_refused() {
    let members = Fixture::tcp().members(&[Refuse::Nothing; 2]).await;
    let mut wire = half_a_bucket(&members, PATIENT).await;
    wire.frame(Frame::End).await;
    let Some(Err(StreamFailure::Refused { refusal, .. })) = wire.answer().await else { panic!("not refused") };
    assert!(refusal.message.contains("in the middle of a bucket"), "{}", refusal.message);
    assert!(members.iter().all(|member| !member.record().seen.borrow().ended));
}

#[tokio::test]
async fn garbage_in_the_middle_is_refused_and_ends_the_connection() {
    let members = Fixture::tcp().members(&[Refuse::Nothing; 2]).await;
    let mut wire = half_a_bucket(&members, PATIENT).await;
    wire.write(&[0xFF; 64]).await;
    assert!(matches!(wire.answer().await, Some(Err(StreamFailure::Refused { .. }))));
    assert_eq!(wire.answer().await, None);
}

#[tokio::test]
async fn a_silence_out_of_bounds_is_refused() {
    let members = Fixture::tcp().members(&[Refuse::Nothing]).await;
    for silence_ms in [0, 9, 600_001, u64::MAX] {
        let mut wire = Wire::open(&members[0].address, &hello(&members, silence_ms)).await;
        assert!(matches!(wire.answer().await, Some(Err(StreamFailure::Refused { .. }))), "{silence_ms}");
    }
}

#[tokio::test]
async fn dropped_transport_frees_its_address_and_blames_itself() {
    let fixture = Fixture::tcp();
    let mut members = fixture.members(&[Refuse::Nothing; 2]).await;
    let (_leader, mut sink) = fixture.open(&members, PATIENT).await.unwrap();
    members[0].close();
    let error = tokio::time::timeout(Duration::from_secs(5), sink.failed()).await.unwrap();
    assert_eq!(error.peer(), Some(&members[0].name));
    assert_eq!(members[1].record().broken().await.0, Some(members[0].name.to_string()));
    assert_eq!(members[0].record().broken().await.0, Some(members[0].name.to_string()));
    // Its tasks end by themselves: the address is free a moment later.
    let freed = async {
        while tokio::net::TcpStream::connect(&members[0].address).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), freed).await.expect("no one listens any more");
}
