//! Versions that no engine can serve: what the server says of each, and that it takes the next right one. The agent compares tensors before it
//! touches an engine; here nothing is compared, as where the engine's checkpoint cannot be read and no version came before.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use weightsync_core::protocol::PausePolicy;
use weightsync_engine::InstallJob;

use super::adapter::{SOON, job, paused};
use super::client::{Client, KEY};
use super::models::Models;
use super::real::{Server, adapter, venv};

const PROMPT: &str = "The trainer sends its weights to every rollout.";

/// A client that asks all the time, and keeps each answer that it has not seen yet.
struct Asking {
    end: CancellationToken,
    answers: JoinHandle<Vec<Value>>,
}

impl Asking {
    fn start(client: Client) -> Self {
        let end = CancellationToken::new();
        let over = end.clone();
        let answers = tokio::spawn(async move {
            let mut answers = Vec::new();
            while !over.is_cancelled() {
                if let Some(answer) = answer(&client).await
                    && !answers.contains(&answer)
                {
                    answers.push(answer);
                }
            }
            answers
        });
        Self { end, answers }
    }

    async fn end(self) -> Vec<Value> {
        self.end.cancel();
        self.answers.await.unwrap()
    }
}

/// What the server computes now; none where it does not answer, answers that it cannot, or aborts the request.
async fn answer(client: &Client) -> Option<Value> {
    let salt = uuid::Uuid::new_v4().to_string();
    let body =
        json!({"model": "m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": true, "cache_salt": salt});
    let body = body.to_string().into_bytes();
    let reply = client.call("POST", "/v1/completions", Some(body), Some(KEY), Duration::from_secs(60)).await;
    let choice = reply.json()["choices"][0].clone();
    (reply.status == Some(200) && choice["finish_reason"] == "length")
        .then(|| json!([choice["text"], choice["logprobs"]["token_logprobs"]]))
}

/// Requests that run are aborted: one that is kept goes on with the next version, and its answer is of two.
fn aborting(models: &Models, name: &str, version: u64) -> InstallJob {
    paused(PausePolicy::Abort, job(models, name, version))
}

async fn play(mut server: Server, models: &Models) {
    let client = server.ready().await;
    let engine = adapter(&server, None);
    engine.install(&job(models, "2", 1)).await.unwrap();
    let right = client.complete(PROMPT, 8).await;
    // Answers of whole versions: the right one, and wrong ones that the server takes.
    let mut known = vec![answer(&client).await.unwrap()];
    let asking = Asking::start(client.clone());
    let mut version = 2;
    for (name, refused) in [("unknown", true), ("nan", false), ("missing", false), ("retyped", false)] {
        let outcome = engine.install(&aborting(models, name, version)).await;
        println!("{name}: {outcome:?}");
        match &outcome {
            Err(error) => assert!(error.repeats(), "{name}: {error}"),
            Ok(_) => assert!(!refused, "{name} was taken"),
        }
        if outcome.is_ok() {
            known.extend(answer(&client).await);
        }
        engine.install(&aborting(models, "2", version + 1)).await.unwrap_or_else(|error| panic!("after {name}: {error}"));
        assert_eq!(client.complete(PROMPT, 8).await, right, "after {name}");
        version += 2;
    }

    let strange: Vec<_> = asking.end().await.into_iter().filter(|answer| !known.contains(answer)).collect();
    assert_eq!(strange, Vec::<Value>::new(), "answers of no version; those of versions are {known:?}");

    // A tensor of another shape stays in vLLM's loader: it refuses every load after that, and only another start helps.
    let error = engine.install(&job(models, "misfit", version)).await.unwrap_err();
    assert!(error.repeats() && error.is_dirty(), "{error}");
    let again = engine.install(&job(models, "2", version + 1)).await.unwrap_err();
    assert!(again.is_dirty(), "{again}");
    engine.put_back(2 * SOON).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs vLLM: make engine-test"]
async fn right_version_is_taken_after_each_wrong_one() {
    let models = Models::made();
    play(Server::simulator(&models.path("1"), "{}"), models).await;
    if let Some(venv) = venv() {
        play(Server::vllm_one_by_one(&venv, &models.path("1")), models).await;
    }
}
