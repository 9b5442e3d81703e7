//! The conformance suite on a live server: the real vLLM where there is one, and the simulator in its place; the same rows with the same outcome.

use std::time::Duration;

use weightsync_dev::conformance::{Live, Options, Outcome, Report, run};
use weightsync_engine::ApiKey;

use super::client::KEY;
use super::models::Models;
use super::real::Server;
use super::shared::PLAIN;

async fn whole_suite(server: &mut Server, models: &Models) -> Report {
    server.ready().await;
    let live = Live {
        url: server.url.clone(),
        api_key: Some(ApiKey::new(KEY).unwrap()),
        model_name: None,
        checkpoints: Some((models.path("1"), models.path("2"))),
        gpus: Vec::new(),
        destructive: true,
    };
    let (patience, silence) = (Duration::from_secs(120), Duration::from_secs(2));
    let options = Options { engine: "vllm".into(), live: Some(live), patience, silence, sources: None, only_groups: false };
    run(&options).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs vLLM: make engine-test"]
async fn live_server_passes_the_suite_and_simulator_matches_rows() {
    let models = Models::made();
    let mut simulator = Server::simulator(&models.path("1"), "{}");
    // The suite waits most of the time, so both are tested at once.
    let mut vllm = PLAIN.real(models).await;
    let real = async { Some(whole_suite(vllm.as_mut()?, models).await) };
    let (simulated, real) = tokio::join!(whole_suite(&mut simulator, models), real);
    let reports: Vec<_> = [simulated].into_iter().chain(real).collect();
    // What is installed next to a server decides about a way from GPU memory and about groups.
    let outcomes = |report: &Report| -> Vec<_> {
        let rows = report.rows.iter().filter(|row| row.step != "way from GPU memory" && row.part != "script, groups");
        rows.map(|row| (row.part.clone(), row.step.clone(), row.outcome)).collect()
    };
    for report in &reports {
        let failed: Vec<_> = report.rows.iter().filter(|row| row.outcome == Outcome::Failed).collect();
        assert!(failed.is_empty(), "{failed:#?}");
        assert!(report.count(Outcome::Passed) > 100, "{}", report.count(Outcome::Passed));
        assert_eq!(outcomes(report), outcomes(&reports[0]));
    }
}
