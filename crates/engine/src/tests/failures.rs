//! Failing installs: they end within the deadline, and report the true state of the engine.

use std::time::Duration;

use serde_json::json;

use super::support::{Bench, SOON, TENSORS, adapter, ended_by, post, until, write_checkpoint};
use crate::{EngineError, Holding, InstallError, Settling};
use weightsync_core::protocol::{CanaryPolicy, PausePolicy};
use weightsync_testkit::simulator::{Fault, FaultRule, Faults, LoadFault};

const VLLM: Calls = Calls { kind: "vllm", pause: "/pause", load: "/collective_rpc", label: "/update_weight_version", resume: "/resume" };
const SGLANG: Calls = Calls {
    kind: "sglang",
    pause: "/pause_generation",
    load: "/update_weights_from_disk",
    label: "/update_weight_version",
    resume: "/continue_generation",
};

#[derive(Clone, Copy)]
struct Calls {
    kind: &'static str,
    pause: &'static str,
    load: &'static str,
    label: &'static str,
    resume: &'static str,
}

fn rule(path: &str, fault: Fault) -> Faults {
    rules(vec![FaultRule { path: path.to_owned(), after: 0, times: None, fault }])
}

fn rules(rules: Vec<FaultRule>) -> Faults {
    Faults { rules, ..Faults::default() }
}

async fn install_with(bench: &Bench, faults: Faults, timeout: Duration) -> InstallError {
    bench.set_faults(faults).await;
    let mut job = bench.job(2);
    job.terms.timeout = timeout;
    ended_by(timeout, bench.engine.install(&job)).await.unwrap_err()
}

/// The engine runs, unmarked, with what it started with.
async fn assert_untouched(bench: &Bench, what: &str) {
    bench.set_faults(Faults::default()).await;
    until("the resume", || async { !bench.is_paused().await }).await;
    assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Startup, "{what}");
    assert_eq!(bench.digest().await, bench.fresh_digest(1).await, "{what}");
    bench.engine.install(&bench.job(3)).await.unwrap();
}

/// The engine is paused and marked, and a full install heals it.
async fn assert_dirty_until_fed(bench: &Bench, what: &str) {
    bench.set_faults(Faults::default()).await;
    assert!(bench.is_paused().await, "{what}");
    assert!(matches!(bench.engine.holding(SOON).await.unwrap(), Holding::HalfAnUpdate(_)), "{what}");
    bench.engine.install(&bench.job(3)).await.unwrap();
    assert_eq!(bench.digest().await, bench.fresh_digest(3).await, "{what}");
    assert!(!bench.is_paused().await, "{what}");
}

#[tokio::test]
async fn a_pause_that_is_refused_leaves_the_engine_as_it_was() {
    for calls in [VLLM, SGLANG] {
        for fault in [Fault::unavailable(), Fault::not_success(), Fault::error_inside(), Fault::Disconnect] {
            let bench = Bench::start(calls.kind).await;
            let error = install_with(&bench, rule(calls.pause, fault.clone()), SOON).await;
            assert_eq!((error.step, error.is_dirty()), ("pause", false), "{} {fault:?}: {error}", calls.kind);
            assert_untouched(&bench, calls.kind).await;
        }
    }
}

/// Story F69.
#[tokio::test]
async fn a_pause_that_hangs_ends_with_the_deadline_and_is_undone() {
    for calls in [VLLM, SGLANG] {
        // Whether the request had an effect or not: in both cases there is no response.
        for fault in [Fault::Hang, Fault::LoseReply] {
            let bench = Bench::start(calls.kind).await;
            let error = install_with(&bench, rule(calls.pause, fault), Duration::from_secs(1)).await;
            assert_eq!((error.step, error.is_dirty()), ("pause", false), "{error}");
            assert!(matches!(error.source, EngineError::Timeout { .. }), "{error}");
            assert!(!bench.is_paused().await, "{}: resumed within the deadline, not by a later call", calls.kind);
            assert_untouched(&bench, calls.kind).await;
        }
    }
}

/// Stories F12 and F47.
#[tokio::test]
async fn an_answer_200_without_success_is_a_failed_load() {
    for calls in [VLLM, SGLANG] {
        for fault in [
            Fault::not_success(),
            Fault::error_inside(),
            Fault::Answer { status: 200, body: json!({"success": "true", "results": "None"}) },
        ] {
            let bench = Bench::start(calls.kind).await;
            let error = install_with(&bench, rule(calls.load, fault.clone()), SOON).await;
            assert_eq!((error.step, error.is_dirty()), ("load", true), "{} {fault:?}: {error}", calls.kind);
            assert_dirty_until_fed(&bench, calls.kind).await;
        }
    }
}

/// Story F46.
#[tokio::test]
async fn a_load_that_is_acknowledged_without_reading_is_found() {
    for calls in [VLLM, SGLANG] {
        let bench = Bench::start(calls.kind).await;
        let faults = Faults { load: Some(LoadFault::AcknowledgeUnread), ..Faults::default() };
        let error = install_with(&bench, faults, SOON).await;
        assert!(error.is_dirty() && error.to_string().contains("opened none of their files"), "{error}");
        assert_ne!(bench.digest().await, bench.fresh_digest(2).await);
        assert_dirty_until_fed(&bench, calls.kind).await;
    }
}

#[tokio::test]
async fn simulator_that_corrupts_a_tensor_shows_another_digest() {
    for calls in [VLLM, SGLANG] {
        for load in [LoadFault::SkipTensor, LoadFault::Corrupt] {
            let bench = Bench::start_with(calls.kind, Faults { load: Some(load), ..Faults::default() }, |_| {}).await;
            bench.engine.install(&bench.job(2)).await.unwrap();
            assert_ne!(bench.digest().await, bench.fresh_digest(2).await, "{load:?}");
        }
    }
}

/// Story F75.
#[tokio::test]
async fn engine_that_never_answers_costs_only_the_deadline() {
    for calls in [VLLM, SGLANG] {
        let bench = Bench::start(calls.kind).await;
        bench.set_faults(rule("*", Fault::Hang)).await;
        let (engine, deadline) = (&bench.engine, Duration::from_millis(300));
        let calls = async {
            let probe = engine.probe(deadline).await.unwrap_err();
            assert!(matches!(probe, EngineError::Timeout { .. }), "{probe}");
            assert!(matches!(engine.health(deadline).await, Err(EngineError::Timeout { .. })));
            assert!(matches!(engine.settle(&Settling::LEFT_PAUSED, deadline).await.unwrap_err().source, EngineError::Timeout { .. }));
            assert!(matches!(engine.holding(deadline).await, Err(EngineError::Timeout { .. })));
            assert!(engine.put_back(deadline).await.is_err());
        };
        ended_by(5 * deadline, calls).await;
        let error = install_with(&bench, rule("*", Fault::Hang), Duration::from_millis(500)).await;
        assert_eq!((error.step, error.is_dirty()), ("start", false), "{error}");
    }
}

/// Story F04.
#[tokio::test]
async fn address_without_a_listener_is_named() {
    for calls in [VLLM, SGLANG] {
        let engine = adapter(calls.kind, "http://127.0.0.1:1", None, None);
        let error = engine.probe(SOON).await.unwrap_err();
        assert!(matches!(error, EngineError::Unreachable { .. }) && error.to_string().contains("127.0.0.1:1"), "{error}");
        assert!(error.to_string().ends_with(" cannot be reached: Connection refused (os error 111)"), "{error}");
        let bench = Bench::start_with(calls.kind, rule("*", Fault::unavailable()), |_| {}).await;
        assert!(matches!(bench.engine.probe(SOON).await, Err(EngineError::Status { status: 503, .. })));
        assert!(matches!(bench.engine.health(SOON).await, Err(EngineError::Status { status: 503, .. })));
    }
}

#[tokio::test]
async fn load_past_its_deadline_is_dirty_and_stays_paused() {
    for calls in [VLLM, SGLANG] {
        let bench = Bench::start(calls.kind).await;
        let error = install_with(&bench, Faults { load_ms: 1500, ..Faults::default() }, Duration::from_secs(1)).await;
        assert_eq!((error.step, error.is_dirty()), ("load", true), "{error}");
        assert!(matches!(error.source, EngineError::Timeout { .. }), "{error}");
        assert_dirty_until_fed(&bench, calls.kind).await;
    }
}

#[tokio::test]
async fn a_load_that_fails_half_way_is_cleared_and_repeated_once() {
    for calls in [VLLM, SGLANG] {
        let bench = Bench::start(calls.kind).await;
        bench.set_faults(Faults { load: Some(LoadFault::FailHalfwayOnce), ..Faults::default() }).await;
        bench.engine.install(&bench.job(2)).await.unwrap();
        assert_eq!(bench.digest().await, bench.fresh_digest(2).await, "{}", calls.kind);
    }
}

#[tokio::test]
async fn load_that_always_fails_midway_leaves_engine_marked_paused() {
    let bench = Bench::start("vllm").await;
    let error = install_with(&bench, Faults { load: Some(LoadFault::FailHalfway), ..Faults::default() }, SOON).await;
    assert_eq!((error.step, error.is_dirty()), ("load", true), "{error}");
    assert_ne!(bench.digest().await, bench.fresh_digest(1).await, "it is a mixture");
    assert_ne!(bench.digest().await, bench.fresh_digest(2).await, "it is a mixture");
    assert_dirty_until_fed(&bench, "vllm").await;
}

#[tokio::test]
async fn a_load_that_never_reached_the_engine_is_undone() {
    for calls in [VLLM, SGLANG] {
        for status in [401, 404, 405] {
            let bench = Bench::start(calls.kind).await;
            let fault = Fault::Answer { status, body: json!({"detail": "no"}) };
            let error = install_with(&bench, rule(calls.load, fault), SOON).await;
            assert_eq!((error.step, error.is_dirty()), ("load", false), "{error}");
            assert!(!bench.is_paused().await, "{}", calls.kind);
            assert_untouched(&bench, calls.kind).await;
        }
    }
}

#[tokio::test]
async fn unwritable_mark_stops_install_before_weights_change() {
    for calls in [VLLM, SGLANG] {
        let bench = Bench::start(calls.kind).await;
        let error = install_with(&bench, rule(calls.label, Fault::not_success()), SOON).await;
        assert_eq!((error.step, error.is_dirty()), ("pause", false), "{error}");
        assert!(!bench.calls().await.iter().any(|call| call.ends_with(calls.load)));
        assert_untouched(&bench, calls.kind).await;
    }
}

#[tokio::test]
async fn a_version_that_cannot_be_written_leaves_the_mark() {
    for calls in [VLLM, SGLANG] {
        let bench = Bench::start(calls.kind).await;
        let second = FaultRule { path: calls.label.to_owned(), after: 1, times: None, fault: Fault::unavailable() };
        let error = install_with(&bench, rules(vec![second]), SOON).await;
        assert_eq!((error.step, error.is_dirty()), ("check", true), "{error}");
        assert_dirty_until_fed(&bench, calls.kind).await;
    }
}

#[tokio::test]
async fn failed_resume_leaves_a_whole_engine_to_resume_later() {
    for calls in [VLLM, SGLANG] {
        let bench = Bench::start(calls.kind).await;
        let error = install_with(&bench, rule(calls.resume, Fault::unavailable()), SOON / 2).await;
        assert_eq!((error.step, error.is_dirty()), ("resume", false), "{error}");
        bench.set_faults(Faults::default()).await;
        assert!(matches!(bench.engine.holding(SOON).await.unwrap(), Holding::Version(_)));
        assert!(bench.engine.settle(&Settling::LEFT_PAUSED, SOON).await.unwrap().resumed);
    }
}

#[tokio::test]
async fn engine_that_cannot_generate_with_new_weights_is_out() {
    let bench = Bench::start("vllm").await;
    let error = install_with(&bench, rule("/v1/completions", Fault::Answer { status: 500, body: json!({"error": {}}) }), SOON).await;
    assert_eq!((error.step, error.is_dirty()), ("probe", true), "{error}");
    assert_dirty_until_fed(&bench, "vllm").await;
}

#[tokio::test]
async fn engine_that_dies_in_the_load_is_clean_once_back() {
    for calls in [VLLM, SGLANG] {
        let mut bench = Bench::start(calls.kind).await;
        let first = bench.engine.health(SOON).await.unwrap().start;
        let error = install_with(&bench, rule(calls.load, Fault::Crash), SOON).await;
        assert_eq!(error.step, "load", "{error}");
        bench.restart().await;
        assert_ne!(bench.engine.health(SOON).await.unwrap().start, first);
        assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Startup);
        assert!(!bench.is_paused().await);
        bench.engine.install(&bench.job(2)).await.unwrap();
    }
}

#[tokio::test]
async fn restart_between_load_and_check_is_not_installed() {
    for calls in [VLLM, SGLANG] {
        let mut bench = Bench::start(calls.kind).await;
        // The cache reset waits, so that the load has ended while the version is not yet written.
        let cache = if calls.kind == "vllm" { "/reset_prefix_cache" } else { "/flush_cache" };
        bench.set_faults(rule(cache, Fault::Slow { ms: 500 })).await;
        let (job, engine) = (bench.job(2), std::sync::Arc::clone(&bench.engine));
        let installing = tokio::spawn(async move { engine.install(&job).await });
        until("the cache reset", || async { bench.calls().await.iter().any(|call| call.ends_with(cache)) }).await;
        bench.restart().await;
        assert!(installing.await.unwrap().is_err());
        assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Startup, "{}", calls.kind);
        assert_eq!(bench.digest().await, bench.fresh_digest(1).await, "{}", calls.kind);
    }
}

#[tokio::test]
async fn version_lacking_a_tensor_is_refused_untouched() {
    for calls in [VLLM, SGLANG] {
        let bench = Bench::start(calls.kind).await;
        let directory = bench.folder.path().join("partial");
        write_checkpoint(&directory, &TENSORS[..3], 9);
        let mut job = bench.job(2);
        (job.directory, job.local_directory) = (directory.clone(), directory);
        let error = bench.engine.install(&job).await.unwrap_err();
        assert_eq!((error.step, error.is_dirty()), ("start", false), "{error}");
        assert!(error.to_string().contains("norm.weight"), "{error}");
        assert!(!bench.calls().await.iter().any(|call| call.starts_with("POST")), "{}", calls.kind);
    }
}

#[tokio::test]
async fn a_cancelled_install_ends_before_the_load_and_not_in_it() {
    for calls in [VLLM, SGLANG] {
        let bench = Bench::start(calls.kind).await;
        bench.set_faults(rule(calls.pause, Fault::Hang)).await;
        let job = bench.job(2);
        let (installed, ()) = tokio::join!(bench.engine.install(&job), async {
            until("the pause", || async { bench.calls().await.iter().any(|call| call.ends_with(calls.pause)) }).await;
            job.terms.cancel.cancel();
        });
        let error = installed.unwrap_err();
        assert!(matches!(error.source, EngineError::Cancelled) && !error.is_dirty(), "{error}");
        assert_untouched(&bench, calls.kind).await;

        bench.set_faults(Faults { load_ms: 200, ..Faults::default() }).await;
        let job = bench.job(2);
        let before = bench.calls().await.len();
        let (installed, ()) = tokio::join!(bench.engine.install(&job), async {
            until("the load", || async { bench.calls().await[before..].iter().any(|call| call.ends_with(calls.load)) }).await;
            job.terms.cancel.cancel();
        });
        installed.unwrap();
        assert_eq!(bench.digest().await, bench.fresh_digest(2).await);
    }
}

#[tokio::test]
async fn an_install_goes_on_when_its_caller_goes_away() {
    let bench = Bench::start_with("vllm", Faults { load_ms: 200, ..Faults::default() }, |_| {}).await;
    let job = bench.job(2);
    tokio::select! {
        _ = bench.engine.install(&job) => panic!("the load takes longer"),
        () = until("the load", || async { bench.calls().await.iter().any(|call| call.ends_with("/collective_rpc")) }) => {}
    }
    // The next change of the engine waits for it.
    bench.engine.settle(&Settling::LEFT_PAUSED, SOON).await.unwrap();
    assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Version(job.terms.version));
    assert!(!bench.is_paused().await);
}

#[tokio::test]
async fn a_failed_load_under_external_pause_is_paused_by_us() {
    let bench = Bench::start("vllm").await;
    bench.set_faults(Faults { load: Some(LoadFault::FailHalfway), ..Faults::default() }).await;
    let mut job = bench.job(2);
    job.terms.pause = PausePolicy::External;
    assert!(bench.engine.install(&job).await.unwrap_err().is_dirty());
    assert_dirty_until_fed(&bench, "a mixture must not serve, anyone who pauses otherwise").await;
}

#[tokio::test]
async fn a_probe_that_is_the_first_work_of_an_engine_kills_no_worker() {
    let bench = Bench::start_with("vllm", Faults { cold_amx: true, ..Faults::default() }, |_| ()).await;
    bench.engine.install(&bench.job(2)).await.unwrap();
    assert_eq!(bench.digest().await, bench.fresh_digest(2).await);
    // Later clients may send short prompts.
    bench.complete("x", 1).await;

    // A user's canary may be short, too.
    let bench = Bench::start_with("vllm", Faults { cold_amx: true, ..Faults::default() }, |_| ()).await;
    let canary = CanaryPolicy { prompt: "x".into(), max_tokens: 1, least_log_prob_milli: -4000, greatest_log_prob_milli: 0 };
    assert!(bench.engine.answers(&canary, SOON).await.unwrap());
    bench.complete("x", 1).await;

    let cold = Bench::start_with("vllm", Faults { cold_amx: true, ..Faults::default() }, |_| ()).await;
    let body = json!({"model": "model", "prompt": "x", "max_tokens": 1});
    assert_eq!(post(&format!("{}/v1/completions", cold.simulator.url()), &body).await.0, 500);
}
