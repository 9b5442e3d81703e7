//! The conformance suite on a live server: the real vLLM where there is one, and the simulator in its place; the same rows with the same outcome.

use std::time::Duration;

use weightsync_dev::conformance::{Live, Options, Outcome, Report, run};
use weightsync_engine::ApiKey;

use super::client::KEY;
use super::models::Models;
use super::real::{Server, venv};

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
async fn live_server_passes_the_suite_and_simulator_matches_rows() {
    let venv = venv();
    let models = Models::make(venv.as_deref());
    // It starts while the simulator is tested.
    let vllm = venv.map(|venv| Server::vllm(&venv, &models.path("1")));
    let mut simulator = Server::simulator(&models.path("1"), "{}");
    let simulated = whole_suite(&mut simulator, &models).await;
    let mut reports = vec![simulated];
    if let Some(mut vllm) = vllm {
        reports.push(whole_suite(&mut vllm, &models).await);
    }
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
