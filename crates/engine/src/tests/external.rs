//! Engines that another data plane feeds: their marks and proofs.

use serde_json::json;

use super::support::{Bench, SOON, adapter, held, post};
use crate::{EngineError, ExternalMark, ExternalProof, Holding, InstallError, InstallReport};
use weightsync_testkit::simulator::{Fault, FaultRule, Faults};

async fn marked(bench: &Bench, version: u64) -> ExternalMark {
    bench.engine.external().unwrap().mark(&held(version), SOON).await.unwrap()
}

async fn proven(bench: &Bench, mark: &ExternalMark, engine_version: Option<&str>) -> Result<InstallReport, InstallError> {
    let proof = ExternalProof { mark: mark.clone(), engine_version: engine_version.map(str::to_owned), timeout: SOON };
    bench.engine.external().unwrap().prove(&proof).await
}

/// Feeds a vLLM as a data plane does.
async fn fed(bench: &Bench, version: u64) {
    let url = format!("{}/collective_rpc", bench.simulator.url());
    let body = json!({"method": "reload_weights", "kwargs": {"weights_path": bench.directory(version)}});
    assert_eq!(post(&url, &body).await.0, 200);
}

async fn says(bench: &Bench, version: &str) {
    let url = format!("{}/update_weight_version", bench.simulator.url());
    assert_eq!(post(&url, &json!({"new_version": version})).await.0, 200);
}

#[tokio::test]
async fn a_marked_engine_carries_half_an_update_until_it_was_proven() {
    for kind in ["vllm", "sglang"] {
        let bench = Bench::start(kind).await;
        let mark = marked(&bench, 2).await;
        let successor = adapter(kind, &bench.simulator.url(), None, None);
        assert_eq!(successor.holding(SOON).await.unwrap(), Holding::HalfAnUpdate(held(2)), "{kind}");
        bench.engine.external().unwrap().alive(&mark, SOON).await.unwrap();
        let report = proven(&bench, &mark, None).await.unwrap();
        assert_eq!(report.start, bench.engine.health(SOON).await.unwrap().start, "{kind}: the same start as before and after");
        assert_eq!(report.start, mark.start);
        assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Version(held(2)));
    }
}

#[tokio::test]
async fn what_the_data_plane_wrote_stays_and_is_no_restart() {
    let bench = Bench::start("vllm").await;
    let mark = marked(&bench, 2).await;
    fed(&bench, 2).await;
    says(&bench, "step-2").await;
    let report = proven(&bench, &mark, Some("step-2")).await.unwrap();
    assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Foreign("step-2".into()));
    assert_eq!(bench.engine.health(SOON).await.unwrap().start, report.start);
    assert_eq!(bench.digest().await, bench.fresh_digest(2).await);
}

#[tokio::test]
async fn engine_that_reports_otherwise_or_nothing_is_unproven() {
    let bench = Bench::start("vllm").await;
    let mark = marked(&bench, 2).await;
    let nothing = proven(&bench, &mark, Some("step-2")).await.unwrap_err();
    assert!(nothing.is_dirty() && nothing.to_string().contains("the engine has none"), "{nothing}");
    says(&bench, "step-1").await;
    let other = proven(&bench, &mark, Some("step-2")).await.unwrap_err();
    assert!(other.is_dirty() && other.to_string().contains("step-1"), "{other}");
}

#[tokio::test]
async fn engine_restarted_while_fed_holds_no_version() {
    let mut bench = Bench::start("vllm").await;
    let mark = marked(&bench, 2).await;
    bench.restart().await;
    let error = proven(&bench, &mark, None).await.unwrap_err();
    assert!(!error.is_dirty() && matches!(error.source, EngineError::Restarted), "{error}");
    bench.engine.external().unwrap().take_back(&mark, SOON).await.unwrap();
    assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Startup, "a successor gets no one's label");
}

#[tokio::test]
async fn engine_that_generates_no_token_is_not_proven() {
    let bench = Bench::start("vllm").await;
    let mark = marked(&bench, 2).await;
    fed(&bench, 2).await;
    let fault = FaultRule { path: "/v1/completions".into(), after: 0, times: None, fault: Fault::unavailable() };
    bench.set_faults(Faults { rules: vec![fault], ..Faults::default() }).await;
    bench.engine.external().unwrap().alive(&mark, SOON).await.unwrap();
    let error = proven(&bench, &mark, None).await.unwrap_err();
    assert!(error.is_dirty() && error.step == "probe", "{error}");
    assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::HalfAnUpdate(held(2)));
}

#[tokio::test]
async fn a_mark_that_nothing_followed_is_taken_back() {
    let bench = Bench::start("vllm").await;
    bench.engine.install(&bench.job(1)).await.unwrap();
    let mark = marked(&bench, 2).await;
    bench.engine.external().unwrap().take_back(&mark, SOON).await.unwrap();
    assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Version(held(1)));
    assert_eq!(bench.engine.health(SOON).await.unwrap().start, mark.start);
}
