//! What users of a Service see while its pods come and go and versions advance: every answer is of a version that was allowed at that
//! moment, and none fails but for a pod that was taken away.

use std::time::{SystemTime, UNIX_EPOCH};

use k8s_openapi::api::core::v1::Service;
use serde::Deserialize;
use serde_json::{Value, json};

use super::asks::{publish, train};
use super::cluster::{Cluster, START, eventually};
use super::fixtures::{ASKER_PORT, ENGINE_PORT, asker};
use super::http::{get, post};

/// How long a pod that became unready may still be asked: the kubelet's and the endpoints' way to the node's rules, on busy cores.
const ENDPOINTS: f64 = 5.0;
/// How long requests may fail after a pod was taken away.
const TAKEN_AWAY: f64 = 15.0;

/// One answer, or what came instead.
#[derive(Debug, Deserialize)]
struct Answer {
    began: f64,
    ended: f64,
    status: u16,
    error: Option<String>,
    logprobs: Vec<f64>,
}

/// Requests that go on all the time, and what happened meanwhile.
pub struct Users {
    /// Versions that every ready replica served from here on: when their publish began and ended.
    published: Vec<(u64, f64, f64)>,
    /// When pods were taken away.
    taken: Vec<f64>,
}

/// Seconds since 1970: pods have this machine's clock.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

impl Users {
    /// A Service over the rollouts, and a pod that asks it from now on. Everybody ready serves `version`.
    pub async fn begin(cluster: &Cluster, version: u64) -> Self {
        let service = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": "rollouts"},
            "spec": {"selector": {"group": "rollout"}, "ports": [{"port": ENGINE_PORT}]}
        });
        cluster.apply(&service).await.unwrap();
        let made = cluster.api::<Service>().get("rollouts").await.unwrap();
        let address = made.spec.and_then(|spec| spec.cluster_ip).expect("a Service has an address");
        cluster.create_pod(asker(&format!("http://{address}:{ENGINE_PORT}/v1/completions"))).await;
        cluster.await_ready("asker", START).await;
        let users = Self { published: vec![(version, 0.0, now())], taken: Vec::new() };
        users.hear(cluster, 5).await;
        users
    }

    /// Waits until so many answers came that began after the last publish.
    async fn hear(&self, cluster: &Cluster, wanted: usize) {
        let since = self.published.last().map_or(0.0, |(_, _, ended)| *ended);
        eventually("users get answers", START, || async {
            let heard = answers(cluster).await.iter().filter(|answer| answer.status == 200 && answer.began > since).count();
            if heard >= wanted { Ok(()) } else { Err(format!("{heard} of {wanted}")) }
        })
        .await;
    }

    /// The trainer trains and publishes; then some answers are awaited, so that it is known what this version answers.
    pub async fn publish(&mut self, cluster: &Cluster, version: u64, pace: f64) -> Value {
        train(cluster, "trainer-0").await;
        let began = now();
        let (status, answer) = publish(cluster, "trainer-0", version, pace).await;
        assert_eq!(status, 200, "anyone who is there gets version {version}: {answer}");
        self.published.push((version, began, now()));
        // Enough to know what it answers, and a pace at which a server can start next to it.
        self.hear(cluster, 15).await;
        answer
    }

    /// Awaits something while no user asks: a server may round differently what it computes together with other requests.
    pub async fn resting<T>(&self, cluster: &Cluster, awaited: impl Future<Output = T>) -> T {
        let (status, answer) = post(cluster, "asker", ASKER_PORT, "/rest", &json!({})).await;
        assert_eq!(status, 200, "{answer}");
        let done = awaited.await;
        let (status, answer) = post(cluster, "asker", ASKER_PORT, "/go-on", &json!({})).await;
        assert_eq!(status, 200, "{answer}");
        done
    }

    /// A pod was taken away at that time.
    pub fn taken_away(&mut self, at: f64) {
        self.taken.push(at);
    }

    /// Looks at everything that was answered; answers how many answers there were.
    pub async fn end(self, cluster: &Cluster) -> usize {
        // The first questions may be put before the node has the Service's rules.
        let all: Vec<Answer> = answers(cluster).await.into_iter().skip_while(|answer| answer.status != 200).collect();
        let taken_lately = |answer: &Answer| self.taken.iter().any(|at| answer.ended > *at && answer.began < at + TAKEN_AWAY);
        for answer in all.iter().filter(|answer| answer.status != 200) {
            let error = answer.error.as_deref().unwrap_or_default();
            assert!(taken_lately(answer), "a request failed and no pod was taken away: {error}: {answer:?}");
        }
        let served: Vec<&Answer> = all.iter().filter(|answer| answer.status == 200).collect();
        let known: Vec<(u64, &[f64])> = (0..self.published.len()).map(|at| (self.published[at].0, self.settled(at, &served))).collect();
        for answer in &served {
            let allowed = self.allowed(answer);
            let Some(version) = nearest(&known, &answer.logprobs) else {
                // A request that is kept through a switch is answered by both versions.
                assert!(allowed.len() > 1, "of no version that was published, {} was the newest: {answer:?}", allowed[0]);
                continue;
            };
            assert!(allowed.contains(&version), "an answer of version {version}, allowed were {allowed:?}: {answer:?}");
        }
        served.len()
    }

    /// What one version answers: what was answered last before the next one was published.
    fn settled<'a>(&self, at: usize, served: &[&'a Answer]) -> &'a [f64] {
        let (version, _, ended) = self.published[at];
        let next = self.published.get(at + 1).map_or(f64::INFINITY, |(_, began, _)| *began);
        let last = served.iter().rfind(|answer| answer.began > ended && answer.ended < next);
        &last.unwrap_or_else(|| panic!("nothing was answered while version {version} was the newest")).logprobs
    }

    /// Versions that an answer may be of: the newest that was complete when it began, any that was being published until it ended, and the
    /// one before for as long as endpoints take.
    fn allowed(&self, answer: &Answer) -> Vec<u64> {
        let newest = self.published.iter().rposition(|(_, _, ended)| ended + ENDPOINTS < answer.began).unwrap_or(0);
        self.published[newest..].iter().filter(|(_, began, _)| *began < answer.ended).map(|(version, _, _)| *version).collect()
    }
}

/// The version whose answer is nearest, if it is clearly that one: what else a server computes next to a request changes the last digits.
fn nearest(known: &[(u64, &[f64])], logprobs: &[f64]) -> Option<u64> {
    let mut distances: Vec<(f64, u64)> = known.iter().map(|(version, other)| (distance(other, logprobs), *version)).collect();
    distances.sort_by(|a, b| a.0.total_cmp(&b.0));
    let second = distances.get(1).map_or(f64::INFINITY, |(distance, _)| *distance);
    distances.first().filter(|(distance, _)| *distance < second / 3.0).map(|(_, version)| *version)
}

fn distance(one: &[f64], other: &[f64]) -> f64 {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max)
}

async fn answers(cluster: &Cluster) -> Vec<Answer> {
    let (_, answers) = get(cluster, "asker", ASKER_PORT, "/answers").await;
    serde_json::from_value(answers).unwrap()
}
