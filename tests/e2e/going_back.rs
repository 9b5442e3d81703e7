//! The way back to an earlier version while requests flow: because a person names it, and because a canary refuses a poisoned one. Simulated
//! engines, a real trainer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::asks::{publish, publish_poisoned, publish_to, served};
use super::cluster::{Cluster, MINUTE, eventually};
use super::faults::group_by;
use super::fixtures::{ENGINE_PORT, weightsync};
use super::http::request;

const PODS: [&str; 3] = ["sim-0", "sim-1", "sim-2"];

/// What a user got; none where no log-prob was a number.
type Answer = Option<String>;

/// A user who asks one engine the same question again and again, through the pause of a switch as well.
struct User {
    answers: Arc<Mutex<Vec<Answer>>>,
    asks: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl User {
    fn of(cluster: &Cluster, pod: &'static str) -> Self {
        let cluster = Cluster { client: cluster.client.clone(), namespace: cluster.namespace.clone() };
        let (answers, asks) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(true)));
        let (reported, goes_on) = (answers.clone(), asks.clone());
        let task = tokio::spawn(async move {
            while goes_on.load(Ordering::SeqCst) {
                let answer = ask(&cluster, pod).await;
                reported.lock().unwrap().push(answer);
            }
        });
        Self { answers, asks, task }
    }

    fn count(&self) -> usize {
        self.answers.lock().unwrap().len()
    }

    async fn until_answered(&self, more: usize) {
        let wanted = self.count() + more;
        eventually("answers", MINUTE, || async {
            let count = self.count();
            if count >= wanted { Ok(()) } else { Err(count) }
        })
        .await;
    }

    async fn end(self) -> Vec<Answer> {
        self.asks.store(false, Ordering::SeqCst);
        self.task.await.unwrap();
        Arc::try_unwrap(self.answers).unwrap().into_inner().unwrap()
    }
}

/// One question; an engine may hold it for as long as it is switched, and ends none.
async fn ask(cluster: &Cluster, pod: &str) -> Answer {
    let body = json!({"model": "model", "prompt": "What is said?", "max_tokens": 6, "logprobs": 0});
    let (_, answer) = request(cluster, pod, ENGINE_PORT, "POST", "/v1/completions", Some(&body), MINUTE).await.expect("an answer");
    let log_probs = answer.pointer("/choices/0/logprobs/token_logprobs").and_then(Value::as_array);
    let good = log_probs.is_some_and(|numbers| !numbers.is_empty() && numbers.iter().all(Value::is_f64));
    answer.pointer("/choices/0/text").and_then(Value::as_str).filter(|_| good).map(str::to_owned)
}

async fn users(cluster: &Cluster) -> Vec<User> {
    let users: Vec<User> = PODS.iter().map(|pod| User::of(cluster, pod)).collect();
    for user in &users {
        user.until_answered(2).await;
    }
    users
}

/// What each user got from the last few questions is `expected`.
async fn end_with(users: Vec<User>, expected: &Answer) -> Vec<Vec<Answer>> {
    let mut all = Vec::new();
    for user in users {
        user.until_answered(4).await;
        let answers = user.end().await;
        assert!(
            answers[answers.len() - 3..].iter().all(|answer| answer == expected),
            "{expected:?} is what version 1 answers: {answers:?}"
        );
        all.push(answers);
    }
    all
}

fn keeping_two() -> Value {
    let mut object = weightsync("run");
    object["spec"]["membership"] = json!({"keep": 2, "minReady": 2});
    object
}

#[tokio::test(flavor = "multi_thread")]
async fn group_rolls_back_to_the_specs_version_under_load() {
    Cluster::run("going-back", |cluster| async move {
        group_by(&cluster, PODS.len(), &keeping_two()).await;
        let (first, answer) = (served(&cluster, "sim-0").await, ask(&cluster, "sim-0").await);
        super::asks::train(&cluster, "trainer-0").await;
        publish_to(&cluster, "trainer-0", 2, 3).await;
        cluster.await_version("run", 2, 3, MINUTE).await;
        assert_ne!(served(&cluster, "sim-0").await, first);
        let users = users(&cluster).await;

        cluster.patch_weightsync("run", &json!({"spec": {"targetVersion": 1}})).await.unwrap();
        let status = cluster.await_version("run", 1, 3, MINUTE).await;
        assert_eq!(status["rolledBackFrom"], 2, "{status}");
        cluster.await_event(&["RolledBack"], MINUTE, |note| note.contains("version 1")).await;
        for answers in end_with(users, &answer).await {
            assert!(answers.iter().all(Option::is_some), "every question had a good answer: {answers:?}");
        }
        for pod in PODS {
            assert_eq!(served(&cluster, pod).await, first, "{pod}");
        }
        let (status, refused) = publish(&cluster, "trainer-0", 3, 0.0).await;
        assert_eq!((status, &refused["error"], &refused["retryable"]), (409, &json!("VersionPinned"), &json!(true)), "{refused}");
        cluster.patch_weightsync("run", &json!({"spec": {"targetVersion": null}})).await.unwrap();
        eventually("version 3 to be taken", MINUTE, || async {
            let (status, answer) = publish(&cluster, "trainer-0", 3, 0.0).await;
            // Until the members heard that the target is taken away.
            if status == 200 { Ok(()) } else { Err(answer) }
        })
        .await;
        cluster.await_version("run", 3, 3, MINUTE).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn poisoned_version_is_refused_by_canary_under_load() {
    Cluster::run("canary", |cluster| async move {
        let mut object = keeping_two();
        object["spec"]["canary"] = json!({"prompt": "Two and two is", "maxTokens": 4, "minLogProb": -4});
        group_by(&cluster, PODS.len(), &object).await;
        let (first, answer) = (served(&cluster, "sim-0").await, ask(&cluster, "sim-0").await);
        assert!(answer.is_some());
        let users = users(&cluster).await;

        let (status, refused) = publish_poisoned(&cluster, "trainer-0", 2).await;
        assert_eq!((status, &refused["error"], &refused["retryable"]), (409, &json!("VersionRefused"), &json!(false)), "{refused}");
        assert!(refused["message"].as_str().unwrap().contains("the canary refuse"), "{refused}");
        cluster.await_event(&["VersionRefused"], MINUTE, |note| note.contains("version 2: ") && note.contains("version 1 stays")).await;
        cluster
            .await_status("run", "the refused version is named, and version 1 serves", MINUTE, |status| {
                let degraded = status["conditions"].as_array().into_iter().flatten().find(|one| one["type"] == "Degraded");
                let named = degraded.is_some_and(|one| one["status"] == "True" && one["reason"] == "VersionRefused");
                let is = named && status["refused"] == json!([2]) && status["version"] == 1 && status["replicas"]["ready"] == 3;
                if is { Ok(()) } else { Err("not yet".to_owned()) }
            })
            .await;
        for pod in PODS {
            cluster.await_ready(pod, MINUTE).await;
            assert_eq!(served(&cluster, pod).await, first, "{pod}");
        }
        for answers in end_with(users, &answer).await {
            // An engine computes with the poisoned version between its switch and its answer to the canary, which holds it; a request that
            // runs then ends as a mixture. After that it answers as before: no one brings the version a second time.
            let whole = |one: &&Answer| **one == answer;
            let mut later = answers.iter().skip_while(whole).skip_while(|one| !whole(one));
            assert!(later.all(|one| *one == answer), "{answers:?}");
        }
        let (_, again) = publish(&cluster, "trainer-0", 2, 0.0).await;
        assert_eq!(again["error"], "VersionRefused", "good weights under the number: {again}");
        publish_to(&cluster, "trainer-0", 3, 3).await;
        let status = cluster.await_version("run", 3, 3, MINUTE).await;
        assert_eq!(status["refused"], json!([2]), "it stays known");
    })
    .await;
}
