//! Engines with half an update: how they are detected, and the ways out.

use super::support::{Bench, SOON, adapter, held};
use crate::{Holding, Settling};
use weightsync_testkit::simulator::{Fault, FaultRule, Faults, LoadFault};

async fn half_updated() -> Bench {
    let bench = Bench::start("vllm").await;
    bench.set_faults(Faults { load: Some(LoadFault::FailHalfway), ..Faults::default() }).await;
    assert!(bench.engine.install(&bench.job(2)).await.unwrap_err().is_dirty());
    bench.set_faults(Faults::default()).await;
    bench
}

#[tokio::test]
async fn restarted_agent_finds_half_an_update_and_keeps_it_paused() {
    let bench = half_updated().await;
    let successor = adapter("vllm", &bench.simulator.url(), None, None);
    assert_eq!(successor.holding(SOON).await.unwrap(), Holding::HalfAnUpdate(held(2)));
    assert_eq!(successor.settle(&Settling::LEFT_PAUSED, SOON).await.unwrap().holding, Holding::HalfAnUpdate(held(2)));
    assert!(bench.is_paused().await);
    successor.install(&bench.job(3)).await.unwrap();
    assert_eq!(bench.digest().await, bench.fresh_digest(3).await);
}

#[tokio::test]
async fn success_after_a_load_failed_on_two_ranks_is_not_believed() {
    let mut bench = Bench::start_with("vllm", Faults::default(), |options| (options.world_size, options.ray) = (2, false)).await;
    bench.set_faults(Faults { load: Some(LoadFault::FailHalfwayOnce), ..Faults::default() }).await;
    for _ in 0..2 {
        let failed = bench.engine.install(&bench.job(2)).await.unwrap_err();
        assert!(failed.is_dirty() && failed.to_string().contains("restart the server"), "{failed}");
    }
    bench.restart().await;
    bench.engine.install(&bench.job(2)).await.unwrap();
    assert_eq!(bench.digest().await, bench.fresh_digest(2).await);
}

#[tokio::test]
async fn engine_that_cannot_be_fed_gets_its_start_up_weights() {
    let bench = half_updated().await;
    bench.engine.put_back(SOON).await.unwrap();
    assert!(!bench.is_paused().await);
    assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Startup);
    assert_eq!(bench.digest().await, bench.fresh_digest(1).await);
    bench.complete("it answers again", 4).await;
}

#[tokio::test]
async fn engine_that_cannot_be_restored_stays_paused() {
    let bench = half_updated().await;
    let fault = FaultRule { path: "/collective_rpc".into(), after: 0, times: None, fault: Fault::unavailable() };
    bench.set_faults(Faults { rules: vec![fault], ..Faults::default() }).await;
    let (answer, put_back) = tokio::join!(bench.complete("a client that waits", 4), async {
        super::support::until("the request", || async { bench.get("/simulator/digest").await["requests"] == serde_json::json!(1) }).await;
        bench.engine.put_back(SOON).await
    });
    assert!(put_back.is_err());
    assert_eq!(answer["finish_reason"], "abort", "the client does not wait for ever");
    assert!(bench.is_paused().await);
    assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::HalfAnUpdate(held(2)));
}

#[tokio::test]
async fn generating_with_half_an_update_is_what_the_pause_prevents() {
    let mut bench = half_updated().await;
    super::support::post(&format!("{}/resume", bench.simulator.url()), &serde_json::json!({})).await;
    let body = serde_json::json!({"model": "model", "prompt": "x"});
    let (status, _) = super::support::post(&format!("{}/v1/completions", bench.simulator.url()), &body).await;
    assert_eq!(status, 500, "vLLM's core breaks down");
    bench.simulator.ended().await;
}

#[tokio::test]
async fn restore_of_an_engine_at_start_up_weights_only_resumes() {
    for kind in ["vllm", "sglang"] {
        let bench = Bench::start(kind).await;
        bench.engine.put_back(SOON).await.unwrap();
        assert_eq!(bench.digest().await, bench.fresh_digest(1).await);
        bench.engine.install(&bench.job(2)).await.unwrap();
        bench.engine.put_back(SOON).await.unwrap();
        assert_eq!(bench.digest().await, bench.fresh_digest(1).await, "{kind}");
        assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Startup, "{kind}");
    }
}
