//! Successful installs, under every policy, and an adapter's report about its server.

use std::time::Duration;

use serde_json::json;

use super::support::{Bench, HOUR, SOON, adapter, held, until};
use crate::{ApiKey, EngineError, Holding, Settling};
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};
use weightsync_testkit::simulator::{Fault, FaultRule, Faults};

const KINDS: [&str; 2] = ["vllm", "sglang"];

#[tokio::test]
async fn installed_version_is_what_a_fresh_server_serves() {
    for kind in KINDS {
        let bench = Bench::start(kind).await;
        for version in [2, 3] {
            let before = bench.complete("the same prompt", 8).await;
            let report = bench.engine.install(&bench.job(version)).await.unwrap();
            let steps: Vec<_> = report.steps_ms.iter().map(|(step, _)| step.as_str()).collect();
            assert_eq!(steps, ["pause", "load", "check", "resume", "probe"], "{kind}");
            assert_eq!(report.start, bench.engine.health(SOON).await.unwrap().start, "{kind}: the install is no restart");
            assert_eq!(bench.digest().await, bench.fresh_digest(version).await, "{kind}");
            assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Version(held(version)), "{kind}");
            assert!(!bench.is_paused().await, "{kind}");
            assert_ne!(bench.complete("the same prompt", 8).await, before, "{kind}");
        }
    }
}

#[tokio::test]
async fn the_version_is_written_after_the_load_and_the_mark_before_it() {
    for (kind, load) in [("vllm", "POST /collective_rpc"), ("sglang", "POST /update_weights_from_disk")] {
        let bench = Bench::start(kind).await;
        bench.engine.install(&bench.job(2)).await.unwrap();
        let calls = bench.calls().await;
        let place = |wanted: &str| calls.iter().enumerate().filter(|(_, call)| *call == wanted).map(|(at, _)| at).collect::<Vec<_>>();
        let (written, loaded) = (place("POST /update_weight_version"), place(load));
        assert_eq!((written.len(), loaded.len()), (2, 1), "{kind}: {calls:?}");
        assert!(written[0] < loaded[0] && loaded[0] < written[1], "{kind}: {calls:?}");
    }
}

#[tokio::test]
async fn a_probe_tells_size_and_version() {
    for (kind, version) in [("vllm", "0.32.0"), ("sglang", "0.5.23")] {
        let bench = Bench::start_with(kind, Faults::default(), |options| options.world_size = 4).await;
        let facts = bench.engine.probe(SOON).await.unwrap();
        assert_eq!((facts.kind.as_str(), facts.server_version.as_str(), facts.size), (kind, version, 4));
        assert_eq!(facts.url, bench.simulator.url());
    }
}

/// Story F19.
#[tokio::test]
async fn the_size_is_what_the_server_says_not_what_is_expected() {
    for kind in KINDS {
        let faults = Faults { world_size: Some(8), ..Faults::default() };
        let bench = Bench::start_with(kind, faults, |options| options.world_size = 4).await;
        assert_eq!(bench.engine.probe(SOON).await.unwrap().size, 8, "{kind}");
        bench.set_faults(Faults { world_size: Some(0), ..Faults::default() }).await;
        assert!(matches!(bench.engine.probe(SOON).await, Err(EngineError::BadReply { .. })), "{kind}");
    }
}

#[tokio::test]
async fn server_without_dev_mode_is_refused_with_the_option() {
    let bench = Bench::start_with("vllm", Faults::default(), |options| options.dev_mode = false).await;
    let refusal = bench.engine.probe(SOON).await.unwrap_err().to_string();
    assert!(refusal.contains("VLLM_SERVER_DEV_MODE=1"), "{refusal}");
}

#[tokio::test]
async fn an_api_key_is_shown_and_never_printed() {
    for kind in KINDS {
        let key = ApiKey::new(" s3cret-of-the-engine\n").unwrap();
        let bench = Bench::start_with(kind, Faults::default(), |options| options.api_key = Some(key.text().to_owned())).await;
        bench.engine.probe(SOON).await.unwrap();
        bench.engine.install(&bench.job(2)).await.unwrap();
        for wrong in [None, Some(ApiKey::new("another").unwrap())] {
            let stranger = adapter(kind, &bench.simulator.url(), wrong, None);
            let refusal = stranger.probe(SOON).await.unwrap_err();
            assert!(refusal.to_string().contains("apiKeySecretRef"), "{kind}: {refusal}");
            assert!(!format!("{refusal:?} {key:?}").contains("s3cret"), "{kind}");
        }
    }
}

#[tokio::test]
async fn kept_requests_continue_and_aborted_ones_end() {
    for (kind, pause, finish) in
        [("vllm", PausePolicy::Keep, "length"), ("vllm", PausePolicy::Abort, "abort"), ("vllm", PausePolicy::Drain, "length")]
    {
        let bench = Bench::start_with(kind, Faults { token_ms: 10, ..Faults::default() }, |_| {}).await;
        let old = bench.complete("a long prompt", 30).await["text"].clone();
        let (answer, installed) = tokio::join!(bench.complete("a long prompt", 30), async {
            until("the request", || async { bench.get("/simulator/digest").await["requests"] == json!(1) }).await;
            let mut job = bench.job(2);
            job.terms.pause = pause;
            bench.engine.install(&job).await
        });
        installed.unwrap();
        assert_eq!(answer["finish_reason"], finish, "{pause:?}");
        assert_eq!(answer["text"] == old, pause == PausePolicy::Drain, "{pause:?}: {answer}");
    }
}

#[tokio::test]
async fn a_cache_of_old_weights_is_emptied_unless_the_policy_keeps_it() {
    for kind in KINDS {
        let bench = Bench::start(kind).await;
        for (version, kv_cache, fresh) in [(2, KvCachePolicy::Reset, true), (3, KvCachePolicy::Keep, false)] {
            bench.complete("a shared prefix", 4).await;
            let mut job = bench.job(version);
            job.terms.kv_cache = kv_cache;
            bench.engine.install(&job).await.unwrap();
            let shared = bench.complete("a shared prefix", 4).await;
            let other = Bench::start(kind).await;
            other.engine.install(&other.job(version)).await.unwrap();
            assert_eq!(shared == other.complete("a shared prefix", 4).await, fresh, "{kind} {kv_cache:?}");
        }
    }
}

#[tokio::test]
async fn a_cache_is_emptied_even_while_kept_requests_hold_it() {
    for kind in KINDS {
        let bench = Bench::start_with(kind, Faults { token_ms: 10, ..Faults::default() }, |_| {}).await;
        let (_, installed) = tokio::join!(bench.complete("holds its cache", 30), async {
            until("the request", || async { bench.get("/simulator/digest").await["requests"] == json!(1) }).await;
            bench.engine.install(&bench.job(2)).await
        });
        installed.unwrap();
    }
}

#[tokio::test]
async fn with_external_pause_the_engine_is_neither_paused_nor_resumed() {
    for kind in KINDS {
        let bench = Bench::start(kind).await;
        let mut job = bench.job(2);
        job.terms.pause = PausePolicy::External;
        bench.engine.install(&job).await.unwrap();
        let calls = bench.calls().await;
        let touched = |call: &String| ["/pause", "/resume", "_generation"].iter().any(|path| call.contains(path));
        assert!(!calls.iter().any(touched), "{kind}: {calls:?}");
        assert_eq!(bench.digest().await, bench.fresh_digest(2).await, "{kind}");
    }
}

#[tokio::test]
async fn a_pause_that_an_earlier_life_left_is_undone() {
    for (kind, path, body) in [("vllm", "/pause?mode=keep", json!({})), ("sglang", "/pause_generation", json!({"mode": "in_place"}))] {
        let bench = Bench::start(kind).await;
        assert!(!bench.engine.settle(&Settling::LEFT_PAUSED, SOON).await.unwrap().resumed, "{kind}");
        super::support::post(&format!("{}{path}", bench.simulator.url()), &body).await;
        assert!(bench.is_paused().await, "{kind}");
        assert!(bench.engine.settle(&Settling::LEFT_PAUSED, SOON).await.unwrap().resumed, "{kind}");
        assert!(!bench.is_paused().await, "{kind}");
    }
}

#[tokio::test]
async fn health_during_a_load_asks_the_front_only() {
    for kind in KINDS {
        let bench = Bench::start_with(kind, Faults { load_ms: 300, ..Faults::default() }, |_| {}).await;
        let before = bench.engine.health(SOON).await.unwrap().start;
        let loads = |calls: Vec<String>| calls.iter().any(|call| call.contains("collective_rpc") || call.contains("from_disk"));
        let job = bench.job(2);
        let (installed, during) = tokio::join!(bench.engine.install(&job), async {
            until("the load", || async { loads(bench.calls().await) }).await;
            bench.engine.health(Duration::from_millis(200)).await
        });
        assert_eq!(during.unwrap().start, before, "{kind}");
        assert_eq!(installed.unwrap().start, before, "{kind}");
    }
}

#[tokio::test]
async fn a_restart_is_another_start_however_fast_it_was() {
    for kind in KINDS {
        let mut bench = Bench::start(kind).await;
        let first = bench.engine.health(SOON).await.unwrap().start;
        assert_eq!(bench.engine.health(SOON).await.unwrap().start, first, "{kind}");
        bench.restart().await;
        assert_ne!(bench.engine.health(SOON).await.unwrap().start, first, "{kind}");
        assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Startup, "{kind}");
    }
}

#[tokio::test]
async fn ended_process_is_noticed_and_successor_is_not_it() {
    for kind in KINDS {
        let mut bench = Bench::start(kind).await;
        // An agent that took this for a loss would send requests without a break to an engine that has not started yet, and use its
        // processor.
        let lost = tokio::time::timeout(Duration::from_millis(20), bench.engine.until_lost()).await;
        assert!(lost.is_err(), "{kind}: anyone who was never seen cannot be lost");
        let first = bench.engine.health(SOON).await.unwrap().start;
        assert_eq!(bench.engine.health(SOON).await.unwrap().start, first, "{kind}");
        assert!(bench.engine.is_still(&first), "{kind}");
        let lost = tokio::time::timeout(Duration::from_millis(20), bench.engine.until_lost()).await;
        assert!(lost.is_err(), "{kind}: it is there");
        let report = bench.engine.install(&bench.job(2)).await.unwrap();
        assert!(bench.engine.is_still(&report.start), "{kind}");
        bench.restart().await;
        assert!(!bench.engine.is_still(&report.start), "{kind}: it answers already, and was not asked");
        tokio::time::timeout(SOON, bench.engine.until_lost()).await.unwrap();
        let second = bench.engine.health(SOON).await.unwrap().start;
        assert_ne!(second, report.start, "{kind}");
        assert!(bench.engine.is_still(&second) && !bench.engine.is_still(&report.start), "{kind}");
    }
}

#[tokio::test]
async fn engine_with_a_changed_label_counts_as_another_start() {
    let bench = Bench::start("vllm").await;
    let report = bench.engine.install(&bench.job(2)).await.unwrap();
    let url = format!("{}/update_weight_version", bench.simulator.url());
    super::support::post(&url, &json!({"new_version": "default"})).await;
    assert_ne!(bench.engine.health(SOON).await.unwrap().start, report.start);
}

#[tokio::test]
async fn sglang_adapter_says_before_a_byte_moves_it_cannot_drain() {
    let bench = Bench::start("sglang").await;
    let refusal = bench.engine.accepts(PausePolicy::Drain, KvCachePolicy::Reset).unwrap_err().to_string();
    assert!(refusal.contains("set update.pause to Keep"), "{refusal}");
    let mut job = bench.job(2);
    job.terms.pause = PausePolicy::Drain;
    let error = bench.engine.install(&job).await.unwrap_err();
    assert!(!error.is_dirty() && !bench.is_paused().await, "{error}");
}

#[tokio::test]
async fn simulated_sglangs_flag_from_a_foreign_probe_is_healed() {
    let bench = Bench::start_with("sglang", Faults { load_ms: 200, ..Faults::default() }, |options| {
        options.health_timeout = Duration::from_millis(20);
    })
    .await;
    let url = format!("{}/health", bench.simulator.url());
    let job = bench.job(2);
    let (installed, probed) = tokio::join!(bench.engine.install(&job), async {
        until("the pause", || async { bench.is_paused().await }).await;
        super::support::client().get(url).send().await.unwrap().status()
    });
    assert_eq!(probed, 503, "a kubelet that probes /health meets this");
    installed.unwrap();
    assert!(!bench.is_paused().await);
}

/// A server with `--api-key` and another `--admin-api-key`, as SGLang 0.5.23 answered to the first.
#[tokio::test]
async fn simulated_sglang_key_that_opens_no_update_is_refused() {
    let refused = |path: &str| {
        let fault = Fault::Answer { status: 401, body: json!({"error": "Unauthorized"}) };
        FaultRule { path: path.to_owned(), after: 0, times: None, fault }
    };
    let paths = ["/weights_checker", "/pause_generation", "/continue_generation", "/update_weight_version", "/update_weights_from_disk"];
    let bench = Bench::start("sglang").await;
    bench.set_faults(Faults { rules: paths.map(refused).to_vec(), ..Faults::default() }).await;
    let error = bench.engine.probe(SOON).await.unwrap_err().to_string();
    assert!(error.contains("for updates of weights") && error.contains("the same value for both"), "{error}");
    let mut job = bench.job(2);
    job.terms.timeout = HOUR;
    let error = tokio::time::timeout(SOON, bench.engine.install(&job)).await.expect("not after the whole time of an install").unwrap_err();
    assert!(error.to_string().contains("answered 401"), "{error}");
}

#[tokio::test]
async fn busy_simulated_sglang_passes_by_sign_of_another_request() {
    let bench = Bench::start("sglang").await;
    let rule = FaultRule { path: "/generate".into(), after: 0, times: None, fault: Fault::Hang };
    bench.set_faults(Faults { rules: vec![rule], ..Faults::default() }).await;
    assert!(!bench.engine.is_stuck(Duration::from_secs(2)).await);
}

#[tokio::test]
async fn two_updates_of_one_engine_never_meet() {
    for kind in KINDS {
        let bench = Bench::start_with(kind, Faults { load_ms: 50, ..Faults::default() }, |_| {}).await;
        let (second, third) = (bench.job(2), bench.job(3));
        let (one, other) = tokio::join!(bench.engine.install(&second), bench.engine.install(&third));
        one.unwrap();
        other.unwrap();
        let loads = ["POST /collective_rpc", "POST /update_weights_from_disk"];
        let marked: Vec<_> =
            bench.calls().await.into_iter().filter(|call| *call == "POST /update_weight_version" || loads.contains(&&**call)).collect();
        // Mark, load, version; and again.
        let is_load: Vec<_> = marked.iter().map(|call| loads.contains(&&**call)).collect();
        assert_eq!(is_load, [false, true, false, false, true, false], "{kind}: {marked:?}");
        let Holding::Version(held) = bench.engine.holding(SOON).await.unwrap() else { panic!("a version") };
        assert_eq!(bench.digest().await, bench.fresh_digest(held.version).await, "{kind}");
    }
}
