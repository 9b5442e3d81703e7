//! Traces of attempts: the spans of one, by what agents reported, and what reaches a collector.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::routing::post;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::operate::two_attempts;
use super::whole::{Controller, SOON, all_agents, cluster, is_ready};
use crate::controller::Ui;
use crate::controller::traces::{Span, Trace, Traces, Trail};
use weightsync_core::protocol::{EpochId, InstallStep, MemberName, MemberProgress, UpdatePhase, UpdateView};

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
fn outline(spans: &[Span]) -> Vec<(&str, &str, u64, u64)> {
    let parent = |span: &Span| span.parent.map_or("", |parent| spans[parent].name);
    spans.iter().map(|span| (span.name, parent(span), span.begun, span.ended)).collect()
}

#[test]
fn trace_has_source_phases_and_steps_of_every_rollout() {
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
    assert_eq!(outline(&trace.spans), expected);
    assert_eq!(trace.spans[0].failure, None, "the version reached minReady");
    let failures: Vec<_> = trace.spans.iter().filter_map(|span| span.failure.as_deref()).collect();
    assert_eq!(failures, ["the engine said no"]);
    assert!(trace.spans[9].attributes.contains(&("weightsync.member", "actors/actor-1".to_owned())));
    assert_eq!(trail.note(&view(1, UpdatePhase::Done, &[Installed, Failed], phases), 1_400), Vec::new(), "it had ended before");
}

#[test]
fn attempt_without_a_reported_end_ends_with_the_next() {
    let mut trail = Trail::default();
    trail.note(&view(1, UpdatePhase::Transfer, &[InstallStep::Receiving], &[]), 5);
    let traces = trail.note(&view(2, UpdatePhase::Failed, &[InstallStep::Refused], &[]), 9);
    let failures: Vec<_> = traces.iter().map(|trace| trace.spans[0].failure.clone().unwrap()).collect();
    assert!(failures[0].contains("its end was not reported"), "{failures:?}");
    assert_eq!(failures[1], "too few took it");
    assert_ne!(traces[0].id, traces[1].id, "each attempt is a trace of its own");
    let mut other = Trail::default();
    let again = other.note(&view(2, UpdatePhase::Failed, &[InstallStep::Refused], &[]), 20);
    assert_eq!(again[0].id, traces[1].id, "the id follows from the attempt");
}

struct Posted {
    path: String,
    headers: HeaderMap,
    body: Value,
}

impl Posted {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

/// A collector that answers its first posts with `answers`, and further ones with success; gives what was posted.
async fn collector(answers: Vec<(StatusCode, &'static str)>) -> (String, mpsc::UnboundedReceiver<Posted>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let answers = Arc::new(Mutex::new(answers.into_iter()));
    let take = move |uri: Uri, headers: HeaderMap, body: Bytes| {
        let answer = answers.lock().next().unwrap_or((StatusCode::OK, r#"{"partialSuccess":{}}"#));
        let body = serde_json::from_slice(&body).unwrap();
        sender.send(Posted { path: uri.path().to_owned(), headers, body }).unwrap();
        async move { (answer.0, [("retry-after", "1")], answer.1) }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = axum::Router::new().fallback(post(take));
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    (format!("http://{address}"), receiver)
}

async fn next(posts: &mut mpsc::UnboundedReceiver<Posted>) -> Posted {
    tokio::time::timeout(SOON, posts.recv()).await.expect("a trace comes").unwrap()
}

/// The trace of a failed attempt with one rollout.
fn failed_attempt(attempt: u32) -> Trace {
    let mut trail = Trail::default();
    trail.note(&view(attempt, UpdatePhase::Transfer, &[InstallStep::Receiving], &[]), 1_700_000_000_000);
    trail.note(&view(attempt, UpdatePhase::Failed, &[InstallStep::Failed], &[]), 1_700_000_000_250).remove(0)
}

#[tokio::test]
async fn a_trace_is_posted_as_the_json_of_otlp() {
    let (endpoint, mut posts) = collector(Vec::new()).await;
    let headers = "authorization=Basic%20YTpiPT0=, x-tenant = a%2Cb ,";
    let traces = Traces::start_with(&format!("{endpoint}/otel/"), headers, "controller-0").unwrap();
    let trace = failed_attempt(2);
    traces.put(trace.clone());
    let posted = next(&mut posts).await;
    assert_eq!((posted.path.as_str(), posted.header("content-type")), ("/otel/v1/traces", "application/json"));
    assert_eq!((posted.header("authorization"), posted.header("x-tenant")), ("Basic YTpiPT0=", "a,b"));
    let resource = &posted.body["resourceSpans"][0];
    let text = |key: &str, value: &str| json!({"key": key, "value": {"stringValue": value}});
    let number = |key: &str, value: &str| json!({"key": key, "value": {"intValue": value}});
    let itself = [
        text("service.name", "weightsync"),
        text("service.version", env!("CARGO_PKG_VERSION")),
        text("service.instance.id", "controller-0"),
    ];
    assert_eq!(resource["resource"], json!({"attributes": itself}));
    assert_eq!(resource["scopeSpans"][0]["scope"], json!({"name": "weightsync"}));
    let spans = resource["scopeSpans"][0]["spans"].as_array().unwrap();
    let id = trace.id.map(|byte| format!("{byte:02x}")).concat();
    let ids: Vec<_> = spans.iter().map(|span| span["spanId"].as_str().unwrap()).collect();
    let all_hex = ids.iter().all(|id| id.len() == 16 && id.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')));
    assert!(ids.len() == 3 && all_hex && ids[0] != ids[1] && ids[1] != ids[2], "{ids:?}");
    let span = |place: usize, parent: &str, name: &str, ended: &str, attributes: &[Value], status: Value| {
        json!({
            "traceId": id, "spanId": ids[place], "parentSpanId": parent, "flags": 257, "name": name, "kind": 1,
            "startTimeUnixNano": "1700000000000000000", "endTimeUnixNano": ended, "attributes": attributes, "status": status,
        })
    };
    let attempt = [
        text("weightsync.uid", "w"),
        number("weightsync.epoch", "3"),
        number("weightsync.version", "7"),
        number("weightsync.attempt", "2"),
        number("weightsync.bytes", "18"),
    ];
    let rollout = [text("weightsync.member", "actors/actor-0"), number("weightsync.received_bytes", "9")];
    let end = "1700000000250000000";
    assert_eq!(spans[0], span(0, "", "publish", end, &attempt, json!({"code": 2, "message": "too few took it"})));
    assert_eq!(spans[1], span(1, ids[0], "rollout", end, &rollout, json!({"code": 2, "message": "the engine said no"})));
    assert_eq!(spans[2], span(2, ids[1], "receive", end, &[], json!({"code": 1, "message": ""})));
}

#[tokio::test]
async fn trace_is_posted_again_only_on_a_retryable_answer() {
    let busy = StatusCode::SERVICE_UNAVAILABLE;
    let rejected = r#"{"partialSuccess":{"rejectedSpans":"3","errorMessage":"too old"}}"#;
    let answers = vec![(busy, "later"), (StatusCode::OK, "{}"), (StatusCode::BAD_REQUEST, "no"), (StatusCode::OK, rejected)];
    let (endpoint, mut posts) = collector(answers).await;
    let traces = Traces::start_with(&endpoint, "", "controller-0").unwrap();
    (1..=4).for_each(|attempt| traces.put(failed_attempt(attempt)));
    let begun = Instant::now();
    let mut attempts = Vec::new();
    for _ in 0..5 {
        let span = next(&mut posts).await.body["resourceSpans"][0]["scopeSpans"][0]["spans"][0].clone();
        attempts.push(span["attributes"][3]["value"]["intValue"].as_str().unwrap().to_owned());
    }
    assert_eq!(attempts, ["1", "1", "2", "3", "4"], "the first one found the collector busy");
    assert!(begun.elapsed() >= Duration::from_secs(1), "the collector asked for that wait: {:?}", begun.elapsed());
}

#[tokio::test]
async fn a_collector_that_does_not_answer_costs_traces_and_no_time() {
    let deaf = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let traces = Traces::start_with(&format!("http://{}", deaf.local_addr().unwrap()), "", "controller-0").unwrap();
    let begun = Instant::now();
    (0..200).for_each(|attempt| traces.put(failed_attempt(attempt)));
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_collector_gets_a_trace_of_every_attempt() {
    let (endpoint, mut posts) = collector(Vec::new()).await;
    let server = cluster();
    let controller = Controller::start_at(&server, Ui::Local, &endpoint, None).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    two_attempts(&server, &controller, &agents).await;
    let mut ends = Vec::new();
    for _ in 0..2 {
        let posted = next(&mut posts).await;
        assert_eq!((posted.path.as_str(), posted.header("content-type")), ("/v1/traces", "application/json"));
        let resource = &posted.body["resourceSpans"][0];
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
async fn unusable_address_or_header_is_refused_at_start() {
    for wrong in ["collector:4318", "https://collector:4318", "not an address"] {
        let error = Traces::start(wrong, "controller-0").unwrap_err().to_string();
        assert!(error.contains(wrong) && error.contains("http://HOST:4318"), "{error}");
    }
    for wrong in ["a=b,s3cret", "a=b,s3 cret=c", "a=b,c=s3cret%0A"] {
        let error = Traces::start_with("http://collector:4318", wrong, "controller-0").unwrap_err().to_string();
        assert!(error.contains("header 2 of OTEL_EXPORTER_OTLP_TRACES_HEADERS or ") && !error.contains("s3"), "{error}");
    }
    assert!(!Traces::start("", "controller-0").unwrap().are_wanted());
}
