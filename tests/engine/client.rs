//! A plain HTTP client that shares no code with the adapters.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

/// The key that every server of these tests wants.
pub const KEY: &str = "a-key-of-the-engine-tests";

/// Tokens of a request that is kept through a switch: so many that it runs when it is looked for, on a fast server too.
pub const KEPT: usize = 300;

/// What a call brought; no status when there was no answer in time.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: Option<u16>,
    pub text: String,
}

impl Reply {
    /// The body as JSON, or null.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_default()
    }
}

/// One server.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    url: String,
}

impl Client {
    pub fn new(url: &str) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let tls = tls.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth();
        let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).use_preconfigured_tls(tls).build().unwrap();
        Self { http, url: url.to_owned() }
    }

    /// A call with a raw body; `key` is shown when there is one.
    pub async fn call(&self, method: &str, path: &str, body: Option<Vec<u8>>, key: Option<&str>, within: Duration) -> Reply {
        let method = reqwest::Method::from_bytes(method.as_bytes()).unwrap();
        let mut request = self.http.request(method, format!("{}{path}", self.url)).timeout(within);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        let Ok(response) = request.send().await else { return Reply { status: None, text: String::new() } };
        let status = response.status().as_u16();
        match response.text().await {
            Ok(text) => Reply { status: Some(status), text },
            Err(_) => Reply { status: None, text: String::new() },
        }
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.call("GET", path, None, Some(KEY), Duration::from_secs(60)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        self.call("POST", path, Some(body.to_string().into_bytes()), Some(KEY), Duration::from_secs(120)).await
    }

    /// Text and log-probs of a greedy completion, always as of a first question: by its own salt it finds nothing in the prefix cache. A
    /// prompt that is found there is computed in other pieces, and kernels without AVX-512 may round those differently.
    pub async fn complete(&self, prompt: &str, tokens: usize) -> (String, Vec<f64>) {
        self.ask(prompt, tokens, Some(uuid::Uuid::new_v4().to_string())).await
    }

    /// The same with what the prefix cache holds. It equals [`complete`](Self::complete) where an install, which empties the cache, was the
    /// last thing before it; keys and values of old weights in the cache change the answer.
    pub async fn complete_with_cache(&self, prompt: &str, tokens: usize) -> (String, Vec<f64>) {
        self.ask(prompt, tokens, None).await
    }

    /// The same as [`complete`](Self::complete), of a server that may be broken.
    pub async fn try_complete(&self, prompt: &str, tokens: usize) -> Result<(String, Vec<f64>), String> {
        self.try_ask(prompt, tokens, Some(uuid::Uuid::new_v4().to_string())).await
    }

    async fn ask(&self, prompt: &str, tokens: usize, salt: Option<String>) -> (String, Vec<f64>) {
        self.try_ask(prompt, tokens, salt).await.unwrap()
    }

    async fn try_ask(&self, prompt: &str, tokens: usize, salt: Option<String>) -> Result<(String, Vec<f64>), String> {
        let body = serde_json::json!({
            "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1, "ignore_eos": true, "cache_salt": salt,
        });
        let reply = self.post("/v1/completions", &body).await;
        let choice = reply.json()["choices"][0].clone();
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().map(|values| values.iter().map(Value::as_f64).collect());
        match (reply.status, choice["text"].as_str(), logprobs) {
            (Some(200), Some(text), Some(Some(logprobs))) => Ok((text.to_owned(), logprobs)),
            _ => Err(format!("{reply:?}")),
        }
    }

    /// Whether the server says that it works on no request, and that none waits.
    pub async fn idle(&self) -> bool {
        let metrics = self.get("/metrics").await.text;
        ["vllm:num_requests_running", "vllm:num_requests_waiting"].into_iter().all(|gauge| {
            let mut lines = metrics.lines().filter(|line| line.strip_prefix(gauge).is_some_and(|rest| rest.starts_with(['{', ' '])));
            lines.clone().next().is_some() && lines.all(|line| line.ends_with(" 0.0"))
        })
    }

    /// Waits until the server says that it works on a request.
    pub async fn busy(&self) {
        let working = async {
            loop {
                let metrics = self.get("/metrics").await.text;
                let running = metrics.lines().find(|line| line.starts_with("vllm:num_requests_running"));
                if running.is_some_and(|line| line.ends_with(" 1.0")) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), working).await.expect("the request did not begin");
    }
}
