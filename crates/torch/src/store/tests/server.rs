use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::super::wire::{MAGIC, Request};
use super::super::{Client, PATIENCE, Server, StoreError, nccl_id_keys};
use super::bytes;

const AMPLE: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(50);

async fn server() -> Server {
    Server::bind(loopback(), |address| address == IpAddr::V4(Ipv4Addr::LOCALHOST), &CancellationToken::new()).await.unwrap()
}

fn loopback() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

async fn client(server: &Server) -> Client {
    Client::connect(server.address(), AMPLE).await.unwrap()
}

/// Whether the other side closed the connection without another byte.
async fn closed(mut socket: TcpStream) -> bool {
    let mut byte = [0];
    matches!(tokio::time::timeout(2 * PATIENCE, socket.read(&mut byte)).await, Ok(Ok(0) | Err(_)))
}

#[tokio::test]
async fn ranks_meet_and_find_the_id_of_their_group() {
    let server = server().await;
    let keys = nccl_id_keys("group-1");
    let mut ranks = Vec::new();
    for number in 1..=3 {
        let mut rank = client(&server).await;
        assert_eq!(rank.hello().await.unwrap(), number);
        ranks.push(rank);
    }
    server.wait_for_clients(3, AMPLE).await.unwrap();
    let waiting = ranks.iter_mut().map(|rank| rank.get(&keys[0], AMPLE));
    let publish = async {
        for key in &keys {
            server.set(key, &[5; 128]).unwrap();
        }
    };
    let (found, ()) = tokio::join!(futures::future::join_all(waiting), publish);
    assert!(found.into_iter().all(|id| id.unwrap() == [5; 128]));
    assert_eq!((server.readers(&keys[0]), server.readers(&keys[1])), (3, 0));
}

#[tokio::test]
async fn missing_rank_is_counted_and_not_waited_for() {
    let server = server().await;
    let mut rank = client(&server).await;
    rank.hello().await.unwrap();
    let error = server.wait_for_clients(2, SHORT).await.unwrap_err();
    assert!(matches!(error, StoreError::Missing { seen: 1, wanted: 2, .. }), "{error}");
    // F22: one that came and went again is as good as one that never came.
    drop(rank);
    let gone = async {
        while server.clients() > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(AMPLE, gone).await.unwrap();
    assert!(matches!(server.wait_for_clients(1, SHORT).await, Err(StoreError::Missing { seen: 0, .. })));
}

#[tokio::test]
async fn values_numbers_and_waits_go_over_the_wire() {
    let server = server().await;
    let (mut one, mut two) = (client(&server).await, client(&server).await);
    one.set("/k", b"v").await.unwrap();
    assert_eq!(two.get("/k", AMPLE).await.unwrap(), b"v");
    assert_eq!((one.add("/n", 2).await.unwrap(), two.add("/n", 3).await.unwrap()), (2, 5));
    assert_eq!(one.compare_set("/k", b"v", b"w").await.unwrap(), b"w");
    assert!(two.check(&["/k", "/n"]).await.unwrap() && !two.check(&["/none"]).await.unwrap());
    let late = two.wait("/late", SHORT).await.unwrap_err();
    assert!(matches!(late, StoreError::Silent { .. }), "{late}");
    // The wait was taken back, so the connection still answers what it is asked.
    let (waited, set) = tokio::join!(two.wait("/late", AMPLE), one.set("/late", b""));
    waited.unwrap();
    set.unwrap();
    assert_eq!(server.get("/k").as_deref(), Some(b"w".as_slice()));
    let large = vec![3; super::super::MAX_VALUE];
    one.set("/large", &large).await.unwrap();
    assert_eq!(one.get("/large", AMPLE).await.unwrap(), large);
    assert!(matches!(server.set("/large", &vec![0; large.len() + 1]), Err(StoreError::Refused { .. })));
}

#[tokio::test]
async fn a_stranger_hears_nothing() {
    let server = Server::bind(loopback(), |_| false, &CancellationToken::new()).await.unwrap();
    let mut stranger = TcpStream::connect(server.address()).await.unwrap();
    let _gone = stranger.write_all(&bytes(&Request::Validate(MAGIC))).await;
    assert!(closed(stranger).await);
}

#[tokio::test]
async fn port_is_bound_before_it_is_announced() {
    // F21: a port that was looked up, closed and used later is somebody else's by then.
    let server = server().await;
    let address = server.address();
    assert_ne!(address.port(), 0);
    let second = Server::bind(address, |_| true, &CancellationToken::new()).await.err().unwrap();
    assert!(second.to_string().contains(&address.to_string()), "{second}");
}

#[tokio::test]
async fn a_store_ends_with_its_epoch() {
    let epoch = CancellationToken::new();
    let server = Server::bind(loopback(), |_| true, &epoch).await.unwrap();
    let address = server.address();
    let mut rank = client(&server).await;
    rank.hello().await.unwrap();
    epoch.cancel();
    assert!(matches!(server.wait_for_clients(2, AMPLE).await, Err(StoreError::Closed)));
    assert!(rank.get("/id", AMPLE).await.is_err());
    server.close().await;
    assert!(matches!(Client::connect(address, SHORT).await, Err(StoreError::Unreachable { .. })));
}

#[tokio::test]
async fn a_store_that_is_dropped_closes_its_connections() {
    let server = server().await;
    let mut rank = client(&server).await;
    let address = server.address();
    drop(server);
    assert!(rank.wait("/id", AMPLE).await.is_err());
    // Its port is free for anyone who wants it.
    let bind = async {
        while Server::bind(address, |_| true, &CancellationToken::new()).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(AMPLE, bind).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn who_connects_and_says_nothing_is_sent_away() {
    let server = server().await;
    let silent = TcpStream::connect(server.address()).await.unwrap();
    assert!(closed(silent).await);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_never_finished_is_given_up() {
    let server = server().await;
    let mut half = TcpStream::connect(server.address()).await.unwrap();
    half.write_all(&bytes(&Request::Validate(MAGIC))).await.unwrap();
    half.write_all(&bytes(&Request::Set(b"/key", b"value"))[..12]).await.unwrap();
    assert!(closed(half).await);
    assert_eq!(server.get("/key"), None);
}

#[tokio::test]
async fn requests_in_one_piece_are_all_answered_in_their_order() {
    let server = server().await;
    let mut socket = TcpStream::connect(server.address()).await.unwrap();
    let mut sent = bytes(&Request::Validate(MAGIC));
    (0..1000_u32).for_each(|nonce| Request::Ping(nonce).write(&mut sent));
    socket.write_all(&sent).await.unwrap();
    let mut answered = vec![0; 4000];
    tokio::time::timeout(AMPLE, socket.read_exact(&mut answered)).await.unwrap().unwrap();
    assert!(answered.chunks(4).zip(0..).all(|(echo, nonce)| echo == u32::to_le_bytes(nonce)));
}

#[tokio::test]
async fn replies_that_are_not_taken_do_not_pile_up_in_the_server() {
    let server = server().await;
    let mut socket = TcpStream::connect(server.address()).await.unwrap();
    let value = vec![9; super::super::MAX_VALUE];
    let mut sent = bytes(&Request::Validate(MAGIC));
    Request::Set(b"/v", &value).write(&mut sent);
    (0..64).for_each(|_| Request::Get(b"/v").write(&mut sent));
    let (mut read, mut write) = socket.split();
    let mut answered = 0;
    let reading = async {
        let mut part = vec![0; 1 << 16];
        while answered < 64 * (value.len() + 8) {
            answered += read.read(&mut part).await.unwrap();
        }
    };
    let (written, ()) = tokio::time::timeout(AMPLE, async { tokio::join!(write.write_all(&sent), reading) }).await.unwrap();
    written.unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Whatever an admitted client sends, with a greeting or without: the server goes on for the others.
    #[test]
    fn hostile_bytes_harm_no_other(greets in any::<bool>(), hostile in proptest::collection::vec(any::<u8>(), 1..2000)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let server = server().await;
            let mut honest = client(&server).await;
            honest.hello().await.unwrap();
            let mut socket = TcpStream::connect(server.address()).await.unwrap();
            let mut sent = if greets { bytes(&Request::Validate(MAGIC)) } else { Vec::new() };
            sent.extend(&hostile);
            let _closed_already = socket.write_all(&sent).await;
            let _closed_already = socket.shutdown().await;
            let mut rest = Vec::new();
            let _reset = tokio::time::timeout(AMPLE, socket.read_to_end(&mut rest)).await.unwrap();
            honest.set("/honest", b"yes").await.unwrap();
            assert_eq!(honest.get("/honest", AMPLE).await.unwrap(), b"yes");
            assert!(server.clients() >= 1);
        });
    }
}
