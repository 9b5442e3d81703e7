//! Engines that another client puts to sleep: their version no longer counts, nothing is loaded into them, and they are complete again
//! after they wake and are fed.

use super::support::{Bench, SOON, client};
use crate::{EngineError, Holding};

async fn call(bench: &Bench, path: &str) {
    let request = client().post(format!("{}{path}", bench.simulator.url())).header("content-type", "application/json");
    let answer = request.body("{}").send().await.unwrap();
    assert_eq!(answer.status(), 200, "{path}");
}

/// Story F55.
#[tokio::test]
async fn engine_that_slept_holds_nothing_despite_its_label() {
    for level in [1, 2] {
        let bench = Bench::start("vllm").await;
        let held = bench.engine.install(&bench.job(2)).await.unwrap().start;
        assert_eq!(bench.engine.health(SOON).await.unwrap().start, held);
        call(&bench, &format!("/sleep?level={level}")).await;
        let asleep = bench.engine.health(SOON).await.unwrap().start;
        assert!(asleep != held && asleep.is_same_process(&held), "{asleep:?} {held:?}");
        assert!(matches!(bench.engine.asleep(), Some(EngineError::Asleep { .. })));
        assert!(!bench.engine.is_still(&held) && !bench.engine.is_stuck(SOON).await);

        let refused = bench.engine.install(&bench.job(3)).await.unwrap_err();
        assert!(matches!(refused.source, EngineError::Asleep { .. }) && !refused.is_dirty(), "{refused}");
        assert!(bench.is_paused().await, "no one but its owner wakes it");

        call(&bench, "/wake_up").await;
        assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Version(bench.job(2).terms.version), "its label did not change");
        assert_eq!(bench.engine.health(SOON).await.unwrap().start, asleep, "the sleep is not counted twice");
        assert!(bench.engine.asleep().is_none());
        assert_eq!(bench.digest().await == bench.fresh_digest(2).await, level == 1);
        bench.engine.install(&bench.job(2)).await.unwrap();
        assert_eq!(bench.digest().await, bench.fresh_digest(2).await);
        call(&bench, "/sleep").await;
        call(&bench, "/wake_up").await;
        assert_ne!(bench.engine.health(SOON).await.unwrap().start, asleep, "a sleep that no one saw counts as well");
    }
}

#[tokio::test]
async fn a_pause_is_no_sleep() {
    let bench = Bench::start("vllm").await;
    let held = bench.engine.install(&bench.job(2)).await.unwrap().start;
    call(&bench, "/pause?mode=keep&clear_cache=false").await;
    assert!(bench.is_paused().await);
    assert_eq!(bench.engine.health(SOON).await.unwrap().start, held);
    assert!(bench.engine.asleep().is_none());
}

/// Story F55.
#[tokio::test]
async fn simulated_lmdeploy_weights_asleep_differ_from_cache_asleep() {
    let bench = Bench::start("lmdeploy").await;
    let before = bench.engine.health(SOON).await.unwrap().start;
    call(&bench, "/sleep?level=1").await;
    let asleep = bench.engine.health(SOON).await.unwrap().start;
    assert!(asleep != before && bench.engine.asleep().is_some());
    // WeightSync pauses it like that.
    call(&bench, "/wakeup?tags=weights").await;
    assert_eq!(bench.engine.health(SOON).await.unwrap().start, asleep);
    assert!(bench.engine.asleep().is_none());
}
