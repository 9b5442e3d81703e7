use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::{Wire, closes};
use crate::tcp::TcpOptions;
use crate::tcp::frame::Frame;
use crate::tests::fixture::{Fixture, LONG, Member, PATIENT, Refuse, buckets, finish, hello, send};
use crate::{BucketSink, Transport};
use weightsync_core::protocol::{BucketHeader, StreamFailure};
use weightsync_core::weights::{BLOCK_BYTES, bucket_digest};

/// A path to a member on which each connection can be cut, or swallow all bytes. Ends with its runtime.
struct Path {
    address: String,
    cables: Arc<Mutex<Vec<Cable>>>,
    count: watch::Receiver<usize>,
}

struct Cable {
    task: AbortHandle,
    swallowing: watch::Sender<bool>,
}

impl Path {
    async fn to(member: &Member) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, to) = (listener.local_addr().unwrap().to_string(), member.address.clone());
        let cables = Arc::new(Mutex::new(Vec::new()));
        let (counted, count) = watch::channel(0);
        let known = cables.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let far = TcpStream::connect(&to).await.unwrap();
                let (swallowing, swallows) = watch::channel(false);
                let task = tokio::spawn(carry(near, far, swallows)).abort_handle();
                known.lock().push(Cable { task, swallowing });
                counted.send_modify(|count| *count += 1);
            }
        });
        Self { address, cables, count }
    }

    fn connections(&self) -> usize {
        *self.count.borrow()
    }

    fn cut(&self, connection: usize) {
        self.cables.lock()[connection].task.abort();
    }

    fn swallow(&self, connection: usize) {
        self.cables.lock()[connection].swallowing.send_replace(true);
    }
}

async fn carry(mut near: TcpStream, mut far: TcpStream, mut swallows: watch::Receiver<bool>) {
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => return,
        // The sender is dropped with the test when this fails.
        reported = async { swallows.wait_for(|swallows| *swallows).await.is_ok() } => if !reported { return },
    }
    let _ = tokio::io::copy(&mut near, &mut tokio::io::sink()).await;
    // Both connections stay open until the test ends.
    std::future::pending::<()>().await;
}

fn fixture(lanes: usize) -> Fixture {
    Fixture::over(TcpOptions { receive_buffer: 64 << 10, receive_buffers: 6, lanes, ..TcpOptions::default() })
}

/// A chain over `members` whose first hop leads through the path.
async fn open(leader_lanes: usize, members: &[Member], path: &Path, silence: u64) -> (Box<dyn Transport>, Box<dyn BucketSink>) {
    let leader = fixture(leader_lanes).transport(crate::tests::fixture::Door::new("trainer/0", Refuse::Admission)).await.0;
    let sink = timeout(LONG, leader.open(hello(members, silence), &path.address)).await.unwrap().unwrap();
    (leader, sink)
}

#[tokio::test]
async fn a_hop_uses_as_many_connections_as_both_ends_like() {
    for (leader, member, used) in [(1, 1, 1), (1, 4, 1), (4, 1, 1), (4, 2, 2), (2, 4, 2), (3, 3, 3)] {
        let members = fixture(member).members(&[Refuse::Nothing]).await;
        let path = Path::to(&members[0]).await;
        let (_leader, mut sink) = open(leader, &members, &path, PATIENT).await;
        assert_eq!(path.connections(), used, "{leader} and {member}");
        let (stream, buckets) = buckets(&[5, 2 * BLOCK_BYTES + 9, BLOCK_BYTES, 4 * BLOCK_BYTES]);
        for bucket in &buckets {
            send(&mut sink, bucket).await.unwrap();
        }
        finish(sink).await.unwrap();
        let seen = members[0].record().seen.borrow().clone();
        assert!(seen.ended && seen.bytes == stream && seen.buckets == [0, 1, 2, 3], "{leader} and {member}");
    }
}

#[tokio::test]
async fn hops_of_one_chain_may_differ_in_their_connections() {
    let mut members = Vec::new();
    for (number, lanes) in [3, 1, 4, 2].into_iter().enumerate() {
        members.push(fixture(lanes).member(&format!("actors/{number}"), Refuse::Nothing).await);
    }
    let (_leader, mut sink) = fixture(4).open(&members, PATIENT).await.unwrap();
    let (stream, buckets) = buckets(&[3 * BLOCK_BYTES + 1, 7, 2 * BLOCK_BYTES]);
    for bucket in &buckets {
        send(&mut sink, bucket).await.unwrap();
    }
    finish(sink).await.unwrap();
    assert!(members.iter().all(|member| member.record().seen.borrow().bytes == stream));
}

#[tokio::test]
async fn one_broken_connection_ends_the_stream_naming_both_ends() {
    for broken in 0..3 {
        let members = fixture(3).members(&[Refuse::Nothing; 2]).await;
        let path = Path::to(&members[0]).await;
        let (_leader, mut sink) = open(3, &members, &path, PATIENT).await;
        let (_, buckets) = buckets(&[BLOCK_BYTES + 1]);
        send(&mut sink, &buckets[0]).await.unwrap();
        path.cut(broken);
        let error = timeout(Duration::from_secs(5), sink.failed()).await.expect("no one noticed");
        assert_eq!(error.peer(), Some(&members[0].name), "connection {broken}: {error}");
        let (said, first) = (error.to_string(), &members[0].name);
        assert!(said.contains("lost in the middle: its connection with trainer/0 ended: "), "connection {broken}: {said}");
        for member in &members {
            let (peer, cause) = member.record().broken().await;
            assert_eq!(peer.as_deref(), Some("trainer/0"), "connection {broken}: {cause}");
            assert!(cause.contains(&format!("its connection with {first} ended: ")), "connection {broken}: {cause}");
        }
    }
}

#[tokio::test]
async fn one_connection_that_swallows_bytes_ends_the_stream() {
    let members = fixture(2).members(&[Refuse::Nothing]).await;
    let path = Path::to(&members[0]).await;
    let (_leader, mut sink) = open(2, &members, &path, 1600).await;
    path.swallow(1);
    let (_, buckets) = buckets(&[2 * BLOCK_BYTES]);
    let error = match send(&mut sink, &buckets[0]).await {
        Ok(()) => timeout(LONG, sink.failed()).await.expect("no one noticed"),
        Err(error) => error,
    };
    assert_eq!(error.peer(), Some(&members[0].name), "{error}");
    let (peer, cause) = members[0].record().broken().await;
    assert!(peer.as_deref() == Some("trainer/0") && cause.contains("connection 1: no byte for 1.6s"), "{peer:?}: {cause}");
}

#[tokio::test]
async fn a_leader_whose_connections_do_not_come_is_named() {
    let members = fixture(3).members(&[Refuse::Nothing]).await;
    let mut wire = Wire::open_with(3, &members[0].address, &hello(&members, 400)).await;
    assert_eq!(wire.answer().await, Some(Ok("lanes")));
    assert_eq!(wire.agreed.unwrap().0, 3);
    let record = members[0].record();
    let mut broken = std::pin::pin!(record.broken());
    let mut lives = tokio::time::interval(Duration::from_millis(50));
    let (peer, cause) = loop {
        tokio::select! {
            broken = &mut broken => break broken,
            _ = lives.tick() => wire.frame(Frame::Alive).await,
        }
    };
    assert!(peer.as_deref() == Some("trainer/0") && cause.contains("it opened 1 of 3 connections within 400ms"), "{cause}");
    assert_eq!(wire.answer().await, None);
}

async fn lane(address: &str, id: &[u8], number: u32) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&[b"WSL1".as_slice(), id, &number.to_le_bytes()].concat()).await.unwrap();
    stream
}

#[tokio::test]
async fn connection_of_an_unknown_stream_is_closed_alone() {
    let members = fixture(2).members(&[Refuse::Nothing]).await;
    let address = members[0].address.clone();
    let mut wire = Wire::open_with(2, &address, &hello(&members, PATIENT)).await;
    assert_eq!(wire.answer().await, Some(Ok("lanes")));
    let (_, id) = wire.agreed.unwrap();
    let mut other = id;
    other[15] ^= 1;
    for (id, number) in [(other, 1), ([0; 16], 1), (id, 0), (id, 2), (id, u32::MAX)] {
        assert!(closes(&mut lane(&address, &id, number).await, Duration::from_secs(4)).await, "{id:?}, {number}");
    }
    // The right one, which then has the second block.
    let mut right = lane(&address, &id, 1).await;
    assert_eq!(wire.answer().await, Some(Ok("admitted")));
    assert!(closes(&mut lane(&address, &id, 1).await, Duration::from_secs(4)).await, "a second one came in");
    let bytes = vec![7; BLOCK_BYTES + 100];
    wire.frame(Frame::Head(BucketHeader { sequence: 0, flags: 0, offset: 0, bytes: bytes.len() as u64 })).await;
    wire.frame(Frame::Part(&bytes[..BLOCK_BYTES])).await;
    wire.frame(Frame::Cut).await;
    let mut rest = Vec::new();
    Frame::Part(&bytes[BLOCK_BYTES..]).put(&mut rest);
    Frame::Cut.put(&mut rest);
    right.write_all(&rest).await.unwrap();
    wire.frame(Frame::Digest(bucket_digest(&bytes))).await;
    wire.frame(Frame::End).await;
    assert_eq!(wire.answer().await, Some(Ok("done")));
    assert!(members[0].record().seen.borrow().bytes == bytes);
}

#[tokio::test]
async fn a_wrong_byte_on_any_connection_is_found() {
    for wrong in [0, BLOCK_BYTES + 5] {
        let members = fixture(2).members(&[Refuse::Nothing]).await;
        let (_leader, mut sink) = fixture(2).open(&members, PATIENT).await.unwrap();
        let (_, mut buckets) = buckets(&[2 * BLOCK_BYTES]);
        let mut bytes = buckets[0].1.to_vec();
        bytes[wrong] ^= 1;
        buckets[0].1 = bytes.into();
        send(&mut sink, &buckets[0]).await.unwrap();
        let error = finish(sink).await.unwrap_err();
        assert!(error.to_string().contains("wrong digest"), "{error}");
        assert!(members[0].record().seen.borrow().buckets.is_empty());
    }
}

#[tokio::test]
async fn bytes_that_belong_to_no_block_are_refused() {
    let members = fixture(2).members(&[Refuse::Nothing]).await;
    let mut wire = Wire::open_with(2, &members[0].address, &hello(&members, PATIENT)).await;
    assert_eq!(wire.answer().await, Some(Ok("lanes")));
    let _other = lane(&members[0].address, &wire.agreed.unwrap().1, 1).await;
    assert_eq!(wire.answer().await, Some(Ok("admitted")));
    wire.frame(Frame::Head(BucketHeader { sequence: 0, flags: 0, offset: 0, bytes: 9 })).await;
    wire.frame(Frame::Part(&[7; 9])).await;
    wire.frame(Frame::Digest(bucket_digest(&[]))).await;
    let Some(Err(StreamFailure::Refused { refusal, .. })) = wire.answer().await else { panic!("not refused") };
    assert!(refusal.message.contains("before the end of a block"), "{}", refusal.message);
    assert!(members[0].record().seen.borrow().buckets.is_empty());
}

#[tokio::test]
async fn bytes_before_the_stream_is_admitted_are_refused() {
    let members = fixture(2).members(&[Refuse::Nothing]).await;
    let mut wire = Wire::open_with(2, &members[0].address, &hello(&members, PATIENT)).await;
    assert_eq!(wire.answer().await, Some(Ok("lanes")));
    wire.frame(Frame::Head(BucketHeader { sequence: 0, flags: 0, offset: 0, bytes: 1 })).await;
    let Some(Err(StreamFailure::Refused { refusal, .. })) = wire.answer().await else { panic!("not refused") };
    assert!(refusal.message.contains("before it was admitted"), "{}", refusal.message);
    // Its name is not valid any more.
    let mut late = lane(&members[0].address, &wire.agreed.unwrap().1, 1).await;
    assert!(closes(&mut late, Duration::from_secs(4)).await);
    let mut rest = Vec::new();
    let _ = timeout(LONG, wire.stream.read_to_end(&mut rest)).await.unwrap();
}
