//! Calls to agents and to the controller. Decides the kind of a failure: not reachable, no response in time, a refusal, or an invalid
//! response. It checks the certificate against the peer's own name, whatever address it dials. So it does not mistake a successor at the
//! same address for its predecessor.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

use super::stream::EventStream;
use crate::identity::{Identity, PeerIdentity, agent_name, controller_name};
use weightsync_core::protocol::{Call, LONGEST_ANSWER, Method, Refusal, Rejection};

/// Most peers whose connections are kept; beyond that, all are dropped and opened again as needed.
const KEPT_PEERS: usize = 1024;
/// Shorter than servers keep idle connections, so that a request does not meet one that is being closed.
const IDLE: Duration = Duration::from_secs(8);
/// Longest wait for a connection to the controller: TCP sends one lost packet again within this time.
const CONNECT: Duration = Duration::from_millis(1500);
/// Most streams that are being opened at once.
const OPENING: usize = 64;
/// Longest wait in the queue to open one: 64 dead agents delay it by one deadline.
const TURN: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CallError {
    #[error("{address} cannot be reached: {cause}")]
    Unreachable { address: String, cause: String },
    #[error("{address} did not respond within {deadline:?}")]
    Timeout { address: String, deadline: Duration },
    #[error("{address} refused: {}", refusal.message)]
    Refused { address: String, refusal: Refusal },
    #[error("{address} rejected: {}", rejection.message)]
    Rejected { address: String, rejection: Rejection },
    #[error("{address}: invalid response: {what}")]
    BadReply { address: String, what: String },
}

/// Calls agents' control servers.
#[derive(Clone)]
pub struct AgentClient {
    pool: Arc<Pool>,
    opening: Arc<Semaphore>,
}

impl AgentClient {
    /// Presents `identity` to peers.
    pub fn new(identity: Identity) -> Self {
        let pool = Pool { identity, clients: Mutex::default(), idle: 4, connect: None };
        Self { pool: Arc::new(pool), opening: Arc::new(Semaphore::new(OPENING)) }
    }

    /// The identity that it presents to peers.
    pub fn identity(&self) -> &Identity {
        &self.pool.identity
    }

    /// Calls the agent of that pod at `address` (`IP:PORT`); the whole call ends within `deadline`.
    pub async fn ask<C: Call>(&self, address: &str, pod_uid: &str, request: &C, deadline: Duration) -> Result<C::Answer, CallError> {
        self.pool.ask(Outgoing { address, name: agent_name(pod_uid), path: C::PATH, deadline }, request).await
    }

    /// The same, if the caller only needs to know that the agent took the request: any answer is accepted.
    pub async fn tell<C: Call>(&self, address: &str, pod_uid: &str, request: &C, deadline: Duration) -> Result<(), CallError> {
        let call = Outgoing { address, name: agent_name(pod_uid), path: C::PATH, deadline };
        self.pool.ask::<C, IgnoredAny>(call, request).await.map(drop)
    }

    /// Posts any `body` to any path, as peers do that do not follow the protocol. For tests and simulations.
    pub async fn post_json<T, R>(&self, address: &str, pod_uid: &str, path: &str, body: &T, deadline: Duration) -> Result<R, CallError>
    where
        T: Serialize + Sync + ?Sized,
        R: DeserializeOwned,
    {
        let call = Outgoing { address, name: agent_name(pod_uid), path, deadline };
        self.pool.json(call, |client, url| client.post(url).json(body)).await
    }

    /// Opens a stream of one JSON object a line. It must begin within `deadline`, and counts as silent after `silence` without a line. Only
    /// some are opened at once: all handshakes of thousands together take longer than any deadline.
    pub async fn events<T: DeserializeOwned>(
        &self,
        address: &str,
        pod_uid: &str,
        path: &str,
        deadline: Duration,
        silence: Duration,
    ) -> Result<EventStream<T>, CallError> {
        let call = Outgoing { address, name: agent_name(pod_uid), path, deadline };
        let _turn = timeout(TURN, self.opening.acquire()).await.map_err(|_| call.timed_out())?;
        let response = self.pool.send(&call, reqwest::Client::get).await?;
        Ok(EventStream::new(response, silence))
    }
}

/// Calls the controller's enrolment server (or that of `weightsync local`).
#[derive(Clone)]
pub struct ControllerClient {
    pool: Arc<Pool>,
    address: String,
}

impl ControllerClient {
    /// `address` is `HOST:PORT` or `https://HOST:PORT`, resolved again for each call. The certificate is checked against the controller's
    /// fixed name.
    pub fn new(identity: Identity, address: String) -> Self {
        let address = address.trim_start_matches("https://").trim_end_matches('/').to_owned();
        // A Service may still lead to a controller that died silently: neither a kept nor a new connection may wait for it.
        let pool = Pool { identity, clients: Mutex::default(), idle: 0, connect: Some(CONNECT) };
        Self { pool: Arc::new(pool), address }
    }

    /// Calls the controller; the whole call, name lookup included, ends within `deadline`.
    pub async fn ask<C: Call>(&self, request: &C, deadline: Duration) -> Result<C::Answer, CallError> {
        self.pool.ask(Outgoing { address: &self.address, name: controller_name(), path: C::PATH, deadline }, request).await
    }
}

/// A call on its way.
struct Outgoing<'a> {
    address: &'a str,
    name: String,
    path: &'a str,
    deadline: Duration,
}

impl Outgoing<'_> {
    fn unreachable(&self, cause: impl Into<String>) -> CallError {
        CallError::Unreachable { address: self.address.to_owned(), cause: cause.into() }
    }

    fn bad(&self, what: impl Into<String>) -> CallError {
        CallError::BadReply { address: self.address.to_owned(), what: what.into() }
    }

    fn failed(&self, error: &reqwest::Error) -> CallError {
        if error.is_builder() { self.bad(root_cause(error)) } else { self.unreachable(root_cause(error)) }
    }

    fn timed_out(&self) -> CallError {
        CallError::Timeout { address: self.address.to_owned(), deadline: self.deadline }
    }
}

/// Connections by peer. One client for each peer, because a client resolves names by itself.
struct Pool {
    identity: Identity,
    clients: Mutex<HashMap<PeerKey, reqwest::Client>>,
    /// Idle connections that are kept for one peer.
    idle: usize,
    /// Longest wait for a connection, if the whole call may take longer.
    connect: Option<Duration>,
}

/// A connection belongs to one name at one address under one of our identities.
#[derive(PartialEq, Eq, Hash)]
struct PeerKey {
    name: String,
    address: SocketAddr,
    own: Option<PeerIdentity>,
}

impl Pool {
    /// `R` is the answer that is read: that of the call, or any.
    async fn ask<C: Call, R: DeserializeOwned>(&self, call: Outgoing<'_>, request: &C) -> Result<R, CallError> {
        let send = |client: &reqwest::Client, url| match C::METHOD {
            Method::Get => client.get(url).query(request),
            Method::Post => client.post(url).json(request),
        };
        self.json(call, send).await
    }

    async fn json<R: DeserializeOwned>(
        &self,
        call: Outgoing<'_>,
        request: impl FnOnce(&reqwest::Client, String) -> reqwest::RequestBuilder,
    ) -> Result<R, CallError> {
        let until = Instant::now() + call.deadline;
        let response = self.send_until(&call, until, request).await?;
        let body = timeout_at(until, read_body(&call, response)).await.map_err(|_| call.timed_out())??;
        // Many responses are empty: an empty body reads as `null`, so that callers can request `()`.
        let body: &[u8] = if body.is_empty() { b"null" } else { &body };
        serde_json::from_slice(body).map_err(|cause| call.bad(cause.to_string()))
    }

    async fn send(
        &self,
        call: &Outgoing<'_>,
        request: impl FnOnce(&reqwest::Client, String) -> reqwest::RequestBuilder,
    ) -> Result<reqwest::Response, CallError> {
        self.send_until(call, Instant::now() + call.deadline, request).await
    }

    async fn send_until(
        &self,
        call: &Outgoing<'_>,
        until: Instant,
        request: impl FnOnce(&reqwest::Client, String) -> reqwest::RequestBuilder,
    ) -> Result<reqwest::Response, CallError> {
        let sent = async {
            let address = look_up(call).await?;
            let client = self.client(call, address)?;
            let url = format!("https://{}:{}{}", call.name, address.port(), call.path);
            let response = request(&client, url).send().await.map_err(|error| call.failed(&error))?;
            if response.status().is_success() {
                return Ok(response);
            }
            let status = response.status();
            let body = read_body(call, response).await?;
            Err(refused(call, status, &body))
        };
        timeout_at(until, sent).await.unwrap_or_else(|_| Err(call.timed_out()))
    }

    fn client(&self, call: &Outgoing<'_>, address: SocketAddr) -> Result<reqwest::Client, CallError> {
        let key = PeerKey { name: call.name.clone(), address, own: self.identity.own() };
        let mut clients = self.clients.lock();
        if let Some(client) = clients.get(&key) {
            return Ok(client.clone());
        }
        let tls = self.identity.client_config().map_err(|error| call.bad(error.to_string()))?;
        let mut builder = reqwest::Client::builder();
        if let Some(connect) = self.connect {
            builder = builder.connect_timeout(connect);
        }
        let client = builder
            .use_preconfigured_tls(tls)
            // A proxy from the environment would see, or lose, requests to a pod.
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .http1_only()
            .tcp_nodelay(true)
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(self.idle)
            .resolve(&call.name, address)
            .build()
            .map_err(|error| call.bad(root_cause(&error)))?;
        if clients.len() >= KEPT_PEERS {
            clients.clear();
        }
        clients.insert(key, client.clone());
        Ok(client)
    }
}

async fn look_up(call: &Outgoing<'_>) -> Result<SocketAddr, CallError> {
    if let Ok(address) = call.address.parse() {
        return Ok(address);
    }
    let mut found = tokio::net::lookup_host(call.address).await.map_err(|error| call.unreachable(error.to_string()))?;
    found.next().ok_or_else(|| call.unreachable("the name has no address"))
}

async fn read_body(call: &Outgoing<'_>, mut response: reqwest::Response) -> Result<Vec<u8>, CallError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| call.failed(&error))? {
        if body.len() + chunk.len() > LONGEST_ANSWER {
            return Err(call.bad(format!("it is longer than {LONGEST_ANSWER} bytes")));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

fn refused(call: &Outgoing<'_>, status: reqwest::StatusCode, body: &[u8]) -> CallError {
    let address = call.address.to_owned();
    if let Ok(refusal) = serde_json::from_slice(body) {
        return CallError::Refused { address, refusal };
    }
    if let Ok(rejection) = serde_json::from_slice(body) {
        return CallError::Rejected { address, rejection };
    }
    let text: String = String::from_utf8_lossy(body).chars().take(512).collect();
    call.bad(format!("HTTP {status}: {text}"))
}

/// The innermost cause (refused, reset, bad certificate). The texts above it name only the steps and the URL: "error sending request for
/// url (...): client error (Connect): tcp connect error".
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(below) = innermost.source() {
        innermost = below;
    }
    innermost.to_string()
}
