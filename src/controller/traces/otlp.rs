//! Sends traces to an OpenTelemetry collector, as OTLP over HTTP with JSON. What cannot be sent is logged and dropped: no update ever waits
//! for a collector.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanExporter as _, SpanLinks};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{Span, Trace, TracesError};
use crate::controller::events::cut;
use crate::runtime::https::no_tls;

/// How long one trace may take to be taken.
const TAKEN: Duration = Duration::from_secs(10);
/// A collector answers with a few bytes.
const ANSWER: usize = 64 << 10;
/// Longest text of an attribute in bytes.
const TEXT: usize = 512;

/// The exporter to a collector; `instance` names this process.
pub(super) fn exporter(endpoint: &str, instance: &str) -> Result<SpanExporter, TracesError> {
    let cannot = |cause: String| TracesError::Endpoint { endpoint: endpoint.to_owned(), cause };
    let mut url = reqwest::Url::parse(endpoint).map_err(|error| cannot(error.to_string()))?;
    if url.scheme() != "http" {
        return Err(cannot(format!("its scheme is {:?}, and only http is spoken here", url.scheme())));
    }
    // As the specification of OTLP says of OTEL_EXPORTER_OTLP_ENDPOINT.
    if !url.path().ends_with("/v1/traces") {
        let path = format!("{}/v1/traces", url.path().trim_end_matches('/'));
        url.set_path(&path);
    }
    let client = reqwest::Client::builder()
        .timeout(TAKEN)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .use_preconfigured_tls(no_tls().map_err(|error| cannot(error.to_string()))?)
        .build()
        .map_err(|error| cannot(error.to_string()))?;
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(Client(client))
        .with_protocol(Protocol::HttpJson)
        .with_endpoint(url)
        .with_timeout(TAKEN)
        .build();
    let mut exporter = exporter.map_err(|error| cannot(error.to_string()))?;
    let resource = Resource::builder_empty().with_attributes([
        KeyValue::new("service.name", "weightsync"),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("service.instance.id", instance.to_owned()),
    ]);
    exporter.set_resource(&resource.build());
    Ok(exporter)
}

/// Sends what comes, one trace after the other, until nobody can send more.
pub(super) async fn send(exporter: SpanExporter, mut traces: mpsc::Receiver<Trace>) {
    while let Some(trace) = traces.recv().await {
        let why = match timeout(TAKEN, exporter.export(spans(&trace))).await {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {TAKEN:?}"),
        };
        tracing::warn!(why, "the collector did not take a trace");
    }
}

fn spans(trace: &Trace) -> Vec<SpanData> {
    trace.spans.iter().enumerate().map(|(place, span)| data(trace, place, span)).collect()
}

fn data(trace: &Trace, place: usize, span: &Span) -> SpanData {
    let time = |ms: u64| UNIX_EPOCH.checked_add(Duration::from_millis(ms)).unwrap_or_else(SystemTime::now);
    let context = SpanContext::new(TraceId::from_bytes(trace.id), id(trace, place), TraceFlags::SAMPLED, false, TraceState::NONE);
    let attributes = span.attributes.iter().map(|(key, value)| match value.parse::<i64>() {
        Ok(number) => KeyValue::new(*key, number),
        Err(_) => KeyValue::new(*key, cut(value, TEXT)),
    });
    SpanData {
        span_context: context,
        parent_span_id: span.parent.map_or(SpanId::INVALID, |parent| id(trace, parent)),
        parent_span_is_remote: false,
        span_kind: SpanKind::Internal,
        name: span.name.into(),
        start_time: time(span.begun),
        end_time: time(span.ended),
        attributes: attributes.collect(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: span.failure.as_ref().map_or(Status::Ok, |failure| Status::error(cut(failure, TEXT))),
        instrumentation_scope: InstrumentationScope::builder("weightsync").build(),
    }
}

/// A span's id follows from its trace's and its place.
fn id(trace: &Trace, place: usize) -> SpanId {
    let digest = blake3::Hasher::new().update(&trace.id).update(&place.to_be_bytes()).finalize();
    let mut id = [0; 8];
    digest.as_bytes().iter().zip(&mut id).for_each(|(from, to)| *to = *from);
    SpanId::from_bytes(id)
}

/// The HTTP client that this program has anyway.
#[derive(Debug)]
struct Client(reqwest::Client);

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let sent = self.0.request(parts.method, parts.uri.to_string()).headers(parts.headers).body(body);
        let mut answer = sent.send().await?;
        let mut text = Vec::new();
        while let Some(piece) = answer.chunk().await? {
            if text.len() + piece.len() > ANSWER {
                return Err("its answer is longer than 64 KiB".into());
            }
            text.extend_from_slice(&piece);
        }
        Ok(Response::builder().status(answer.status()).body(text.into())?)
    }
}
