//! A canary: a poisoned version is turned back by the group itself while requests flow, and an engine that cannot be asked takes no part.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::model::Model;
use crate::world::{Actor, SOON, World, behind, installed, spoiled, until};

/// Simulated models are never less sure than that.
fn rules() -> Value {
    json!({"keep": 2, "minReady": 2, "canary": {"prompt": "Two and two is", "maxTokens": 4, "minLogProb": -4}})
}

async fn publish(world: &World, version: u64) {
    let checkpoint = Model::small(version).save(&world.folder().join(format!("v{version}")));
    assert_eq!(installed(&world.publish(&checkpoint, version, &[]).await.done()).len(), 3);
}

async fn all_serve(world: &World, version: u64) {
    for number in 0..3 {
        world.until_serves(number, &Model::small(version)).await;
    }
    until("the roster to say so", || async {
        let roster = world.roster("trainer").await;
        let replicas = roster["replicas"].as_array().cloned().unwrap_or_default();
        let there = |replica: &Value| replica["version"] == version && replica["state"] == "ready";
        roster["version"] == version && replicas.len() == 3 && replicas.iter().all(there)
    })
    .await;
}

/// What a user got; none where no log-prob was a number.
type Answer = Option<String>;

/// A user who asks one engine the same question again and again.
struct User {
    answers: Arc<Mutex<Vec<Answer>>>,
    asks: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl User {
    fn of(world: &World, number: usize) -> Self {
        let (http, url) = (world.http.clone(), format!("http://127.0.0.1:{}/v1/completions", world.port(number)));
        let (answers, asks) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(true)));
        let (reported, goes_on) = (answers.clone(), asks.clone());
        let task = tokio::spawn(async move {
            let question = json!({"model": "model", "prompt": "What is said?", "max_tokens": 6, "logprobs": 0});
            while goes_on.load(Ordering::SeqCst) {
                let reply =
                    http.post(&url).timeout(SOON).json(&question).send().await.expect("an engine holds its requests, and ends none");
                let body: Value = reply.json().await.unwrap();
                let log_probs = body.pointer("/choices/0/logprobs/token_logprobs").and_then(Value::as_array);
                let good = log_probs.is_some_and(|numbers| !numbers.is_empty() && numbers.iter().all(Value::is_f64));
                let text = body.pointer("/choices/0/text").and_then(Value::as_str).map(str::to_owned);
                reported.lock().unwrap().push(text.filter(|_| good));
            }
        });
        Self { answers, asks, task }
    }

    fn count(&self) -> usize {
        self.answers.lock().unwrap().len()
    }

    /// Waits until so many answers more came.
    async fn until_answered(&self, more: usize) {
        let wanted = self.count() + more;
        until("answers", || async { self.count() >= wanted }).await;
    }

    async fn end(self) -> Vec<Answer> {
        self.asks.store(false, Ordering::SeqCst);
        self.task.await.unwrap();
        Arc::try_unwrap(self.answers).unwrap().into_inner().unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn version_with_nan_is_rolled_back_under_load() {
    let mut world = World::start(rules(), [Actor::new(), Actor::sglang(), Actor::new()]).await;
    world.until_ready(3).await;
    publish(&world, 1).await;
    all_serve(&world, 1).await;
    let users: Vec<User> = (0..3).map(|number| User::of(&world, number)).collect();
    for user in &users {
        user.until_answered(2).await;
    }
    let before: Vec<Answer> = users.iter().map(|user| user.answers.lock().unwrap()[0].clone()).collect();
    assert!(before.iter().all(Option::is_some), "{before:?}");

    let poisoned = Model::small(2).poisoned(5).save(&world.folder().join("poisoned"));
    let error = world.publish(&poisoned, 2, &[]).await.failed();
    assert_eq!((&error["code"], &error["retryable"]), (&json!("VersionRefused"), &json!(false)), "{error}");
    let message = error["message"].as_str().unwrap();
    // "refuses" by the members' own word, "refused" when the next epoch reports it first.
    assert!(message.contains("actor-") && message.contains("the canary refuse"), "{message}");
    let refused = world.event("the group to refuse it", |event| event["reason"] == "VersionRefused" && event["member"].is_null()).await;
    let said = refused["message"].as_str().unwrap();
    assert!(said.contains("version 2") && said.contains("version 1 stays"), "{said}");
    // Two of three are enough; the third may still have been at it.
    assert!(said.matches("actor-").count() >= 2, "{said}");
    all_serve(&world, 1).await;
    for user in &users {
        user.until_answered(5).await;
    }
    for (user, before) in users.into_iter().zip(before) {
        let answers = user.end().await;
        // An engine computes with the poisoned version between its switch and its answer to the canary, which holds it; a request that runs
        // then ends as a mixture. After that it answers as before, and goes on so: no one brings the version a second time.
        let whole = |answer: &Answer| *answer == before;
        let mut later = answers.iter().skip_while(|answer| whole(answer)).skip_while(|answer| !whole(answer));
        assert!(later.clone().count() >= 4 || answers.iter().all(whole), "{answers:?}");
        assert!(later.all(whole), "{before:?} was answered before: {answers:?}");
    }

    let again = Model::small(7).save(&world.folder().join("again"));
    let error = world.publish(&again, 2, &[]).await.failed();
    assert_eq!(error["code"], "VersionRefused", "other weights under the number: {error}");
    publish(&world, 3).await;
    all_serve(&world, 3).await;
}

/// An answer of an engine that gives a log-prob for one token.
pub(super) fn answer(log_probs: &Value) -> Value {
    json!({"kind": "answer", "status": 200, "body": {"choices": [{"text": "a", "logprobs": log_probs, "finish_reason": "length"}]}})
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_that_refuses_alone_stops_and_others_go_on() {
    let mut world = World::start(rules(), [Actor::new(), Actor::sglang(), Actor::new()]).await;
    world.until_ready(3).await;
    publish(&world, 1).await;
    world.spoil(2, &spoiled("/v1/completions", &answer(&json!({"token_logprobs": [null]})))).await;
    let checkpoint = Model::small(2).save(&world.folder().join("v2"));
    let result = world.publish(&checkpoint, 2, &[]).await.done();
    assert_eq!(installed(&result), ["actor-0", "actor-1"]);
    assert!(behind(&result, "actor-2").contains("token 1 of 1 is no number"), "{result}");
    world.reported("VersionRefused", "actor-2").await;
    world.until_ready(2).await;
    world.spoil(2, &json!({})).await;
    all_serve(&world, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_without_log_probs_takes_no_part_by_name() {
    let mute = spoiled("/v1/completions", &answer(&Value::Null));
    let mut world = World::start(rules(), [Actor::new(), Actor::sglang(), Actor::new().faults(mute)]).await;
    let message = world.reported("Unsupported", "actor-2").await;
    assert!(message.contains("gives no log-probs"), "{message}");
    world.until_ready(2).await;
    let checkpoint = Model::small(1).save(&world.folder().join("v1"));
    assert_eq!(installed(&world.publish(&checkpoint, 1, &[]).await.done()).len(), 2);
    assert_eq!(world.loads(2).await, 0, "it was not touched");
}
