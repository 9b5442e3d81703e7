//! What engines say that they serve, asked from themselves: a simulator's digests of the bytes it loaded, a real server's completion with
//! log-probs. Decides whether it is what was published; asks no agent.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

const PROMPT: &str = "The quick brown fox jumps over the lazy dog";
/// The first completion of a vLLM process on a busy machine takes tens of seconds.
const FIRST_ANSWER: Duration = Duration::from_secs(120);

pub struct Verifier {
    client: reqwest::Client,
}

impl Verifier {
    /// A client with a deadline on every call.
    pub fn new() -> anyhow::Result<Self> {
        let client = reqwest::Client::builder().timeout(FIRST_ANSWER).connect_timeout(Duration::from_secs(2)).no_proxy().build();
        Ok(Self { client: client.context("an HTTP client cannot be made")? })
    }

    async fn ask(&self, request: reqwest::RequestBuilder) -> anyhow::Result<Value> {
        let answer = request.send().await?;
        let (status, text) = (answer.status(), answer.text().await?);
        ensure!(status.is_success(), "{status}: {text}");
        serde_json::from_str(&text).with_context(|| format!("no JSON: {text}"))
    }

    /// Compares every tensor that a simulator serves with what was published; returns the first difference.
    pub async fn simulator_serves(&self, port: u16, expected: &[(String, String)]) -> anyhow::Result<()> {
        let served = self.ask(self.client.get(format!("http://127.0.0.1:{port}/simulator/digest"))).await?;
        let tensors = served.get("tensors").and_then(Value::as_object).context("the simulator names no tensors")?;
        for (name, digest) in expected {
            match tensors.get(name).and_then(Value::as_str) {
                Some(found) if found == digest => {}
                Some(found) => bail!("tensor {name} is {found}, published was {digest}"),
                None => bail!("tensor {name} is missing"),
            }
        }
        ensure!(tensors.len() == expected.len(), "{} tensors are served, {} were published", tensors.len(), expected.len());
        Ok(())
    }

    /// Makes a simulator flip one byte of the next load.
    pub async fn corrupt(&self, port: u16) -> anyhow::Result<()> {
        let faults = json!({"load": "corrupt"});
        self.ask(self.client.post(format!("http://127.0.0.1:{port}/simulator/faults")).json(&faults)).await?;
        Ok(())
    }

    /// Whether a server on this host says that it is up.
    pub async fn healthy(&self, port: u16) -> bool {
        self.client.get(format!("http://127.0.0.1:{port}/health")).send().await.is_ok_and(|answer| answer.status().is_success())
    }

    /// A real server's completion of a fixed prompt: text, and log-probs to the last digit. Its own salt makes each question a first one,
    /// which finds nothing in the prefix cache: computed in other pieces, the same prompt may be rounded differently.
    pub async fn completion(&self, port: u16) -> anyhow::Result<String> {
        let salt = uuid::Uuid::new_v4().to_string();
        let body = json!({
            "model": "m", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "logprobs": 1, "ignore_eos": true, "cache_salt": salt
        });
        let answer = self.ask(self.client.post(format!("http://127.0.0.1:{port}/v1/completions")).json(&body)).await?;
        let choice = answer.pointer("/choices/0").context("no choice")?;
        let probs = choice.pointer("/logprobs/token_logprobs").context("no log-probs")?;
        Ok(json!({"text": choice.get("text"), "logprobs": probs}).to_string())
    }
}
