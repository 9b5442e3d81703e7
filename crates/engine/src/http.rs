//! Calls to an engine's HTTP server: each with a deadline, each reply read strictly and up to a limit.
//!
//! Decides the kind of a failure. It never retries, follows a redirect, or puts a key into an error. It never uses a proxy from the
//! environment: a sidecar calls its own pod. It keeps no connection: a restarted engine must appear as a refused connection, not as a stale
//! one.

use std::time::Duration;

use reqwest::{Client, Method, RequestBuilder, Response, Url};
use serde_json::Value;
use tokio::time::Instant;

use super::localhost::{self, LOCALHOST};
use super::{ApiKey, EngineConfig, EngineError};
use weightsync_net::https::no_tls;

/// Longest reply that is read, in bytes. vLLM 0.32 answers `/metrics` with about 50 KiB, SGLang 0.5.23 `/server_info` with about 20 KiB.
const MAX_REPLY: usize = 8 << 20;
/// Part of a reply that an error shows, in bytes.
const SHOWN: usize = 512;

/// The end of the present work. Copies share the end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Until {
    end: Instant,
    total: Duration,
}

impl Until {
    pub(super) fn new(total: Duration) -> Self {
        Self { end: Instant::now() + total, total }
    }

    /// The time left; zero after the end.
    pub(super) fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// The total time, for errors.
    pub(super) fn total(&self) -> Duration {
        self.total
    }

    /// Ends `reserve` earlier, to leave time after a failure.
    pub(super) fn keeping(&self, reserve: Duration) -> Self {
        Self { end: self.end.checked_sub(reserve).unwrap_or(self.end), total: self.total.saturating_sub(reserve) }
    }

    pub(super) fn at_most(&self, most: Duration) -> Self {
        let other = Self::new(most);
        if other.end < self.end { other } else { *self }
    }
}

/// A server's reply, with any status.
#[derive(Debug)]
pub(super) struct Reply {
    url: String,
    status: u16,
    body: Vec<u8>,
}

pub(super) struct EngineHttp {
    client: Client,
    base: Url,
    api_key: Option<ApiKey>,
}

impl EngineHttp {
    /// A client for the server of `config`; sends nothing.
    pub(super) fn new(config: &EngineConfig) -> Result<Self, EngineError> {
        let unsupported =
            |what: String| EngineError::Unsupported { what, next_step: "give the engine's address as http://HOST:PORT".into() };
        let base = Url::parse(&config.url).map_err(|cause| unsupported(format!("{:?} is no URL: {cause}", config.url)))?;
        if base.scheme() != "http" || base.host().is_none() || !matches!(base.path(), "" | "/") || base.query().is_some() {
            return Err(unsupported(format!("{:?} is not the address of an engine in this pod or on this host", config.url)));
        }
        let client = Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .pool_max_idle_per_host(0)
            .resolve_to_addrs(LOCALHOST, &localhost::addresses(0))
            .use_preconfigured_tls(no_tls().map_err(|cause| unsupported(format!("TLS cannot be set up: {cause}")))?)
            .build()
            .map_err(|cause| unsupported(format!("the HTTP client cannot be set up: {cause}")))?;
        Ok(Self { client, base, api_key: config.api_key.clone() })
    }

    /// `http://HOST:PORT`.
    pub(super) fn url(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    pub(super) fn port(&self) -> u16 {
        self.base.port_or_known_default().unwrap_or(0)
    }

    pub(super) async fn get(&self, path: &str, until: Until) -> Result<Reply, EngineError> {
        self.send(Method::GET, path, None, until).await
    }

    pub(super) async fn post(&self, path: &str, body: Option<&Value>, until: Until) -> Result<Reply, EngineError> {
        self.send(Method::POST, path, body, until).await
    }

    async fn send(&self, method: Method, path: &str, body: Option<&Value>, until: Until) -> Result<Reply, EngineError> {
        let url = format!("{}{path}", self.url());
        let timeout = || EngineError::Timeout { url: url.clone(), deadline: until.total() };
        if until.left().is_zero() {
            return Err(timeout());
        }
        let mut request: RequestBuilder = self.client.request(method, &url).timeout(until.left());
        if let Some(key) = &self.api_key {
            request = request.bearer_auth(key.text());
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        let failed = |source: reqwest::Error| {
            let source = source.without_url();
            if source.is_timeout() { timeout() } else { EngineError::Unreachable { url: url.clone(), source } }
        };
        let response = request.send().await.map_err(failed)?;
        let status = response.status().as_u16();
        let body = read(response, &url).await.map_err(|error| error.unwrap_read(failed))?;
        Ok(Reply { url, status, body })
    }
}

enum ReadError {
    Http(reqwest::Error),
    Engine(EngineError),
}

impl ReadError {
    fn unwrap_read(self, failed: impl FnOnce(reqwest::Error) -> EngineError) -> EngineError {
        match self {
            Self::Http(source) => failed(source),
            Self::Engine(error) => error,
        }
    }
}

async fn read(mut response: Response, url: &str) -> Result<Vec<u8>, ReadError> {
    let mut body = Vec::new();
    while let Some(part) = response.chunk().await.map_err(ReadError::Http)? {
        if body.len() + part.len() > MAX_REPLY {
            let what = format!("it is longer than {MAX_REPLY} bytes");
            return Err(ReadError::Engine(EngineError::BadReply { url: url.to_owned(), what }));
        }
        body.extend_from_slice(&part);
    }
    Ok(body)
}

impl Reply {
    pub(super) fn status(&self) -> u16 {
        self.status
    }

    /// The body as text, of a reply with status 200.
    pub(super) fn text(self) -> Result<String, EngineError> {
        if self.status != 200 {
            return Err(self.into_status());
        }
        String::from_utf8(self.body).map_err(|_| EngineError::BadReply { url: self.url, what: "it is not UTF-8".into() })
    }

    /// The body as JSON, of a reply with status 200.
    pub(super) fn json(self) -> Result<Answer, EngineError> {
        if self.status != 200 {
            return Err(self.into_status());
        }
        match serde_json::from_slice(&self.body) {
            Ok(value) => Ok(Answer { url: self.url, value }),
            Err(_) => Err(EngineError::BadReply { what: format!("it is not JSON: {}", shown(&self.body)), url: self.url }),
        }
    }

    /// The same, unless the server computed a number that JSON does not have. vLLM 0.32 then returns 400, `BadRequestError` (seen on the
    /// real server), like for a question that it refuses; only the text differs.
    pub(super) fn unless_no_number(self) -> Result<Self, EngineError> {
        if self.status != 400 {
            return Ok(self);
        }
        let body = shown(&self.body);
        if !body.contains("not JSON compliant") {
            return Ok(self);
        }
        Err(EngineError::BadReply { url: self.url, what: format!("it computed a number that JSON does not have: {body}") })
    }

    /// The error for an unexpected status.
    pub(super) fn into_status(self) -> EngineError {
        EngineError::Status { body: shown(&self.body), url: self.url, status: self.status }
    }

    /// Accepts status 200, without a look at the body.
    pub(super) fn ok(self) -> Result<(), EngineError> {
        if self.status == 200 { Ok(()) } else { Err(self.into_status()) }
    }
}

/// A JSON body with status 200. Success is never assumed. A missing field, `"true"`, or an error inside is a failure (a missing field taken
/// for success: InternLM/xtuner#1828; an error inside 200: inclusionAI/AReaL#1590).
#[derive(Debug)]
pub(super) struct Answer {
    url: String,
    value: Value,
}

impl Answer {
    pub(super) fn must(self, name: &str, expected: &Value) -> Result<Self, EngineError> {
        if self.value.get("error").is_some_and(|error| !error.is_null()) || self.value.get(name) != Some(expected) {
            return Err(self.not_success());
        }
        Ok(self)
    }

    pub(super) fn field(&self, name: &str) -> Result<&Value, EngineError> {
        self.value.get(name).ok_or_else(|| self.bad(format!("it has no {name:?}")))
    }

    pub(super) fn string(&self, name: &str) -> Result<String, EngineError> {
        let text = self.field(name)?.as_str().ok_or_else(|| self.bad(format!("{name:?} is not text")))?;
        Ok(text.chars().take(SHOWN).collect())
    }

    pub(super) fn value(&self) -> &Value {
        &self.value
    }

    pub(super) fn not_success(self) -> EngineError {
        EngineError::NotSuccess { body: shown(self.value.to_string().as_bytes()), url: self.url }
    }

    pub(super) fn bad(&self, what: String) -> EngineError {
        EngineError::BadReply { url: self.url.clone(), what: format!("{what}: {}", shown(self.value.to_string().as_bytes())) }
    }
}

/// The first [`SHOWN`] bytes as one line.
fn shown(body: &[u8]) -> String {
    let part = body.get(..SHOWN).unwrap_or(body);
    String::from_utf8_lossy(part).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
