//! What tests ask of the pods: the trainer to train, publish and save; an engine for a completion; an agent for its metrics.

use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::{Cluster, MINUTE, eventually};
use super::fixtures::{ENGINE_PORT, STATUS_PORT, TRAINER_PORT};
use super::http::{get, post, request};

/// Steps of SGD between two versions.
pub async fn train(cluster: &Cluster, trainer: &str) {
    let (status, answer) = post(cluster, trainer, TRAINER_PORT, "/train", &json!({"steps": 3})).await;
    assert_eq!(status, 200, "{answer}");
}

/// The trainer's process id.
pub async fn trainer_pid(cluster: &Cluster, trainer: &str) -> i64 {
    get(cluster, trainer, TRAINER_PORT, "/health").await.1["pid"].as_i64().unwrap()
}

/// Publishes what the trainer holds; `pace` are seconds between two tensors. Answers status and body.
pub async fn publish(cluster: &Cluster, trainer: &str, version: u64, pace: f64) -> (u16, Value) {
    let body = json!({"version": version, "pace": pace});
    request(cluster, trainer, TRAINER_PORT, "POST", "/publish", Some(&body), 3 * MINUTE).await.unwrap()
}

/// Publishes what the trainer holds, with one tensor of it replaced by NaN.
pub async fn publish_poisoned(cluster: &Cluster, trainer: &str, version: u64) -> (u16, Value) {
    let body = json!({"version": version, "poison": true});
    request(cluster, trainer, TRAINER_PORT, "POST", "/publish", Some(&body), 3 * MINUTE).await.unwrap()
}

/// Publishes and expects that these many replicas installed it.
pub async fn publish_to(cluster: &Cluster, trainer: &str, version: u64, replicas: usize) -> Value {
    let (status, answer) = publish(cluster, trainer, version, 0.0).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["installed"].as_array().map(Vec::len), Some(replicas), "{answer}");
    answer
}

/// Has the trainer publish version after version, every half second, from now on.
pub async fn flow(cluster: &Cluster, trainer: &str, from: u64) {
    let (status, answer) = post(cluster, trainer, TRAINER_PORT, "/flow", &json!({"from": from, "every": 0.5})).await;
    assert_eq!(status, 200, "{answer}");
}

/// What became of a version that the trainer published by itself.
#[derive(Debug, serde::Deserialize)]
pub struct Published {
    pub version: u64,
    /// Seconds since 1970, by the machine's clock.
    pub began: f64,
    pub ended: f64,
    #[serde(default)]
    pub installed: Vec<String>,
    pub error: Option<String>,
}

/// Ends the flow of versions; answers what became of each.
pub async fn halt(cluster: &Cluster, trainer: &str) -> Vec<Published> {
    let (status, answer) = post(cluster, trainer, TRAINER_PORT, "/halt", &json!({})).await;
    assert_eq!(status, 200, "{answer}");
    serde_json::from_value(answer["published"].clone()).unwrap()
}

/// Writes the trainer's weights as a checkpoint.
pub async fn save(cluster: &Cluster, trainer: &str, path: &str) {
    let (status, answer) = post(cluster, trainer, TRAINER_PORT, "/save", &json!({"path": path})).await;
    assert_eq!(status, 200, "{answer}");
}

/// Text and log-probs, to the last digit, that an engine gives for a prompt of 200 tokens, always as of a first question: by its own salt
/// it finds nothing in the prefix cache. A prompt that is found there is computed in other pieces, and kernels without AVX-512 may round
/// those differently.
pub async fn completion(cluster: &Cluster, pod: &str) -> String {
    ask(cluster, pod, Some(uuid::Uuid::new_v4().to_string())).await
}

/// The same with what the prefix cache holds. It equals [`completion`] where an update, which empties the cache, was the last thing before
/// it; keys and values of old weights in the cache change the answer.
pub async fn completion_with_cache(cluster: &Cluster, pod: &str) -> String {
    ask(cluster, pod, None).await
}

async fn ask(cluster: &Cluster, pod: &str, salt: Option<String>) -> String {
    let prompt: Vec<u32> = (0..200).map(|at| 3 + at * 7 % 240).collect();
    let mut body = json!({"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": true});
    body["cache_salt"] = json!(salt);
    let (status, answer) = post(cluster, pod, ENGINE_PORT, "/v1/completions", &body).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert!(choice["logprobs"]["token_logprobs"].as_array().is_some_and(|probs| probs.len() == 12), "{answer}");
    json!({"text": choice["text"], "logprobs": choice["logprobs"]["token_logprobs"]}).to_string()
}

/// Digests of what a simulated engine serves.
pub async fn served(cluster: &Cluster, pod: &str) -> Value {
    let answer = get(cluster, pod, ENGINE_PORT, "/simulator/digest").await.1;
    assert!(answer["digest"].is_string(), "{pod}: {answer}");
    answer["digest"].clone()
}

/// Trains and publishes; each of these simulated engines, all that the object `run` has, serves the same, and what it did not serve before.
pub async fn deliver(cluster: &Cluster, version: u64, rollouts: &[&str]) {
    let before = served(cluster, rollouts[0]).await;
    train(cluster, "trainer-0").await;
    publish_to(cluster, "trainer-0", version, rollouts.len()).await;
    cluster.await_version("run", version, rollouts.len() as u64, MINUTE).await;
    let now = served(cluster, rollouts[0]).await;
    assert_ne!(now, before, "version {version}");
    for other in &rollouts[1..] {
        assert_eq!(served(cluster, other).await, now, "{other}, version {version}");
    }
}

/// What goes wrong in a simulated engine from now on.
pub async fn faults(cluster: &Cluster, pod: &str, faults: &Value) {
    let (status, answer) = post(cluster, pod, ENGINE_PORT, "/simulator/faults", faults).await;
    assert_eq!(status, 200, "{answer}");
}

/// Waits until a rollout has received between 20 and 80 % of the running update, by its own word; answers the share in percent.
pub async fn between_20_and_80_percent(cluster: &Cluster, pod: &str) -> f64 {
    eventually(&format!("{pod} holds 20 to 80 % of an update"), MINUTE, || async {
        let (_, text) = request(cluster, pod, STATUS_PORT, "GET", "/metrics", None, Duration::from_secs(5)).await?;
        let text = text.as_str().unwrap_or_default();
        let value = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            line.rsplit(' ').next()?.parse::<f64>().ok()
        };
        let received = value("weightsync_agent_update_received_bytes").ok_or("no metric of received bytes")?;
        let total = value("weightsync_agent_update_total_bytes").ok_or("no metric of total bytes")?;
        let percent = if total > 0.0 { received * 100.0 / total } else { 0.0 };
        if (20.0..=80.0).contains(&percent) { Ok(percent) } else { Err(format!("{percent} %")) }
    })
    .await
}
