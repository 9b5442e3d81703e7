//! The suite against the simulators, and against simulators that break its law: a suite that cannot fail proves nothing.

mod deliveries;

use std::time::Duration;

use tokio::net::TcpListener;

use super::fixture::Fixture;
use super::{Live, Options, Outcome, Report, Way, run};
use weightsync_engine::kinds;
use weightsync_testkit::simulator::{Fault, FaultRule, Faults, LoadFault, Simulator, SimulatorOptions};

fn options(engine: &str) -> Options {
    Options {
        engine: engine.to_owned(),
        live: None,
        patience: Duration::from_secs(30),
        silence: Duration::from_millis(700),
        sources: None,
        only_groups: false,
    }
}

fn failures(report: &Report) -> Vec<String> {
    let failed = report.rows.iter().filter(|row| row.outcome == Outcome::Failed);
    failed.map(|row| format!("{}: {}: expected {}, came {}", row.part, row.step, row.expected, row.found)).collect()
}

async fn passes(engine: &str) {
    let report = run(&options(engine)).await.unwrap();
    assert!(failures(&report).is_empty(), "{}", failures(&report).join("\n"));
    assert!(report.passed() && report.count(Outcome::Passed) > 60, "{} rows", report.count(Outcome::Passed));
    for way in super::ways(engine) {
        for spoil in super::proxy::Spoil::ALL {
            let tried = report.rows.iter().filter(|row| row.part == way.part("negative") && row.step.starts_with(spoil.name())).count();
            assert!(tried >= 5, "{engine}, {way:?}: {tried} calls with {spoil:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simulated_vllm_passes_with_every_call_spoiled() {
    passes("vllm").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simulated_sglang_passes_with_every_call_spoiled() {
    passes("sglang").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simulated_lmdeploy_passes_with_every_call_spoiled() {
    passes("lmdeploy").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simulated_fastdeploy_passes_with_every_call_spoiled() {
    passes("fastdeploy").await;
}

#[test]
fn every_engine_has_a_script_and_a_way() {
    for kind in kinds() {
        assert!(!super::ways(kind).is_empty(), "{kind}");
    }
}

/// A live server that misbehaves, as the suite meets it.
async fn live(engine: &str, faults: Faults, destructive: bool) -> Report {
    let fixture = Fixture::simulated(&options(engine), Way::Directory).await.unwrap();
    let (first, second) = fixture.checkpoints().unwrap();
    let mut started = SimulatorOptions::new(engine, first.clone());
    started.faults = faults;
    let server = Simulator::start(started, TcpListener::bind("127.0.0.1:0").await.unwrap()).await.unwrap();
    let live =
        Live { url: server.url(), api_key: None, model_name: None, checkpoints: Some((first, second)), gpus: Vec::new(), destructive };
    run(&Options { live: Some(live), ..options(engine) }).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn live_server_passes_the_whole_suite_when_disturbed() {
    let report = live("vllm", Faults::default(), true).await;
    assert!(failures(&report).is_empty(), "{}", failures(&report).join("\n"));
    assert!(report.rows.iter().any(|row| row.part == "negative" && row.outcome == Outcome::Passed));
    // No one kills it, and what is installed next to it decides about the rest.
    let may_be_skipped = |part: &str, step: &str| part == "script, groups" || step == "way from GPU memory" || step.contains("is killed");
    let skipped = report.rows.iter().filter(|row| row.outcome == Outcome::Skipped && !may_be_skipped(&row.part, &row.step));
    assert_eq!(skipped.count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_live_server_is_not_disturbed_unless_that_is_allowed() {
    let fixture = Fixture::simulated(&options("vllm"), Way::Directory).await.unwrap();
    let (first, second) = fixture.checkpoints().unwrap();
    let server =
        Simulator::start(SimulatorOptions::new("vllm", first.clone()), TcpListener::bind("127.0.0.1:0").await.unwrap()).await.unwrap();
    let live = Live {
        url: server.url(),
        api_key: None,
        model_name: None,
        checkpoints: Some((first, second)),
        gpus: Vec::new(),
        destructive: false,
    };
    let report = run(&Options { live: Some(live), ..options("vllm") }).await.unwrap();
    assert!(report.passed() && report.count(Outcome::Skipped) > 10, "{}", failures(&report).join("\n"));
    let client = super::client::Client::new(&server.url(), None, Duration::from_secs(10)).unwrap();
    let calls = client.call("GET /simulator/calls", None, false).await.unwrap().json();
    let disturbing =
        |call: &str| call == "POST /resume" || (call.starts_with("POST /pause") && !call.contains("bogus") && !call.contains("perhaps"));
    let disturbed: Vec<_> = calls.as_array().unwrap().iter().filter_map(|call| call.as_str()).filter(|call| disturbing(call)).collect();
    assert!(disturbed.is_empty(), "{disturbed:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_lies_about_a_load_fails() {
    for (fault, row) in [(LoadFault::Corrupt, "the first version back again computes"), (LoadFault::AcknowledgeUnread, "install version 2")]
    {
        let report = live("vllm", Faults { load: Some(fault), ..Faults::default() }, true).await;
        assert!(failures(&report).iter().any(|failure| failure.contains(row)), "{fault:?}: {}", failures(&report).join("\n"));
        assert!(!report.passed());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_with_another_status_or_field_fails_in_that_row() {
    let fault = Fault::Answer { status: 200, body: serde_json::json!({"is_paused": "false"}) };
    let rule = FaultRule { path: "/is_paused".into(), after: 0, times: None, fault };
    let report = live("vllm", Faults { rules: vec![rule], ..Faults::default() }, false).await;
    assert!(
        failures(&report).iter().any(|failure| failure.contains("GET /is_paused: expected 200, is_paused: false")),
        "{:?}",
        failures(&report)
    );
    let unknown = run(&options("trt")).await.unwrap_err().to_string();
    assert!(unknown.contains("vllm, sglang, lmdeploy, fastdeploy"), "{unknown}");
}
