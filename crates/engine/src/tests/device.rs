//! Installs from GPU memory, over every route and into every engine that supports it.

use std::time::Duration;

use serde_json::json;
use tokio::time::timeout;

use super::gpu::{GPUS, GpuBench};
use super::support::{HOUR, SOON, ended_by, held, post, until};
use crate::{EngineError, Holding, Left, Settling};
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};
use weightsync_testkit::simulator::{Fault, FaultRule, Faults, LoadFault};

/// Engine, its command line, ranks, and the chosen route.
type Way = (&'static str, Option<&'static [&'static str]>, usize, &'static str);

const WAYS: [Way; 6] = [
    ("lmdeploy", Some(&["--distributed-executor-backend", "ray"]), 1, "update_weights"),
    ("lmdeploy", None, 1, "checkpoint-engine"),
    ("lmdeploy", Some(&[]), 2, "update_weights"),
    ("lmdeploy", None, 2, "checkpoint-engine"),
    ("vllm", None, 2, "checkpoint-engine"),
    ("sglang", None, 2, "checkpoint-engine"),
];

async fn bench(way: Way) -> GpuBench {
    GpuBench::start(way.0, way.2, way.1, |_| {}).await
}

/// One call is spoiled, after so many.
fn rule(path: &str, after: u32, fault: Fault) -> Faults {
    Faults { rules: vec![FaultRule { path: path.into(), after, times: Some(1), fault }], ..Faults::default() }
}

fn call(way: Way) -> &'static str {
    match way {
        ("vllm", ..) => "/collective_rpc",
        (_, _, _, "update_weights") => "/update_weights",
        _ => "/update_weights_from_ipc",
    }
}

#[tokio::test]
async fn three_versions_in_a_row_are_what_fresh_servers_serve() {
    for way in WAYS {
        let on = bench(way).await;
        let route = on.engine.device_route(on.job(2).terms.pause, KvCachePolicy::Reset, SOON).await.unwrap();
        assert_eq!(route.name, way.3, "{way:?}: {:?}", route.why_not_faster);
        if way.0 == "lmdeploy" {
            assert_eq!(route.gpus, GPUS[..way.2], "{way:?}");
        }
        let mut first = true;
        for version in [2, 3, 2] {
            let before = on.bench.complete("the same prompt", 8).await;
            let report = on.install(version).await.unwrap();
            let steps: Vec<_> = report.steps_ms.iter().map(|(step, _)| step.as_str()).collect();
            // An engine that was never paused, and generated after an install, gets its token request after later installs.
            let owes = way.3 == "update_weights" && !first;
            first = false;
            assert_eq!(report.owes_answer, owes, "{way:?}, version {version}");
            let last = if owes { "check" } else { "probe" };
            assert!(steps.starts_with(&["pause", "load", "check"]) && steps.ends_with(&[last]), "{steps:?}");
            on.engine.see_owed_answer(&held(version), SOON).await.unwrap();
            assert_eq!(report.start, on.engine.health(SOON).await.unwrap().start, "{way:?}: the install is no restart");
            assert_eq!(on.bench.digest().await, on.bench.fresh_digest(version).await, "{way:?}");
            assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Version(held(version)), "{way:?}");
            assert_ne!(on.bench.complete("the same prompt", 8).await, before, "{way:?}");
        }
    }
}

#[tokio::test]
async fn nothing_is_changed_before_the_first_bucket() {
    for way in WAYS {
        let on = bench(way).await;
        let install = on.engine.begin_device(&on.job(2)).await.unwrap();
        assert!(!on.bench.is_paused().await, "{way:?}");
        assert_eq!(install.abandon("the stream broke").await, Left::AsBefore, "{way:?}: it was not touched");
        assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Startup, "{way:?}");
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(1).await, "{way:?}");
        on.install(2).await.unwrap();
    }
}

/// The task of an install ends by itself; a later request still gets a response.
#[tokio::test]
async fn install_asked_after_its_end_is_answered() {
    for way in WAYS {
        let on = bench(way).await;
        let job = on.job(2);
        let mut install = on.engine.begin_device(&job).await.unwrap();
        job.terms.cancel.cancel();
        // This waits for the lock on changes, which the ended task released.
        on.engine.settle(&Settling::LEFT_PAUSED, SOON).await.unwrap();
        let asked = timeout(SOON, install.open()).await.expect("an answer");
        let error = asked.unwrap_err();
        assert!(matches!(error.source, EngineError::Cancelled), "{way:?}: {error}");
        assert_eq!(error.left, Left::AsBefore, "{way:?}");
        let left = timeout(SOON, install.abandon("no one waits")).await.expect("an answer");
        assert_eq!(left, Left::AsBefore, "{way:?}");
    }
}

#[tokio::test]
async fn broken_stream_leaves_engine_held_and_marked_until_fed() {
    for way in WAYS {
        for dropped in [false, true] {
            let on = bench(way).await;
            let (version, job) = (on.version(2), on.job(2));
            let install = version.feed_some(on.engine.as_ref(), &job, 2).await;
            if dropped {
                drop(install);
                until("the pause", || async { on.bench.is_paused().await }).await;
            } else {
                assert_eq!(install.abandon("the stream broke").await, Left::Mixture, "{way:?}");
            }
            assert!(on.bench.is_paused().await, "{way:?}");
            let held = on.engine.holding(SOON).await.unwrap();
            assert!(matches!(&held, Holding::HalfAnUpdate(version) if version.version == 2), "{way:?}: {held:?}");
            assert!(matches!(on.engine.settle(&Settling::LEFT_PAUSED, SOON).await.unwrap().holding, Holding::HalfAnUpdate(_)), "{way:?}");
            on.install(3).await.unwrap();
            assert!(!on.bench.is_paused().await, "{way:?}");
            assert_eq!(on.bench.digest().await, on.bench.fresh_digest(3).await, "{way:?}");
        }
    }
}

/// Story F94.
#[tokio::test]
async fn worker_that_cannot_load_a_bucket_ends_the_install() {
    for way in WAYS {
        let on = bench(way).await;
        on.bench.set_faults(Faults { load: Some(LoadFault::FailHalfway), ..Faults::default() }).await;
        let error = timeout(SOON, on.install_by(2, HOUR)).await.expect("the answer ends it").unwrap_err();
        assert!(error.is_dirty() && error.step == "load", "{way:?}: {error}");
        if way.3 == "checkpoint-engine" {
            assert!(error.to_string().contains("out of memory"), "{way:?}: {error}");
        }
        assert!(on.bench.is_paused().await, "{way:?}");
        on.bench.set_faults(Faults::default()).await;
        on.install(3).await.unwrap();
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(3).await, "{way:?}");
    }
}

/// Story F94.
#[tokio::test]
async fn engine_that_refuses_first_is_unchanged() {
    for way in WAYS {
        let on = bench(way).await;
        if way.3 == "update_weights" {
            continue;
        }
        let refusal = Fault::Answer { status: 400, body: json!({"success": false, "message": "not installed"}) };
        // Earlier calls have the same path: LMDeploy's status.
        let after = if way.0 == "lmdeploy" { count_status_calls(&on).await } else { 0 };
        on.bench.set_faults(rule(call(way), after, refusal)).await;
        let error = on.install(2).await.unwrap_err();
        assert!(!error.is_dirty(), "{way:?}: {error}");
        assert!(error.to_string().contains("not installed"), "{way:?}: {error}");
        on.bench.set_faults(Faults::default()).await;
        until("the resume", || async { !on.bench.is_paused().await }).await;
        assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Startup, "{way:?}");
        on.install(3).await.unwrap();
    }
}

/// Number of LMDeploy's status calls before the update, which has the same path.
async fn count_status_calls(on: &GpuBench) -> u32 {
    let spare = GpuBench::start("lmdeploy", on.gpus.places(0).len(), None, |_| {}).await;
    spare.install(2).await.unwrap();
    let calls = spare.bench.calls().await;
    let update = calls.iter().position(|call| call == "POST /update_weights_from_ipc").unwrap();
    u32::try_from(calls[..update].iter().filter(|call| *call == "GET /update_weights_from_ipc").count()).unwrap()
}

#[tokio::test]
async fn an_engine_that_hangs_ends_the_install_with_its_deadline() {
    let hangs = async |way: Way| {
        let on = bench(way).await;
        let mut job = on.job(2);
        // What comes before the load must fit in it, too: a busy machine takes a second.
        job.silence = Duration::from_secs(2);
        job.terms.timeout = SOON / 2;
        on.bench.set_faults(Faults { load_ms: 60_000, ..Faults::default() }).await;
        let error = ended_by(job.terms.timeout, on.version(2).feed(on.engine.as_ref(), &job)).await.unwrap_err();
        assert!(matches!(error.source, EngineError::Timeout { .. }) && error.is_dirty(), "{way:?}: {error}");
    };
    futures::future::join_all(WAYS.map(hangs)).await;
}

/// Stories F46 and F48.
#[tokio::test]
async fn an_engine_that_lacks_a_bucket_is_never_resumed() {
    for way in WAYS {
        let on = bench(way).await;
        let (version, job) = (on.version(2), on.job(2));
        let install = version.feed_some(on.engine.as_ref(), &job, 2).await;
        let error = install.finish(held(2)).await.unwrap_err();
        assert!(error.is_dirty() && error.to_string().contains("2 of"), "{way:?}: {error}");
        assert!(on.bench.is_paused().await, "{way:?}");

        let mut install = version.feed_some(on.engine.as_ref(), &on.job(2), 1).await;
        let again = version.layout.bucket(0).unwrap();
        let error = install.bucket(version.bucket(again)).await.unwrap_err();
        assert!(error.is_dirty() && error.to_string().contains("1 was expected"), "{way:?}: {error}");
        assert!(on.bench.is_paused().await, "{way:?}");
    }
}

fn fails_to_compute() -> Faults {
    let error = json!({"object": "error", "message": "CUDA error: an illegal memory access was encountered"});
    rule("/v1/completions", 0, Fault::Answer { status: 500, body: error })
}

#[tokio::test]
async fn engine_that_computes_nothing_after_install_is_held() {
    let on = bench(WAYS[0]).await;
    on.install(2).await.unwrap();
    assert!(on.install(3).await.unwrap().owes_answer);
    on.bench.set_faults(fails_to_compute()).await;
    let error = on.engine.see_owed_answer(&held(3), SOON).await.unwrap_err();
    assert!(error.is_dirty() && error.step == "probe" && error.to_string().contains("illegal memory access"), "{error}");
    assert!(on.asleep().await);
    assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::HalfAnUpdate(held(3)));
    // What it takes next has to be seen to work before it counts.
    let report = on.install(2).await.unwrap();
    assert!(!report.owes_answer && report.steps_ms.iter().any(|(step, _)| step == "probe"), "{report:?}");
    assert!(!on.asleep().await);
}

#[tokio::test]
async fn engine_put_to_sleep_after_install_owes_no_answer() {
    let on = bench(WAYS[0]).await;
    on.install(2).await.unwrap();
    assert!(on.install(3).await.unwrap().owes_answer);
    assert_eq!(post(&format!("{}/sleep?level=1", on.bench.simulator.url()), &json!({})).await.0, 200);
    on.engine.see_owed_answer(&held(3), SOON).await.unwrap();
    assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Version(held(3)), "it is not marked");
}

#[tokio::test]
async fn answer_owed_for_a_replaced_version_blocks_no_request() {
    let on = bench(WAYS[0]).await;
    on.install(2).await.unwrap();
    assert!(on.install(3).await.unwrap().owes_answer);
    on.install(2).await.unwrap();
    on.bench.set_faults(fails_to_compute()).await;
    on.engine.see_owed_answer(&held(3), SOON).await.unwrap();
    assert!(!on.asleep().await);
    assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Version(held(2)));
    // The token for its present version is still pending.
    assert!(on.engine.see_owed_answer(&held(2), SOON).await.unwrap_err().is_dirty());
}

#[tokio::test]
async fn requests_in_flight_are_ended_and_what_began_meanwhile_too() {
    let on = GpuBench::start("lmdeploy", 1, Some(&[]), |options| options.faults.token_ms = 10).await;
    let running = async { on.bench.complete("a long prompt", 3000).await };
    let updated = async {
        until("the request", || async { on.bench.get("/simulator/digest").await["requests"] == json!(1) }).await;
        let (version, job) = (on.version(2), on.job(2));
        let install = version.feed_some(on.engine.as_ref(), &job, 1).await;
        until("the end of the request", || async { on.bench.get("/simulator/digest").await["requests"] == json!(0) }).await;
        // This request ignores the pause: it is computed with a mixture, and must get no answer.
        let mixed = async { on.bench.complete("another prompt", 3000).await };
        let rest = async {
            until("the request", || async { on.bench.get("/simulator/digest").await["requests"] == json!(1) }).await;
            let mut install = install;
            for bucket in version.layout.buckets().skip(1) {
                install.bucket(version.bucket(bucket)).await.unwrap();
            }
            install.finish(held(2)).await.unwrap();
        };
        let (mixed, ()) = tokio::join!(mixed, rest);
        assert_eq!(mixed["finish_reason"], "abort");
    };
    let (running, ()) = tokio::join!(running, updated);
    assert_eq!(running["finish_reason"], "abort");
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(2).await);
}

#[tokio::test]
async fn torn_layout_or_impossible_policy_is_refused_untouched() {
    let on = bench(WAYS[0]).await;
    let mut job = on.job(2);
    let mut even = job.layout.as_ref().clone();
    even.cuts = weightsync_core::weights::Cuts::Even;
    job.layout = std::sync::Arc::new(even);
    let error = on.engine.begin_device(&job).await.err().unwrap();
    assert!(!error.is_dirty() && error.to_string().contains("tear tensors"), "{error}");
    for pause in [PausePolicy::Keep, PausePolicy::Drain] {
        assert!(on.engine.accepts(pause, KvCachePolicy::Reset).is_err());
    }
    assert!(on.engine.takes_directories().is_err());
    let error = on.engine.install(&on.bench.job_with(2, PausePolicy::Abort)).await.unwrap_err();
    assert!(!error.is_dirty() && error.to_string().contains("cannot load weights from a directory"), "{error}");
    assert!(!on.asleep().await);
}

/// Trap 18.
#[tokio::test]
async fn failed_last_step_shows_only_in_computation() {
    let on = bench(("sglang", None, 1, "checkpoint-engine")).await;
    on.bench.set_faults(Faults { load: Some(LoadFault::SwallowFinish), ..Faults::default() }).await;
    on.install(2).await.unwrap();
    assert_ne!(on.bench.digest().await, on.bench.fresh_digest(2).await, "the server said yes to everything");
    on.bench.set_faults(Faults::default()).await;
    on.install(3).await.unwrap();
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(3).await);
}

#[tokio::test]
async fn simulated_sglang_on_a_cpu_has_no_way_from_gpu_memory() {
    let on = bench(("sglang", None, 1, "checkpoint-engine")).await;
    let mut info = on.bench.get("/server_info").await;
    info["device"] = json!("cpu");
    let rule = FaultRule { path: "/server_info".into(), after: 0, times: None, fault: Fault::Answer { status: 200, body: info } };
    on.bench.set_faults(Faults { rules: vec![rule], ..Faults::default() }).await;
    let error = on.bench.engine.device_route(PausePolicy::Abort, KvCachePolicy::Reset, SOON).await.unwrap_err().to_string();
    assert!(error.contains("CUDA") && error.contains("fed from a directory"), "{error}");
}
