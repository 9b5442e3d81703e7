//! Real servers and clients on the loopback: which peers are admitted, and the kind of each failure.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::identity::{Ca, Identity, PeerIdentity};
use weightsync_core::protocol::{Call, Method, Refusal, RefusalCode, Rejection, Role};

const HOUR: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_secs(5);

#[derive(Debug, Serialize, Deserialize, PartialEq)]
struct Number {
    number: u64,
}

macro_rules! call {
    ($name:ident: $method:ident $path:literal => $answer:ty) => {
        #[derive(Serialize)]
        struct $name(Value);

        impl Call for $name {
            const METHOD: Method = Method::$method;
            const PATH: &'static str = $path;
            type Answer = $answer;
        }
    };
}

call!(Double: Post "/double" => Number);
call!(Empty: Post "/empty" => ());
call!(Refuse: Post "/refuse" => Number);
call!(Reject: Post "/reject" => Number);
call!(Never: Post "/never" => Number);
call!(Unknown: Post "/unknown" => Number);
call!(Who: Get "/who" => String);
call!(Large: Get "/large" => String);

fn agent(weightsync: &str, pod_uid: &str) -> PeerIdentity {
    PeerIdentity::Agent { weightsync: weightsync.into(), pod_uid: pod_uid.into(), role: Role::Rollout }
}

struct Server {
    address: String,
    cancel: CancellationToken,
    task: JoinHandle<()>,
}

async fn serve(identity: Identity, access: Access, limits: Limits) -> Server {
    let router = Router::new()
        .route("/double", post(|Valid(Number { number }): Valid<Number>| async move { Json(Number { number: number * 2 }) }))
        .route("/who", get(|peer: PeerIdentity| async move { Json(peer.uri()) }))
        .route("/refuse", post(|| async { Failed(Refusal { code: RefusalCode::WrongPhase, message: "not now".into() }) }))
        .route("/reject", post(|| async { Failed(Rejection { message: "a standby".into(), retryable: true }) }))
        .route("/never", post(std::future::pending::<()>))
        .route("/empty", post(|| async {}))
        .route("/long", get(|| async { ndjson(futures::stream::iter(["x".repeat(300 << 10)])) }))
        .route("/large", get(|| async { Json("x".repeat(1200 << 10)) }))
        .route("/three", get(|| async { ndjson(futures::stream::iter([1u64, 2, 3])) }))
        .route("/once", get(|| async { ndjson(futures::stream::once(async { 1u64 }).chain(futures::stream::pending())) }));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let cancel = CancellationToken::new();
    let stop = cancel.clone();
    let task = tokio::spawn(async move { serve_https(listener, identity, access, router, limits, stop).await.unwrap() });
    Server { address, cancel, task }
}

async fn pod_server(ca: &Ca) -> Server {
    serve(ca.issue(&agent("ws", "pod"), HOUR).unwrap(), Access::Group, Limits::default()).await
}

fn client(ca: &Ca, who: &PeerIdentity) -> AgentClient {
    AgentClient::new(ca.issue(who, HOUR).unwrap())
}

async fn double(client: &AgentClient, server: &Server) -> Result<Number, CallError> {
    client.ask(&server.address, "pod", &Double(json!({"number": 21})), SOON).await
}

#[tokio::test]
async fn controller_and_agents_of_one_object_are_served() {
    let ca = Ca::generate().unwrap();
    let server = pod_server(&ca).await;
    for who in [PeerIdentity::Controller, agent("ws", "other")] {
        let client = client(&ca, &who);
        assert_eq!(double(&client, &server).await.unwrap(), Number { number: 42 });
        assert_eq!(client.ask(&server.address, "pod", &Who(json!({})), SOON).await.unwrap(), who.uri());
        client.ask(&server.address, "pod", &Empty(json!(null)), SOON).await.unwrap();
    }
}

#[tokio::test]
async fn an_agent_of_another_object_is_refused() {
    let ca = Ca::generate().unwrap();
    let server = pod_server(&ca).await;
    let refused = double(&client(&ca, &agent("foreign", "other")), &server).await;
    assert!(matches!(refused, Err(CallError::Refused { refusal: Refusal { code: RefusalCode::Forbidden, .. }, .. })), "{refused:?}");
}

#[tokio::test]
async fn peer_without_a_valid_certificate_gets_nothing() {
    let (ca, foreign) = (Ca::generate().unwrap(), Ca::generate().unwrap());
    let server = pod_server(&ca).await;
    let none = AgentClient::new(Identity::new(ca.certificate_pem()).unwrap());
    assert!(matches!(double(&none, &server).await, Err(CallError::Unreachable { .. })));
    let stranger = client(&foreign, &PeerIdentity::Controller);
    let untrusted = double(&stranger, &server).await.unwrap_err().to_string();
    assert!(untrusted.contains("cannot be reached: invalid peer certificate: "), "{untrusted}");
}

#[tokio::test]
async fn expired_or_foreign_certificate_is_refused_by_both_sides() {
    let (ca, foreign) = (Ca::generate().unwrap(), Ca::generate().unwrap());
    for access in [Access::Group, Access::Open] {
        let server = serve(ca.issue(&agent("ws", "pod"), HOUR).unwrap(), access, Limits::default()).await;
        for who in [PeerIdentity::Controller, agent("ws", "other")] {
            for shown in [ca.issue_ended(&who).unwrap(), foreign.issue_trusting(&ca, &who).unwrap()] {
                let answer = double(&AgentClient::new(shown), &server).await;
                assert!(matches!(answer, Err(CallError::Unreachable { .. })), "{access:?} {who:?}: {answer:?}");
            }
        }
        double(&client(&ca, &PeerIdentity::Controller), &server).await.unwrap();
    }
    let server = serve(ca.issue_ended(&agent("ws", "pod")).unwrap(), Access::Group, Limits::default()).await;
    let answer = double(&client(&ca, &PeerIdentity::Controller), &server).await;
    assert!(matches!(answer, Err(CallError::Unreachable { .. })), "{answer:?}");
}

#[tokio::test]
async fn peer_with_expired_certificate_is_served_on_open_ports() {
    let ca = Ca::generate().unwrap();
    let identity = Identity::new(ca.certificate_pem()).unwrap();
    let second = Duration::from_secs(1);
    identity.install(&ca.sign(&identity.csr_pem().unwrap(), &agent("ws", "pod"), second).unwrap()).unwrap();
    let ended = async {
        while identity.is_certified() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, ended).await.expect("a certificate of one second ends");
    let enrolment = serve(ca.issue(&PeerIdentity::Controller, HOUR).unwrap(), Access::Open, Limits::default()).await;
    let asking = ControllerClient::new(identity.clone(), enrolment.address.clone());
    assert_eq!(asking.ask(&Double(json!({"number": 4})), SOON).await.unwrap(), Number { number: 8 });
    let members = pod_server(&ca).await;
    assert!(matches!(double(&AgentClient::new(identity), &members).await, Err(CallError::Unreachable { .. })));
}

#[tokio::test]
async fn successor_at_one_address_is_not_its_predecessor() {
    let ca = Ca::generate().unwrap();
    let server = serve(ca.issue(&agent("ws", "successor"), HOUR).unwrap(), Access::Group, Limits::default()).await;
    let answer = double(&client(&ca, &PeerIdentity::Controller), &server).await;
    assert!(matches!(answer, Err(CallError::Unreachable { .. })), "{answer:?}");
}

#[tokio::test]
async fn renewed_certificate_is_used_by_running_servers_and_clients() {
    let ca = Ca::generate().unwrap();
    let identity = ca.issue(&agent("ws", "pod"), HOUR).unwrap();
    let server = serve(identity.clone(), Access::Group, Limits::default()).await;
    let own = ca.issue(&agent("ws", "peer"), HOUR).unwrap();
    let peer = AgentClient::new(own.clone());
    double(&peer, &server).await.unwrap();
    let renew = |identity: &Identity, who: PeerIdentity| {
        identity.install(&ca.sign(&identity.csr_pem().unwrap(), &who, HOUR).unwrap()).unwrap();
    };
    renew(&identity, agent("ws-2", "pod"));
    assert!(matches!(double(&peer, &server).await, Err(CallError::Refused { .. })), "the server is of another object now");
    renew(&own, agent("ws-2", "peer"));
    double(&peer, &server).await.unwrap();
}

#[tokio::test]
async fn open_server_serves_peers_without_certificate_anonymously() {
    let ca = Ca::generate().unwrap();
    let server = serve(ca.issue(&PeerIdentity::Controller, HOUR).unwrap(), Access::Open, Limits::default()).await;
    let anybody = ControllerClient::new(Identity::new(ca.certificate_pem()).unwrap(), server.address.clone());
    assert_eq!(anybody.ask(&Double(json!({"number": 4})), SOON).await.unwrap(), Number { number: 8 });
    let rejected = anybody.ask(&Reject(json!(null)), SOON).await;
    assert!(matches!(rejected, Err(CallError::Rejected { rejection: Rejection { retryable: true, .. }, .. })), "{rejected:?}");
    let no_one = AgentClient::new(Identity::new(ca.certificate_pem()).unwrap());
    assert!(no_one.ask(&server.address, "pod", &Who(json!({})), SOON).await.is_err());
}

#[tokio::test]
async fn each_failure_has_its_own_name() {
    let ca = Ca::generate().unwrap();
    let server = pod_server(&ca).await;
    let client = client(&ca, &PeerIdentity::Controller);
    let refused = client.ask(&server.address, "pod", &Refuse(json!(null)), SOON).await;
    assert!(matches!(refused, Err(CallError::Refused { refusal: Refusal { code: RefusalCode::WrongPhase, .. }, .. })), "{refused:?}");
    let invalid = client.ask(&server.address, "pod", &Double(json!("text")), SOON).await;
    assert!(matches!(invalid, Err(CallError::Refused { refusal: Refusal { code: RefusalCode::Invalid, .. }, .. })), "{invalid:?}");
    let unknown = client.ask(&server.address, "pod", &Unknown(json!(null)), SOON).await;
    assert!(matches!(unknown, Err(CallError::BadReply { .. })), "{unknown:?}");
    let late = client.ask(&server.address, "pod", &Never(json!(null)), Duration::from_millis(50)).await;
    assert!(matches!(late, Err(CallError::Timeout { .. })), "{late:?}");
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
    let no_one = client.ask(&closed, "pod", &Double(json!(null)), SOON).await.unwrap_err();
    // The cause alone, without the steps above it and the URL.
    assert_eq!(no_one.to_string(), format!("{closed} cannot be reached: Connection refused (os error 111)"));
}

#[tokio::test]
async fn a_stream_tells_its_end_from_silence() {
    let ca = Ca::generate().unwrap();
    let server = pod_server(&ca).await;
    let client = client(&ca, &PeerIdentity::Controller);
    let silence = Duration::from_millis(200);
    let mut three = client.events::<u64>(&server.address, "pod", "/three", SOON, silence).await.unwrap();
    for expected in [1, 2, 3] {
        assert_eq!(three.next().await, Ok(expected));
    }
    assert!(matches!(three.next().await, Err(StreamEnd::Closed(_))));
    let mut once = client.events::<u64>(&server.address, "pod", "/once", SOON, silence).await.unwrap();
    assert_eq!(once.next().await, Ok(1));
    assert_eq!(once.next().await, Err(StreamEnd::Silent(silence)));
    let mut words = client.events::<String>(&server.address, "pod", "/three", SOON, silence).await.unwrap();
    assert!(matches!(words.next().await, Err(StreamEnd::BadLine(_))));
    let mut cut = client.events::<u64>(&server.address, "pod", "/once", SOON, HOUR).await.unwrap();
    assert_eq!(cut.next().await, Ok(1));
    server.cancel.cancel();
    let end = tokio::time::timeout(SOON, cut.next()).await.expect("a stopped server cuts its streams");
    assert!(matches!(end, Err(StreamEnd::Closed(_))), "{end:?}");
    tokio::time::timeout(SOON, server.task).await.expect("the server ends").unwrap();
}

#[tokio::test]
async fn event_or_answer_beyond_its_limit_is_not_taken() {
    let ca = Ca::generate().unwrap();
    let server = pod_server(&ca).await;
    let client = client(&ca, &PeerIdentity::Controller);
    let mut stream = client.events::<String>(&server.address, "pod", "/long", SOON, SOON).await.unwrap();
    let line = stream.next().await;
    assert!(matches!(line, Err(StreamEnd::BadLine(_))), "{:?}", line.map(|line| line.len()));
    let answer = client.ask(&server.address, "pod", &Large(json!({})), SOON).await;
    assert!(matches!(answer, Err(CallError::BadReply { .. })), "{:?}", answer.map(|answer| answer.len()));
}

#[tokio::test]
async fn peers_that_say_nothing_are_cut_and_free_their_place() {
    let ca = Ca::generate().unwrap();
    let limits = Limits { handshake: Duration::from_millis(100), connections: 1, ..Limits::default() };
    let server = serve(ca.issue(&agent("ws", "pod"), HOUR).unwrap(), Access::Group, limits).await;
    let address: SocketAddr = server.address.parse().unwrap();
    let mut mute = TcpStream::connect(address).await.unwrap();
    let client = client(&ca, &PeerIdentity::Controller);
    assert_eq!(double(&client, &server).await.unwrap(), Number { number: 42 });
    let mut rest = Vec::new();
    tokio::time::timeout(SOON, mute.read_to_end(&mut rest)).await.expect("the mute peer is cut").ok();
}

#[tokio::test]
async fn a_body_or_head_beyond_the_limit_is_refused() {
    let ca = Ca::generate().unwrap();
    let limits = Limits { body_bytes: 64, ..Limits::default() };
    let server = serve(ca.issue(&agent("ws", "pod"), HOUR).unwrap(), Access::Group, limits.clone()).await;
    let client = client(&ca, &PeerIdentity::Controller);
    let long = client.ask(&server.address, "pod", &Double(json!("x".repeat(1000))), SOON).await;
    assert!(matches!(long, Err(CallError::Refused { .. })), "{long:?}");

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let cancel = CancellationToken::new();
    let plain = tokio::spawn(serve_plain(listener, Router::new(), limits, cancel.clone()));
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(32 << 10)).as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(SOON, stream.read_to_end(&mut answer)).await.expect("the connection is ended").ok();
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&answer));
    cancel.cancel();
    tokio::time::timeout(SOON, plain).await.expect("the server ends").unwrap();
}

/// Any number of silent connections from an address of this host.
async fn strangers(from: [u8; 4], to: SocketAddr, count: usize) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    for _ in 0..count {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        streams.push(socket.connect(to).await.unwrap());
    }
    streams
}

/// How many of them the server has not closed.
async fn open(streams: &[TcpStream]) -> usize {
    let mut open = 0;
    for stream in streams {
        let mut byte = [0; 1];
        let closed = tokio::time::timeout(Duration::ZERO, stream.peek(&mut byte)).await;
        open += usize::from(closed.is_err());
    }
    open
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_is_answered_while_strangers_fill_the_listener() {
    let ca = Ca::generate().unwrap();
    let limits = Limits { connections: 64, per_address: 32, strangers: 48, first: HOUR, handshake: HOUR, ..Limits::default() };
    let server = serve(ca.issue(&agent("ws", "pod"), HOUR).unwrap(), Access::Group, limits).await;
    let address: SocketAddr = server.address.parse().unwrap();
    let mut held = Vec::new();
    // A client of its own each time: with its handshake.
    let asked = async || {
        let begun = Instant::now();
        let answer = double(&client(&ca, &PeerIdentity::Controller), &server).await;
        assert_eq!(answer.unwrap(), Number { number: 42 });
        begun.elapsed()
    };
    let alone = asked().await;
    for from in [[127, 0, 0, 1], [127, 0, 0, 2], [127, 0, 0, 3], [127, 0, 0, 4]] {
        held.extend(strangers(from, address, 250).await);
        let took = asked().await;
        assert!(took < Duration::from_secs(1) + 20 * alone, "strangers held it up: {took:?}, and {alone:?} without them");
    }
    let open = open(&held).await;
    assert!(open <= 64, "{open} connections are open");
}

#[tokio::test]
async fn peer_that_asks_nothing_is_cut_after_the_first_wait() {
    let ca = Ca::generate().unwrap();
    let limits = Limits { first: Duration::from_millis(50), handshake: HOUR, head: HOUR, ..Limits::default() };
    let server = serve(ca.issue(&agent("ws", "pod"), HOUR).unwrap(), Access::Open, limits.clone()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let plain = listener.local_addr().unwrap();
    let cancel = CancellationToken::new();
    let serving = tokio::spawn(serve_plain(listener, Router::new(), limits, cancel.clone()));
    for address in [server.address.parse().unwrap(), plain] {
        let mut mute = TcpStream::connect(address).await.unwrap();
        let mut rest = Vec::new();
        tokio::time::timeout(SOON, mute.read_to_end(&mut rest)).await.expect("the mute peer is cut").ok();
    }
    let mut slow = TcpStream::connect(plain).await.unwrap();
    slow.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    tokio::time::timeout(SOON, slow.read_to_end(&mut Vec::new())).await.expect("half a head is none").ok();
    cancel.cancel();
    serving.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn enrolment_is_served_among_many_strangers_with_long_bodies() {
    let ca = Ca::generate().unwrap();
    let server = serve(ca.issue(&PeerIdentity::Controller, HOUR).unwrap(), Access::Open, Limits::enrollment()).await;
    let address: SocketAddr = server.address.parse().unwrap();
    let long = ControllerClient::new(Identity::new(ca.certificate_pem()).unwrap(), server.address.clone())
        .ask(&Double(json!("x".repeat(ENROLLMENT_BODY))), SOON)
        .await;
    assert!(matches!(long, Err(CallError::Refused { .. })), "{long:?}");
    let mut held = Vec::new();
    for last in 1..=8 {
        held.extend(strangers([127, 0, 1, last], address, 250).await);
    }
    let honest = ControllerClient::new(Identity::new(ca.certificate_pem()).unwrap(), server.address.clone());
    let answer = honest.ask(&Double(json!({"number": 4})), Duration::from_secs(1)).await.unwrap();
    assert_eq!(answer, Number { number: 8 });
    let open = open(&held).await;
    assert!(open <= ENROLLMENT_STRANGERS, "{open} connections are open");
}
