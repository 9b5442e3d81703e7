//! Engines that serve while they load: the answers to a client that sends requests all the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::gpu::GpuBench;
use super::support::{Bench, held, post};
use crate::mixed::{Mixed, now_ms};
use weightsync_core::protocol::{MixedWindow, PausePolicy};

const PROMPT: &str = "the same prompt";

struct Answer {
    begin_ms: u64,
    end_ms: u64,
    choice: Value,
}

/// Sends one request after the other.
struct Client {
    asks: JoinHandle<Vec<Answer>>,
    ended: Arc<AtomicBool>,
    count: watch::Receiver<usize>,
}

impl Client {
    fn start(on: &GpuBench) -> Self {
        let url = format!("{}/v1/completions", on.bench.simulator.url());
        let (ended, (counted, count)) = (Arc::new(AtomicBool::new(false)), watch::channel(0));
        let ends = ended.clone();
        let asks = tokio::spawn(async move {
            let mut answers = Vec::new();
            while !ends.load(Ordering::Acquire) {
                let begin_ms = now_ms();
                let body = json!({"model": "model", "prompt": PROMPT, "max_tokens": 4, "logprobs": 1});
                let (status, answer) = post(&url, &body).await;
                let choice = answer["choices"][0].clone();
                if status == 200 && choice["finish_reason"] != json!("abort") {
                    answers.push(Answer { begin_ms, end_ms: now_ms(), choice });
                }
                counted.send_modify(|count| *count += 1);
            }
            answers
        });
        Self { asks, ended, count }
    }

    /// Waits until a new request began and ended.
    async fn asked(&mut self) {
        let after = *self.count.borrow() + 2;
        self.count.wait_for(|count| *count >= after).await.unwrap();
    }

    async fn end(self) -> Vec<Answer> {
        self.ended.store(true, Ordering::Release);
        self.asks.await.unwrap()
    }
}

/// Feeds version 2 while a client sends requests. Returns its answers of no version, and the windows of the engine.
async fn feed_and_ask(on: &GpuBench, pause: PausePolicy) -> (Vec<Answer>, Vec<MixedWindow>) {
    let old = on.bench.complete(PROMPT, 4).await;
    let mut client = Client::start(on);
    client.asked().await;
    let (version, mut job) = (on.version(2), on.job(2));
    job.terms.pause = pause;
    let mut install = on.engine.begin_device(&job).await.unwrap();
    for bucket in version.layout.buckets() {
        install.bucket(version.bucket(bucket)).await.unwrap();
        client.asked().await;
    }
    install.finish(held(2)).await.unwrap();
    client.asked().await;
    let answers = client.end().await;
    let new = on.bench.complete(PROMPT, 4).await;
    assert!(answers.iter().any(|answer| answer.choice == old) && answers.iter().any(|answer| answer.choice == new));
    let mixed = answers.into_iter().filter(|answer| answer.choice != old && answer.choice != new).collect();
    (mixed, on.engine.mixed_windows())
}

#[tokio::test]
async fn answer_of_no_version_lies_in_the_engines_window() {
    for pause in [PausePolicy::AbortAwake, PausePolicy::External] {
        let on = GpuBench::start("lmdeploy", 1, Some(&[]), |_| {}).await;
        let before = now_ms();
        let (mixed, windows) = feed_and_ask(&on, pause).await;
        assert!(!mixed.is_empty(), "{pause:?}: the engine serves while buckets go in");
        let [window] = windows.as_slice() else { panic!("{pause:?}: {windows:?}") };
        let end = window.end_ms.unwrap();
        assert!(window.version == 2 && before <= window.begin_ms && end <= now_ms(), "{pause:?}: {window:?}");
        for answer in mixed {
            assert!(
                answer.end_ms >= window.begin_ms && answer.begin_ms <= end,
                "{pause:?}: {window:?}, {answer:?}",
                answer = answer.choice
            );
        }
    }
}

#[tokio::test]
async fn engine_that_is_gated_answers_no_mixture_and_has_no_window() {
    // An engine that could be fed awake also sleeps, unless its users require it awake.
    for (process, pause) in [(None, PausePolicy::AbortAwake), (Some(&[][..]), PausePolicy::Abort)] {
        let on = GpuBench::start("lmdeploy", 1, process, |_| {}).await;
        let (mixed, windows) = feed_and_ask(&on, pause).await;
        assert!(mixed.is_empty() && windows.is_empty(), "{} mixed answers, {windows:?}", mixed.len());
    }
}

#[tokio::test]
async fn load_that_breaks_leaves_a_window_until_the_engine_is_held() {
    let on = GpuBench::start("lmdeploy", 1, Some(&[]), |_| {}).await;
    let install = on.version(2).feed_some(on.engine.as_ref(), &on.job(2), 1).await;
    assert!(matches!(on.engine.mixed_windows().as_slice(), [MixedWindow { version: 2, end_ms: None, .. }]));
    install.abandon("the stream broke").await;
    assert!(on.asleep().await);
    let broken = on.engine.mixed_windows();
    assert!(matches!(broken.as_slice(), [MixedWindow { version: 2, end_ms: Some(_), .. }]), "{broken:?}");
    // Paused until it is complete, it serves no second mixture.
    on.install(3).await.unwrap();
    assert_eq!(on.engine.mixed_windows(), broken);
}

#[tokio::test]
async fn engine_that_its_trainer_paused_has_no_window() {
    let bench = Bench::start("vllm").await;
    let external = |version| {
        let mut job = bench.job(version);
        job.terms.pause = PausePolicy::External;
        job
    };
    post(&format!("{}/pause?mode=keep", bench.simulator.url()), &json!({})).await;
    assert!(bench.is_paused().await);
    bench.engine.install(&external(2)).await.unwrap();
    assert_eq!(bench.engine.mixed_windows(), []);
    post(&format!("{}/resume", bench.simulator.url()), &json!({})).await;
    bench.engine.install(&external(3)).await.unwrap();
    let windows = bench.engine.mixed_windows();
    assert!(matches!(windows.as_slice(), [MixedWindow { version: 3, end_ms: Some(_), .. }]), "{windows:?}");
}

#[test]
fn windows_are_the_last_eight_in_order() {
    let mixed = Mixed::default();
    for version in 1..=10 {
        mixed.open(version, version * 10);
    }
    mixed.close(105);
    let windows = mixed.windows();
    assert_eq!(windows.len(), 8);
    assert_eq!(windows[0], MixedWindow { version: 3, begin_ms: 30, end_ms: Some(40) });
    assert_eq!(windows[7], MixedWindow { version: 10, begin_ms: 100, end_ms: Some(105) });
    mixed.open(11, 110);
    mixed.withdraw();
    assert_eq!(mixed.windows()[6], windows[7], "only the open one is withdrawn");
}
