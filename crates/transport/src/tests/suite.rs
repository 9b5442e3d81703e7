//! The guarantees of every transport.

use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::fixture::{Fixture, LONG, PATIENT, Refuse, buckets, finish, hello, send};
use crate::TransportError;
use weightsync_core::protocol::{BucketHeader, TransportKind};

const FOUR: [Refuse; 4] = [Refuse::Nothing; 4];
/// Short enough for a test, long enough for a busy machine.
const SILENCE: u64 = 1000;

/// Runs each test of the suite with one and with several connections on each hop, and with payloads that are read through NIXL. Those
/// after the semicolon need a sender that takes digests as they are given: connections only.
macro_rules! promises {
    ($($promise:ident),*; $($given:ident),* $(,)?) => {
        mod tcp {
            $(#[tokio::test]
            async fn $promise() {
                super::$promise(super::Fixture::tcp()).await;
            })*
            $(#[tokio::test]
            async fn $given() {
                super::$given(super::Fixture::tcp()).await;
            })*
        }
        mod gdr {
            $(#[tokio::test]
            #[ignore = "needs NIXL: make gdr-test"]
            async fn $promise() {
                super::$promise(super::Fixture::gdr()).await;
            })*
        }
        mod lanes {
            $(#[tokio::test]
            async fn $promise() {
                super::$promise(super::Fixture::lanes()).await;
            })*
            $(#[tokio::test]
            async fn $given() {
                super::$given(super::Fixture::lanes()).await;
            })*
        }
    };
}

promises!(
    every_member_stores_every_byte_once,
    every_member_measures_what_it_received,
    an_empty_stream_ends,
    a_bucket_may_come_in_any_order_of_offsets,
    two_streams_at_once_do_not_mix,
    member_that_refuses_is_named_and_others_are_fenced,
    member_without_a_listener_is_named,
    a_member_killed_in_the_middle_is_named_to_all,
    a_member_frozen_in_the_middle_is_named_by_its_silence,
    frozen_member_is_named_and_others_keep_their_bytes,
    a_store_that_says_no_ends_the_stream,
    a_stream_that_is_dropped_breaks_without_blame,
    a_waiting_leader_is_not_silent,
    a_head_that_makes_no_sense_is_refused,
    a_bucket_that_is_not_as_long_as_its_head_says_is_refused,
    an_error_stays,
    hellos_name_the_sender_and_the_rest_of_the_chain;
    a_wrong_digest_is_never_completed,
);

async fn every_member_stores_every_byte_once(fixture: Fixture) {
    let members = fixture.members(&FOUR).await;
    let (stream, buckets) = buckets(&[1, 64, 100_000, 3, 5_000_000, 4096, 8192]);
    let (_leader, mut sink) = fixture.open(&members, PATIENT).await.unwrap();
    for bucket in &buckets {
        send(&mut sink, bucket).await.unwrap();
    }
    finish(sink).await.unwrap();
    for member in &members {
        // Confirmed means stored: no wait is needed here.
        let seen = member.record().seen.borrow().clone();
        assert!(seen.ended && seen.broken.is_none() && seen.too_late == 0);
        assert_eq!(seen.buckets, (0..7).collect::<Vec<_>>());
        assert!(seen.bytes == stream, "{} holds other bytes", member.name);
    }
}

async fn every_member_measures_what_it_received(fixture: Fixture) {
    let by = if fixture.reads() { TransportKind::Gdr } else { TransportKind::Tcp };
    let members = fixture.members(&FOUR).await;
    let (stream, buckets) = buckets(&[100_000, 3, 500_000]);
    let (_leader, mut sink) = fixture.open(&members, PATIENT).await.unwrap();
    let begun = Instant::now();
    for bucket in &buckets {
        send(&mut sink, bucket).await.unwrap();
    }
    finish(sink).await.unwrap();
    let mut from = "trainer/0".to_owned();
    for member in &members {
        let seen = member.record().seen.borrow().clone();
        let [transfer] = seen.transfers.as_slice() else { panic!("{:?}", seen.transfers) };
        assert_eq!(transfer.from.as_ref().map(|name| name.0.as_str()), Some(from.as_str()));
        assert_eq!((transfer.by, transfer.bytes), (by, stream.len() as u64));
        assert!(transfer.took > Duration::ZERO && transfer.took < begun.elapsed(), "{:?}", transfer.took);
        from = member.name.0.clone();
    }
}

async fn an_empty_stream_ends(fixture: Fixture) {
    let members = fixture.members(&FOUR).await;
    let (_leader, sink) = fixture.open(&members, PATIENT).await.unwrap();
    finish(sink).await.unwrap();
    assert!(members.iter().all(|member| member.record().seen.borrow().ended && member.record().seen.borrow().transfers.is_empty()));
}

async fn a_bucket_may_come_in_any_order_of_offsets(fixture: Fixture) {
    let members = fixture.members(&FOUR[..2]).await;
    let (stream, mut buckets) = buckets(&[10_000, 20_000, 30_000]);
    buckets.reverse();
    let (_leader, mut sink) = fixture.open(&members, PATIENT).await.unwrap();
    for bucket in &buckets {
        send(&mut sink, bucket).await.unwrap();
    }
    finish(sink).await.unwrap();
    assert!(members.iter().all(|member| member.record().seen.borrow().bytes == stream));
}

async fn two_streams_at_once_do_not_mix(fixture: Fixture) {
    let members = fixture.members(&FOUR[..2]).await;
    let (leader, mut one) = fixture.open(&members, PATIENT).await.unwrap();
    let mut second = hello(&members, PATIENT);
    second.update.attempt = 2;
    let mut two = leader.open(second, &members[0].address).await.unwrap();
    let (stream, buckets) = buckets(&[50_000; 8]);
    for bucket in &buckets {
        send(&mut one, bucket).await.unwrap();
        send(&mut two, bucket).await.unwrap();
    }
    finish(two).await.unwrap();
    drop(one);
    for member in &members {
        assert!(member.door.record(2).seen.borrow().bytes == stream);
        assert!(member.door.record(1).broken().await.0.is_none());
        assert!(member.door.record(2).seen.borrow().broken.is_none());
    }
}

async fn member_that_refuses_is_named_and_others_are_fenced(fixture: Fixture) {
    for at in 0..3 {
        let mut refusals = [Refuse::Nothing; 3];
        refusals[at] = Refuse::Admission;
        let members = fixture.members(&refusals).await;
        let error = fixture.open(&members, PATIENT).await.err().expect("one member refused");
        assert!(matches!(&error, TransportError::Refused { refusal, .. } if refusal.message == "this epoch is over"), "{error}");
        assert_eq!(error.peer(), Some(&members[at].name));
        for before in &members[..at] {
            assert_eq!(before.record().broken().await.0, Some(members[at].name.to_string()));
        }
    }
}

async fn member_without_a_listener_is_named(fixture: Fixture) {
    for at in 0..3 {
        let mut members = fixture.members(&FOUR[..3]).await;
        members[at].kill();
        let error = fixture.open(&members, PATIENT).await.err().expect("one member is gone");
        assert_eq!(error.peer(), Some(&members[at].name), "{error}");
        // A killed runtime may take a moment to close its listener: lost is as good as unreachable then.
        assert!(matches!(error, TransportError::Unreachable { .. } | TransportError::Lost { .. }), "{error}");
    }
}

async fn a_member_killed_in_the_middle_is_named_to_all(fixture: Fixture) {
    for at in 0..3 {
        let mut members = fixture.members(&FOUR[..3]).await;
        let (_leader, mut sink) = fixture.open(&members, PATIENT).await.unwrap();
        let (_, buckets) = buckets(&[100_000, 100_000]);
        send(&mut sink, &buckets[0]).await.unwrap();
        members[2].record().until(|seen| seen.buckets == [0]).await;
        members[at].kill();
        let killed = members[at].name.clone();
        // Well within the silence limit: the closed connection shows it.
        let error = timeout(Duration::from_millis(PATIENT / 2), sink.failed()).await.expect("the loss was not seen");
        assert!(matches!(error, TransportError::Lost { .. }), "{error}");
        assert_eq!(error.peer(), Some(&killed));
        for other in members.iter().filter(|member| member.name != killed) {
            assert_eq!(other.record().broken().await.0, Some(killed.to_string()), "asked to {}", other.name);
        }
        let error = send(&mut sink, &buckets[1]).await.unwrap_err();
        assert_eq!(error.peer(), Some(&killed));
    }
}

async fn a_member_frozen_in_the_middle_is_named_by_its_silence(fixture: Fixture) {
    for at in 0..3 {
        let members = fixture.members(&FOUR[..3]).await;
        let (_leader, mut sink) = fixture.open(&members, SILENCE).await.unwrap();
        let (_, buckets) = buckets(&[100_000, 100_000]);
        send(&mut sink, &buckets[0]).await.unwrap();
        members[2].record().until(|seen| seen.buckets == [0]).await;
        members[at].freeze().await;
        let error = match send(&mut sink, &buckets[1]).await {
            Ok(()) => timeout(LONG, sink.failed()).await.expect("silence without end"),
            Err(error) => error,
        };
        assert!(matches!(error, TransportError::Silent { silence, .. } if silence == Duration::from_millis(SILENCE)), "{error}");
        assert_eq!(error.peer(), Some(&members[at].name));
        for (number, other) in members.iter().enumerate().filter(|(number, _)| *number != at) {
            assert_eq!(other.record().broken().await.0, Some(members[at].name.to_string()), "asked to member {number}");
        }
    }
}

async fn frozen_member_is_named_and_others_keep_their_bytes(fixture: Fixture) {
    let members = fixture.members(&FOUR[..3]).await;
    let (_leader, mut sink) = fixture.open(&members, SILENCE).await.unwrap();
    let (stream, buckets) = buckets(&[100_000]);
    send(&mut sink, &buckets[0]).await.unwrap();
    members[2].record().until(|seen| seen.buckets == [0]).await;
    members[2].freeze().await;
    let error = finish(sink).await.unwrap_err();
    assert!(matches!(error, TransportError::Silent { .. }), "{error}");
    assert_eq!(error.peer(), Some(&members[2].name));
    for member in &members[..2] {
        let seen = member.record().until(|seen| seen.ended).await;
        assert!(seen.bytes == stream && seen.broken.is_none());
    }
}

async fn a_wrong_digest_is_never_completed(fixture: Fixture) {
    let members = fixture.members(&FOUR[..3]).await;
    let (_leader, mut sink) = fixture.open(&members, PATIENT).await.unwrap();
    let (_, mut buckets) = buckets(&[70_000, 70_000]);
    buckets[1].2 ^= 1;
    send(&mut sink, &buckets[0]).await.unwrap();
    members[2].record().until(|seen| seen.buckets == [0]).await;
    let error = match send(&mut sink, &buckets[1]).await {
        Ok(()) => finish(sink).await.unwrap_err(),
        Err(error) => error,
    };
    assert!(matches!(error, TransportError::Corrupt { sequence: 1, .. }), "{error}");
    for member in &members {
        let (peer, cause) = member.record().broken().await;
        assert!(peer.is_some() && cause.contains("bucket 1 with a wrong digest"), "{cause}");
        let seen = member.record().seen.borrow().clone();
        assert!(seen.buckets == [0] && !seen.ended && seen.too_late == 0, "{} took it", member.name);
    }
}

async fn a_store_that_says_no_ends_the_stream(fixture: Fixture) {
    for (refuse, said) in [(Refuse::Write, "a part"), (Refuse::Complete, "a bucket"), (Refuse::End, "an end")] {
        let members = fixture.members(&[Refuse::Nothing, refuse, Refuse::Nothing]).await;
        let (_leader, mut sink) = fixture.open(&members, PATIENT).await.unwrap();
        let (_, buckets) = buckets(&[70_000]);
        let error = match send(&mut sink, &buckets[0]).await {
            Ok(()) => finish(sink).await.unwrap_err(),
            Err(error) => error,
        };
        let wanted = format!("no room for {said}");
        assert!(matches!(&error, TransportError::Refused { refusal, .. } if refusal.message == wanted), "{error}");
        assert_eq!(error.peer(), Some(&members[1].name));
        // A store that refused knows it already.
        assert_eq!(members[1].record().seen.borrow().broken, None);
        for other in [&members[0], &members[2]] {
            let seen = other.record().until(|seen| seen.ended || seen.broken.is_some()).await;
            assert!(seen.ended || seen.broken.unwrap().0 == Some(members[1].name.to_string()));
        }
    }
}

async fn a_stream_that_is_dropped_breaks_without_blame(fixture: Fixture) {
    let members = fixture.members(&FOUR[..3]).await;
    let (_leader, mut sink) = fixture.open(&members, PATIENT).await.unwrap();
    let (_, buckets) = buckets(&[3_000_000]);
    send(&mut sink, &buckets[0]).await.unwrap();
    drop(sink);
    for member in &members {
        let (peer, cause) = member.record().broken().await;
        assert_eq!((peer, cause.as_str()), (None, "the leader gave the stream up"));
    }
}

async fn a_waiting_leader_is_not_silent(fixture: Fixture) {
    let members = fixture.members(&FOUR[..3]).await;
    let (_leader, mut sink) = fixture.open(&members, SILENCE).await.unwrap();
    let (stream, buckets) = buckets(&[50_000, 50_000]);
    for bucket in &buckets {
        send(&mut sink, bucket).await.unwrap();
        let failed = timeout(Duration::from_millis(SILENCE * 5 / 2), sink.failed()).await;
        assert!(failed.is_err(), "{}", failed.unwrap());
    }
    finish(sink).await.unwrap();
    assert!(members.iter().all(|member| member.record().seen.borrow().bytes == stream));
}

async fn a_head_that_makes_no_sense_is_refused(fixture: Fixture) {
    let (_, good) = buckets(&[64]);
    let sound = good[0].0;
    let heads =
        [BucketHeader { flags: 2, ..sound }, BucketHeader { sequence: u32::MAX, ..sound }, BucketHeader { offset: u64::MAX - 3, ..sound }];
    for head in heads {
        let members = fixture.members(&FOUR[..2]).await;
        let (_leader, mut sink) = fixture.open(&members, PATIENT).await.unwrap();
        let error = match send(&mut sink, &(head, good[0].1.clone(), good[0].2)).await {
            Ok(()) => finish(sink).await.unwrap_err(),
            Err(error) => error,
        };
        assert!(matches!(&error, TransportError::Refused { refusal, .. } if refusal.message.contains("makes no sense")), "{error}");
        assert!(members.iter().all(|member| member.record().seen.borrow().buckets.is_empty()));
    }
}

async fn a_bucket_that_is_not_as_long_as_its_head_says_is_refused(fixture: Fixture) {
    let (_, good) = buckets(&[64]);
    for (bytes, wanted) in [(63, "longer"), (65, "shorter"), (0, "makes no sense")] {
        let members = fixture.members(&FOUR[..1]).await;
        let (_leader, mut sink) = fixture.open(&members, PATIENT).await.unwrap();
        let error = match send(&mut sink, &(BucketHeader { bytes, ..good[0].0 }, good[0].1.clone(), good[0].2)).await {
            Ok(()) => finish(sink).await.unwrap_err(),
            Err(error) => error,
        };
        assert!(matches!(&error, TransportError::Refused { refusal, .. } if refusal.message.contains(wanted)), "{error}");
    }
}

async fn an_error_stays(fixture: Fixture) {
    let members = fixture.members(&[Refuse::Write]).await;
    let (_leader, mut sink) = fixture.open(&members, PATIENT).await.unwrap();
    let (_, buckets) = buckets(&[64]);
    let _ = send(&mut sink, &buckets[0]).await;
    for _ in 0..2 {
        let error = timeout(LONG, sink.failed()).await.unwrap();
        assert_eq!(error.peer(), Some(&members[0].name));
    }
    assert!(send(&mut sink, &buckets[0]).await.is_err());
    assert!(finish(sink).await.is_err());
}

async fn hellos_name_the_sender_and_the_rest_of_the_chain(fixture: Fixture) {
    let members = fixture.members(&FOUR[..3]).await;
    let (_leader, sink) = fixture.open(&members, PATIENT).await.unwrap();
    finish(sink).await.unwrap();
    let mut from = "trainer/0".to_owned();
    for (number, member) in members.iter().enumerate() {
        let hellos = member.door.hellos.lock();
        assert_eq!((hellos.len(), hellos[0].from.to_string(), &hellos[0].to), (1, from, &member.name));
        assert_eq!(hellos[0].rest.len(), members.len() - 1 - number);
        from = member.name.to_string();
    }
}
