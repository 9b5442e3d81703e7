//! The lease against an API server in memory that can fail, hang, and forget to answer. Time is paused: waits take no time.

use std::convert::Infallible;
use std::sync::Arc;

use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::*;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    Works,
    /// 500 for every call.
    Fails,
    /// No call is answered.
    Hangs,
    /// Calls are carried out, but not answered.
    LosesAnswers,
}

struct Server {
    lease: Option<Value>,
    version: u64,
    mode: Mode,
}

#[derive(Clone)]
struct ApiServer(Arc<Mutex<Server>>);

impl ApiServer {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Server { lease: None, version: 0, mode: Mode::Works })))
    }

    fn set(&self, mode: Mode) {
        self.0.lock().mode = mode;
    }

    fn lease(&self) -> Value {
        self.0.lock().lease.clone().unwrap()
    }

    fn api(&self) -> Api<Lease> {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| server.clone().answer(request));
        Api::namespaced(Client::new(service, "system"), "system")
    }

    async fn answer(self, request: Request<Body>) -> Result<Response<Body>, Infallible> {
        let method = request.method().clone();
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let body: Option<Value> = serde_json::from_slice(&body).ok();
        let mode = self.0.lock().mode;
        if mode == Mode::Hangs {
            return std::future::pending().await;
        }
        let (status, answer) = if mode == Mode::Fails { (500, failure(500)) } else { self.0.lock().serve(&method, body) };
        if mode == Mode::LosesAnswers {
            return std::future::pending().await;
        }
        let answer = serde_json::to_vec(&answer).unwrap();
        Ok(Response::builder().status(StatusCode::from_u16(status).unwrap()).body(Body::from(answer)).unwrap())
    }
}

fn failure(code: u16) -> Value {
    let reason = match code {
        404 => "NotFound",
        409 => "Conflict",
        _ => "InternalError",
    };
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": reason, "reason": reason, "code": code})
}

impl Server {
    fn serve(&mut self, method: &Method, body: Option<Value>) -> (u16, Value) {
        let found = self.lease.clone();
        match (method.as_str(), body, found) {
            ("GET", _, Some(lease)) => (200, lease),
            ("POST", Some(lease), None) => (201, self.store(lease)),
            ("PUT", Some(lease), Some(found)) => {
                let version = &lease["metadata"]["resourceVersion"];
                assert!(version.is_string(), "every write carries what was read: {lease}");
                if *version == found["metadata"]["resourceVersion"] { (200, self.store(lease)) } else { (409, failure(409)) }
            }
            ("POST", _, Some(_)) => (409, failure(409)),
            _ => (404, failure(404)),
        }
    }

    fn store(&mut self, mut lease: Value) -> Value {
        self.version += 1;
        lease["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.lease = Some(lease.clone());
        lease
    }
}

fn manager(server: &ApiServer, holder: &str) -> LeaseManager {
    LeaseManager::new(server.api(), LeaseConfig::new("weightsync", holder))
}

struct Candidate {
    leadership: Leadership,
    cancel: CancellationToken,
    task: tokio::task::JoinHandle<(LeaseLost, LeaseManager)>,
}

fn candidate(server: &ApiServer, holder: &str) -> Candidate {
    let mut manager = manager(server, holder);
    let (leadership, cancel) = (manager.leadership(), CancellationToken::new());
    let stop = cancel.clone();
    let task = tokio::spawn(async move {
        let lost = manager.run(&stop).await;
        (lost, manager)
    });
    Candidate { leadership, cancel, task }
}

#[tokio::test(start_paused = true)]
async fn second_candidate_waits_until_the_lease_is_given_back() {
    let server = ApiServer::new();
    let mut first = candidate(&server, "first");
    assert_eq!(first.leadership.acquired().await, Some(0));
    let mut second = candidate(&server, "second");
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(first.leadership.term(), Some(0), "it renews");
    assert_eq!(second.leadership.term(), None);
    first.cancel.cancel();
    let (lost, mut manager) = first.task.await.unwrap();
    assert_eq!(lost, LeaseLost::Stopped);
    manager.release().await;
    let waiting = Instant::now();
    assert_eq!(second.leadership.acquired().await, Some(1));
    assert!(waiting.elapsed() <= Duration::from_secs(6), "{:?}", waiting.elapsed());
    assert_eq!(server.lease()["spec"]["holderIdentity"], "second");
}

#[tokio::test(start_paused = true)]
async fn leader_whose_calls_fail_stops_before_another_may_lead() {
    for mode in [Mode::Fails, Mode::Hangs] {
        let server = ApiServer::new();
        let mut leader = candidate(&server, "first");
        leader.leadership.acquired().await.unwrap();
        tokio::time::sleep(Duration::from_secs(60)).await;
        server.set(mode);
        let failing = Instant::now();
        leader.leadership.lost().await;
        assert!(failing.elapsed() <= Duration::from_secs(15), "{mode:?}: {:?}", failing.elapsed());
        let (lost, _) = leader.task.await.unwrap();
        assert!(matches!(lost, LeaseLost::NotRenewed(_)), "{lost:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_ends_by_itself_when_the_lease_task_is_stuck() {
    let server = ApiServer::new();
    let mut manager = manager(&server, "first");
    let mut leadership = manager.leadership();
    manager.try_acquire().await.unwrap().unwrap();
    // No one runs the manager from here on.
    assert_eq!(leadership.term(), Some(0));
    let stuck = Instant::now();
    leadership.lost().await;
    assert!(stuck.elapsed() <= Duration::from_secs(15));
    assert_eq!(leadership.term(), None);
}

#[tokio::test(start_paused = true)]
async fn a_dead_leader_is_followed_after_the_duration_and_not_before() {
    let server = ApiServer::new();
    let mut first = candidate(&server, "first");
    first.leadership.acquired().await.unwrap();
    first.task.abort();
    let mut second = candidate(&server, "second");
    let waiting = Instant::now();
    assert_eq!(second.leadership.acquired().await, Some(1));
    assert!(waiting.elapsed() >= Duration::from_secs(15), "{:?}", waiting.elapsed());
    assert!(waiting.elapsed() <= Duration::from_secs(22), "{:?}", waiting.elapsed());
}

#[tokio::test(start_paused = true)]
async fn restarted_process_of_one_pod_leads_at_once_in_new_term() {
    let server = ApiServer::new();
    let mut first = candidate(&server, "pod");
    first.leadership.acquired().await.unwrap();
    first.task.abort();
    let mut second = candidate(&server, "pod");
    let waiting = Instant::now();
    assert_eq!(second.leadership.acquired().await, Some(1));
    assert!(waiting.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_leader_whose_lease_was_taken_stops_at_its_next_renewal() {
    let server = ApiServer::new();
    let mut leader = candidate(&server, "first");
    leader.leadership.acquired().await.unwrap();
    let mut lease = server.lease();
    lease["spec"]["holderIdentity"] = json!("thief");
    lease["spec"]["leaseTransitions"] = json!(7);
    server.0.lock().store(lease);
    let (lost, _) = leader.task.await.unwrap();
    assert_eq!(lost, LeaseLost::Taken { holder: "thief".into(), term: 7 });
    assert_eq!(leader.leadership.term(), None);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_whose_answer_was_lost_does_not_end_leadership() {
    let server = ApiServer::new();
    let mut leader = candidate(&server, "first");
    leader.leadership.acquired().await.unwrap();
    server.set(Mode::LosesAnswers);
    tokio::time::sleep(Duration::from_secs(7)).await;
    server.set(Mode::Works);
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(leader.leadership.term(), Some(0));
    leader.cancel.cancel();
    assert_eq!(leader.task.await.unwrap().0, LeaseLost::Stopped);
}

#[tokio::test(start_paused = true)]
async fn renewals_answered_too_late_keep_leadership() {
    let server = ApiServer::new();
    let mut leader = candidate(&server, "first");
    leader.leadership.acquired().await.unwrap();
    // Every other call is answered.
    for _ in 0..40 {
        server.set(Mode::LosesAnswers);
        tokio::time::sleep(Duration::from_secs(4)).await;
        server.set(Mode::Works);
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(leader.leadership.term(), Some(0));
    }
    leader.cancel.cancel();
    assert_eq!(leader.task.await.unwrap().0, LeaseLost::Stopped);
}

#[tokio::test(start_paused = true)]
async fn of_two_candidates_that_read_the_same_free_lease_one_leads() {
    let server = ApiServer::new();
    let (mut one, mut two) = (manager(&server, "one"), manager(&server, "two"));
    one.try_acquire().await.unwrap().unwrap();
    one.release().await;
    let stale = server.lease();
    assert_eq!(two.try_acquire().await.unwrap(), Some(1));
    // `one` writes what it read before `two` took the lease.
    one.seen = Some((serde_json::from_value(stale.clone()).unwrap(), Instant::now()));
    let stale: Lease = serde_json::from_value(stale).unwrap();
    assert!(matches!(one.write(&stale).await, Err(CallFailed::Conflict)));
    assert_eq!(one.leadership().term(), None);
}

#[tokio::test(start_paused = true)]
async fn lease_taken_or_made_again_is_above_every_known_term() {
    let server = ApiServer::new();
    let mut fresh = manager(&server, "first").above(|| Some(9));
    assert_eq!(fresh.try_acquire().await.unwrap(), Some(10));
    let mut again = manager(&server, "first").above(|| Some(4));
    assert_eq!(again.try_acquire().await.unwrap(), Some(11), "the Lease knows a higher one");
    let mut moved = manager(&server, "first").above(|| Some(40));
    assert_eq!(moved.try_acquire().await.unwrap(), Some(41));
    let mut odd = manager(&server, "first").above(|| Some(u64::MAX));
    assert_eq!(odd.try_acquire().await.unwrap(), Some(42), "no controller wrote that term");
}
