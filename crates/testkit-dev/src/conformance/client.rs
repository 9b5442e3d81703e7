//! A plain HTTP client for the suite: what it looks at must not go through the adapters under test.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Method;
use serde_json::Value;

use super::ConformanceError;
use weightsync_engine::ApiKey;
use weightsync_net::https::root_cause;

#[derive(Debug, Clone)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) text: String,
}

impl Reply {
    /// The body as JSON, or null.
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_default()
    }

    /// The first characters of the body, in one line.
    pub(super) fn shown(&self) -> String {
        self.text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(120).collect()
    }
}

#[derive(Debug, Clone)]
pub(super) struct Client {
    http: reqwest::Client,
    url: String,
    key: Option<ApiKey>,
    patience: Duration,
}

/// A client without proxies, redirects or kept connections.
pub(super) fn http() -> Result<reqwest::Client, ConformanceError> {
    let failed = |cause: String| ConformanceError::Client(cause);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let tls = tls.map_err(|error| failed(error.to_string()))?.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth();
    let builder = reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).pool_max_idle_per_host(0);
    builder.use_preconfigured_tls(tls).build().map_err(|error| failed(error.to_string()))
}

impl Client {
    pub(super) fn new(url: &str, key: Option<ApiKey>, patience: Duration) -> Result<Self, ConformanceError> {
        Ok(Self { http: http()?, url: url.to_owned(), key, patience })
    }

    /// A call like `GET /health`, with that body as JSON. The error is what went wrong, in words.
    pub(super) async fn call(&self, call: &str, body: Option<&Value>, with_key: bool) -> Result<Reply, String> {
        let (method, path) = call.split_once(' ').unwrap_or(("GET", call));
        let method = Method::from_bytes(method.as_bytes()).map_err(|error| error.to_string())?;
        let mut request = self.http.request(method, format!("{}{path}", self.url)).timeout(self.patience);
        if let Some(key) = self.key.as_ref().filter(|_| with_key) {
            request = request.bearer_auth(key.text());
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        let said = |error: reqwest::Error| {
            if error.is_timeout() { format!("no answer within {:?}", self.patience) } else { root_cause(&error) }
        };
        let response = request.send().await.map_err(said)?;
        let status = response.status().as_u16();
        Ok(Reply { status, text: response.text().await.map_err(said)? })
    }

    pub(super) fn has_key(&self) -> bool {
        self.key.is_some()
    }
}
