//! Real listeners on the loopback, and strangers that hold them.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{Pages, WATCHERS_OF_ONE};
use weightsync_core::protocol::{Role, RosterView};
use weightsync_net::https::{Limits, serve_plain};

const SOON: Duration = Duration::from_secs(20);

struct Listening {
    status: SocketAddr,
    probes: SocketAddr,
    _end: tokio_util::sync::DropGuard,
    _roster: watch::Sender<RosterView>,
}

async fn listening() -> Listening {
    let roster = watch::Sender::new(RosterView { epoch: None, version: None, replicas: Vec::new() });
    let pages = Pages::new(Role::Source, roster.subscribe(), None);
    let (status, probes) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let cancel = CancellationToken::new();
    let listening = Listening {
        status: status.local_addr().unwrap(),
        probes: probes.local_addr().unwrap(),
        _end: cancel.clone().drop_guard(),
        _roster: roster,
    };
    tokio::spawn(serve_plain(status, pages.router(), Limits::pages(), cancel.clone()));
    tokio::spawn(serve_plain(probes, pages.probes(), Limits::probes(), cancel));
    listening
}

async fn connect(last: u8, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, last], 0).into()).unwrap();
    socket.connect(to).await.unwrap()
}

async fn ask(stream: &mut TcpStream, path: &str) -> String {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: pod\r\n\r\n").as_bytes()).await.unwrap();
    let mut head = vec![0; 64];
    let length = timeout(SOON, stream.read(&mut head)).await.expect("an answer").unwrap();
    String::from_utf8_lossy(&head[..length]).into_owned()
}

/// What both probes of a server take.
async fn probed(to: SocketAddr) -> Duration {
    let begun = Instant::now();
    for path in ["/readyz", "/healthz"] {
        let answer = ask(&mut connect(1, to).await, path).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }
    begun.elapsed()
}

/// The same of a server that does nothing but answer, in a runtime of its own.
async fn probed_plainly() -> Duration {
    let plain = async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 1024]).await;
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
            }
        });
        probed(to).await
    };
    let alone = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(plain);
    tokio::task::spawn_blocking(alone).await.unwrap()
}

/// A kubelet waits for a second. On a machine so busy that no server answers that soon, the probes are as fast as any.
async fn assert_probed_in_time(listening: &Listening) {
    let (took, plain) = (probed(listening.probes).await, probed_plainly().await);
    assert!(took < Duration::from_secs(1) + 20 * plain, "{took:?}, and {plain:?} from a plain server");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_are_answered_under_two_thousand_hostile_watchers() {
    let listening = listening().await;
    let mut held = Vec::new();
    for number in 0..2000_u32 {
        let mut stream = connect(u8::try_from(2 + number % 100).unwrap(), listening.status).await;
        // Some of them are closed by then.
        if number % 2 == 0 {
            let _ = stream.write_all(b"GET /v1/roster?watch=true HTTP/1.1\r\nHost: pod\r\n\r\n").await;
        }
        held.push(stream);
    }
    assert_probed_in_time(&listening).await;
    let answer = ask(&mut connect(1, listening.status).await, "/readyz").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "the pages are there as well: {answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_are_answered_while_strangers_hold_their_own_port() {
    let listening = listening().await;
    let mut held = Vec::new();
    for number in 0..500_u32 {
        held.push(connect(u8::try_from(2 + number % 100).unwrap(), listening.probes).await);
    }
    assert_probed_in_time(&listening).await;
}

#[tokio::test]
async fn one_address_watches_the_roster_a_few_times_only() {
    let listening = listening().await;
    let mut watching = Vec::new();
    for _ in 0..WATCHERS_OF_ONE {
        let mut stream = connect(1, listening.status).await;
        assert!(ask(&mut stream, "/v1/roster?watch=true").await.starts_with("HTTP/1.1 200"));
        watching.push(stream);
    }
    let refused = ask(&mut connect(1, listening.status).await, "/v1/roster?watch=true").await;
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    let other = ask(&mut connect(2, listening.status).await, "/v1/roster?watch=true").await;
    assert!(other.starts_with("HTTP/1.1 200"), "{other}");
    let once = ask(&mut connect(1, listening.status).await, "/v1/roster").await;
    assert!(once.starts_with("HTTP/1.1 200"), "{once}");
}
