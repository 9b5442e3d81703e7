//! Traces of attempts: the spans of one, by what agents told, and what reaches a collector.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Uri};
use axum::routing::post;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::operate::two_attempts;
use super::whole::{Controller, SOON, all_agents, cluster, is_ready};
use crate::controller::Ui;
use crate::controller::traces::{Span, Traces, Trail};
use crate::protocol::{EpochId, InstallStep, MemberName, MemberProgress, UpdatePhase, UpdateView};

fn view(attempt: u32, phase: UpdatePhase, steps: &[InstallStep], phases: &[(&str, u64)]) -> UpdateView {
    let member = |(number, step): (usize, &InstallStep)| MemberProgress {
        member: MemberName(format!("actors/actor-{number}")),
        bytes: 9,
        step: *step,
        reason: (*step == InstallStep::Failed).then(|| "the engine said no".to_owned()),
    };
    UpdateView {
        id: EpochId { weightsync: "w".into(), created: 1, term: 0, epoch: 3 },
        version: 7,
        attempt,
        phase,
        total_bytes: 18,
        members: steps.iter().enumerate().map(member).collect(),
        phases_ms: phases.iter().map(|(name, ms)| ((*name).to_owned(), *ms)).collect(),
        failure: (phase == UpdatePhase::Failed).then(|| "too few took it".to_owned()),
        feeding: false,
    }
}

/// Name, parent's name, begin, end.
fn told(spans: &[Span]) -> Vec<(&str, &str, u64, u64)> {
    let parent = |span: &Span| span.parent.map_or("", |parent| spans[parent].name);
    spans.iter().map(|span| (span.name, parent(span), span.begun, span.ended)).collect()
}

#[test]
fn a_trace_has_the_phases_of_the_source_and_the_steps_of_every_rollout() {
    use InstallStep::{Delivered, Failed, Installed, Installing, Receiving};
    let mut trail = Trail::default();
    let transfer: &[(&str, u64)] = &[("begin", 10)];
    assert_eq!(trail.note(&view(1, UpdatePhase::Transfer, &[Receiving, Receiving], transfer), 1_000), Vec::new());
    assert_eq!(trail.note(&view(1, UpdatePhase::Transfer, &[Delivered, Receiving], transfer), 1_100), Vec::new());
    assert_eq!(trail.note(&view(1, UpdatePhase::Activate, &[Installing, Installing], transfer), 1_200), Vec::new());
    let phases = &[("begin", 10), ("transfer", 150), ("verify", 30), ("activate", 120), ("of tomorrow", 9)];
    let traces = trail.note(&view(1, UpdatePhase::Done, &[Installed, Failed], phases), 1_310);
    let [trace] = traces.as_slice() else { panic!("{traces:?}") };
    let expected = [
        ("publish", "", 1_000, 1_310),
        ("begin", "publish", 1_000, 1_010),
        ("transfer", "publish", 1_010, 1_160),
        ("verify", "publish", 1_160, 1_190),
        ("activate", "publish", 1_190, 1_310),
        ("rollout", "publish", 1_000, 1_310),
        ("receive", "rollout", 1_000, 1_100),
        ("wait for the switch", "rollout", 1_100, 1_200),
        ("install", "rollout", 1_200, 1_310),
        ("rollout", "publish", 1_000, 1_310),
        ("receive", "rollout", 1_000, 1_200),
        ("install", "rollout", 1_200, 1_310),
    ];
    assert_eq!(told(&trace.spans), expected);
    assert_eq!(trace.spans[0].failure, None, "the version reached minReady");
    let failures: Vec<_> = trace.spans.iter().filter_map(|span| span.failure.as_deref()).collect();
    assert_eq!(failures, ["the engine said no"]);
    assert!(trace.spans[9].attributes.contains(&("weightsync.member", "actors/actor-1".to_owned())));
    assert_eq!(trail.note(&view(1, UpdatePhase::Done, &[Installed, Failed], phases), 1_400), Vec::new(), "it had ended before");
}

#[test]
fn an_attempt_whose_end_nobody_told_ends_with_that_when_the_next_one_begins() {
    let mut trail = Trail::default();
    trail.note(&view(1, UpdatePhase::Transfer, &[InstallStep::Receiving], &[]), 5);
    let traces = trail.note(&view(2, UpdatePhase::Failed, &[InstallStep::Refused], &[]), 9);
    let failures: Vec<_> = traces.iter().map(|trace| trace.spans[0].failure.clone().unwrap()).collect();
    assert!(failures[0].contains("its end was not told"), "{failures:?}");
    assert_eq!(failures[1], "too few took it");
    assert_ne!(traces[0].id, traces[1].id, "each attempt is a trace of its own");
    let mut other = Trail::default();
    let again = other.note(&view(2, UpdatePhase::Failed, &[InstallStep::Refused], &[]), 20);
    assert_eq!(again[0].id, traces[1].id, "whoever knows the attempt knows its trace");
}

/// A collector: answers what was posted to it, with path and type.
async fn collector() -> (String, mpsc::UnboundedReceiver<(String, String, Value)>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let take = async |State(sender): State<Arc<mpsc::UnboundedSender<_>>>, uri: Uri, headers: HeaderMap, body: Bytes| {
        let kind = headers.get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default().to_owned();
        sender.send((uri.path().to_owned(), kind, serde_json::from_slice(&body).unwrap_or_default())).unwrap();
        "{}"
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = axum::Router::new().fallback(post(take)).with_state(Arc::new(sender));
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    (format!("http://{address}"), receiver)
}

#[tokio::test]
async fn a_collector_gets_a_trace_of_every_attempt() {
    let (endpoint, mut traces) = collector().await;
    let server = cluster();
    let controller = Controller::start_at(&server, Ui::Local, &endpoint).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    two_attempts(&server, &controller, &agents).await;
    let mut ends = Vec::new();
    for _ in 0..2 {
        let (path, kind, body) = tokio::time::timeout(SOON, traces.recv()).await.expect("a trace comes").unwrap();
        assert_eq!((path.as_str(), kind.as_str()), ("/v1/traces", "application/json"));
        let resource = &body["resourceSpans"][0];
        assert!(resource["resource"]["attributes"].to_string().contains("controller-0"), "{resource}");
        let spans = resource["scopeSpans"][0]["spans"].as_array().unwrap().clone();
        let id = spans[0]["traceId"].as_str().unwrap();
        assert!(id.len() == 32 && spans.iter().all(|span| span["traceId"] == id), "{spans:?}");
        assert!(spans[1..].iter().all(|span| span["parentSpanId"].as_str().is_some_and(|parent| parent.len() == 16)), "{spans:?}");
        let of = |name: &str| spans.iter().filter(|span| span["name"] == name).count();
        assert_eq!((of("publish"), of("transfer"), of("rollout")), (1, 1, 2), "{spans:?}");
        ends.push(spans[0]["status"]["message"].as_str().unwrap_or_default().to_owned());
    }
    assert!(ends[0].contains("the stream broke") && ends[1].is_empty(), "{ends:?}");
    controller.stop().await;
}

#[tokio::test]
async fn an_address_that_is_no_collectors_is_refused_at_the_start() {
    for wrong in ["collector:4318", "https://collector:4318", "not an address"] {
        let error = Traces::start(wrong, "controller-0").unwrap_err().to_string();
        assert!(error.contains(wrong) && error.contains("http://HOST:4318"), "{error}");
    }
    assert!(!Traces::start("", "controller-0").unwrap().are_wanted());
}
