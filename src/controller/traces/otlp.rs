//! Posts traces to an OpenTelemetry collector as JSON (OTLP over HTTP). Decides the format of a trace and when it is posted again. It never
//! delays an update: every wait has a deadline, and it logs and drops a trace that the collector does not accept.

use std::time::Duration;

use percent_encoding::percent_decode_str;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Client, StatusCode, Url};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout_at};
use weightsync_core::protocol::cut;
use weightsync_net::backoff::Backoff;
use weightsync_net::https::{no_tls, root_cause};

use super::{BoxError, Span, Trace, TracesError};

/// Longest time for one trace, all its posts together.
const PATIENCE: Duration = Duration::from_secs(10);
/// Waits between posts of one trace, the first and the longest.
const WAITS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(1600));
/// Longest part of a response that is read, in bytes. Collectors respond with less than 100.
const ANSWER: usize = 64 << 10;
/// Longest text of an attribute in bytes.
const TEXT: usize = 512;
/// SPAN_KIND_INTERNAL.
const INTERNAL: u8 = 1;
/// This trace is sampled (bit 0), and every parent is known (bit 8) to be of this process (bit 9 is not set).
const FLAGS: u32 = 0x101;

/// A collector, and the resource attributes of this process.
pub(super) struct Collector {
    client: Client,
    url: Url,
    instance: String,
}

impl Collector {
    /// The collector at `endpoint`, which gets `headers` with every post.
    pub(super) fn new(endpoint: &str, headers: &str, instance: &str) -> Result<Self, TracesError> {
        let headers = parse_headers(headers)?;
        Self::connect(endpoint, headers, instance).map_err(|source| TracesError::Endpoint { endpoint: endpoint.to_owned(), source })
    }

    fn connect(endpoint: &str, headers: HeaderMap, instance: &str) -> Result<Self, BoxError> {
        let mut url = Url::parse(endpoint)?;
        if url.scheme() != "http" {
            return Err(format!("its scheme is {:?}, and traces are sent over http only", url.scheme()).into());
        }
        // As specified by OTLP for OTEL_EXPORTER_OTLP_ENDPOINT.
        if !url.path().ends_with("/v1/traces") {
            let path = format!("{}/v1/traces", url.path().trim_end_matches('/'));
            url.set_path(&path);
        }
        let client = Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .use_preconfigured_tls(no_tls()?)
            .user_agent(concat!("weightsync/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .build()?;
        Ok(Self { client, url, instance: instance.to_owned() })
    }

    /// Posts each trace, one after the other, until every sender is gone.
    pub(super) async fn post_all(self, mut traces: mpsc::Receiver<Trace>) {
        while let Some(trace) = traces.recv().await {
            if let Err(error) = self.post(&trace).await {
                tracing::warn!(why = root_cause(&error), "a trace, or a part of it, did not reach the collector");
            }
        }
    }

    /// Posts one trace, and repeats it while the collector cannot be reached or requests a retry.
    async fn post(&self, trace: &Trace) -> Result<(), PostError> {
        let body = self.body(trace);
        let until = Instant::now() + PATIENCE;
        let mut backoff = Backoff::new(WAITS.0, WAITS.1);
        loop {
            let error = match timeout_at(until, self.post_once(&body)).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => error,
                Err(_) => return Err(PostError::Late),
            };
            let Some(asked) = error.may_try_after() else { return Err(error) };
            let next = Instant::now() + backoff.failed().max(asked);
            if next >= until {
                return Err(error);
            }
            sleep_until(next).await;
        }
    }

    async fn post_once(&self, body: &Value) -> Result<(), PostError> {
        let sent = self.client.post(self.url.clone()).json(body).send().await;
        let mut answer = sent.map_err(|error| PostError::Http(error.without_url()))?;
        let status = answer.status();
        if !status.is_success() {
            let seconds = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
            return Err(PostError::Status { status, retry_after: Duration::from_secs(seconds.unwrap_or(0)).min(PATIENCE) });
        }
        let mut text = Vec::new();
        while text.len() < ANSWER
            && let Ok(Some(piece)) = answer.chunk().await
        {
            text.extend_from_slice(&piece);
        }
        // The status confirms the trace. The body may be empty, or give the cause of a partial loss.
        let answer: Value = serde_json::from_slice(&text).unwrap_or_default();
        match answer.pointer("/partialSuccess/errorMessage").and_then(Value::as_str) {
            None | Some("") => Ok(()),
            Some(why) => Err(PostError::Partly(cut(why, TEXT))),
        }
    }

    /// The JSON of `ExportTraceServiceRequest`: ids in hex, enums as numbers, numbers of 64 bits as strings.
    fn body(&self, trace: &Trace) -> Value {
        let resource = [
            Attribute::new("service.name", "weightsync"),
            Attribute::new("service.version", env!("CARGO_PKG_VERSION")),
            Attribute::new("service.instance.id", &self.instance),
        ];
        let spans: Vec<_> = trace.spans.iter().enumerate().map(|(place, span)| SpanJson::new(trace, place, span)).collect();
        json!({"resourceSpans": [{
            "resource": {"attributes": resource},
            "scopeSpans": [{"scope": {"name": "weightsync"}, "spans": spans}],
        }]})
    }
}

/// Why the collector did not accept a whole trace.
#[derive(Debug, thiserror::Error)]
enum PostError {
    #[error("it did not respond within {PATIENCE:?}")]
    Late,
    #[error(transparent)]
    Http(reqwest::Error),
    #[error("it answered {status}")]
    Status { status: StatusCode, retry_after: Duration },
    #[error("it accepted only a part of the trace: {0}")]
    Partly(String),
}

impl PostError {
    /// The collector's requested wait before a retry; `None` if a retry would fail again.
    fn may_try_after(&self) -> Option<Duration> {
        match self {
            Self::Http(_) => Some(Duration::ZERO),
            // The statuses that OTLP defines as retryable.
            Self::Status { status, retry_after } => matches!(status.as_u16(), 429 | 502 | 503 | 504).then_some(*retry_after),
            Self::Late | Self::Partly(_) => None,
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SpanJson<'a> {
    trace_id: String,
    span_id: String,
    /// Empty for the first span of a trace.
    parent_span_id: String,
    flags: u32,
    name: &'a str,
    kind: u8,
    start_time_unix_nano: String,
    end_time_unix_nano: String,
    attributes: Vec<Attribute<'a>>,
    status: Status,
}

impl<'a> SpanJson<'a> {
    fn new(trace: &Trace, place: usize, span: &'a Span) -> Self {
        let nanos = |ms: u64| ms.saturating_mul(1_000_000).to_string();
        Self {
            trace_id: format!("{:032x}", u128::from_be_bytes(trace.id)),
            span_id: span_id(trace, place),
            parent_span_id: span.parent.map(|parent| span_id(trace, parent)).unwrap_or_default(),
            flags: FLAGS,
            name: span.name,
            kind: INTERNAL,
            start_time_unix_nano: nanos(span.begun),
            end_time_unix_nano: nanos(span.ended),
            attributes: span.attributes.iter().map(|(key, value)| Attribute::new(key, value)).collect(),
            status: match &span.failure {
                None => Status { code: 1, message: String::new() },
                Some(failure) => Status { code: 2, message: cut(failure, TEXT) },
            },
        }
    }
}

/// Code 1 is a success, 2 an error.
#[derive(Serialize)]
struct Status {
    code: u8,
    message: String,
}

#[derive(Serialize)]
struct Attribute<'a> {
    key: &'a str,
    value: AnyValue,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
enum AnyValue {
    StringValue(String),
    IntValue(String),
}

impl<'a> Attribute<'a> {
    /// A number if `text` is one that fits into 64 bits with a sign.
    fn new(key: &'a str, text: &str) -> Self {
        let number = text.parse::<i64>().map(|number| AnyValue::IntValue(number.to_string()));
        Self { key, value: number.unwrap_or_else(|_| AnyValue::StringValue(cut(text, TEXT))) }
    }
}

/// The id of a span follows from the trace's id and the span's place: the first 8 bytes of a BLAKE3 hash, in hex.
fn span_id(trace: &Trace, place: usize) -> String {
    let digest = blake3::Hasher::new().update(&trace.id).update(&place.to_be_bytes()).finalize();
    digest.to_hex().chars().take(16).collect()
}

/// `NAME=VALUE` pairs between commas, values percent-encoded, as OTEL_EXPORTER_OTLP_HEADERS has them.
fn parse_headers(text: &str) -> Result<HeaderMap, TracesError> {
    let parse = |pair: &str| -> Result<(HeaderName, HeaderValue), BoxError> {
        let (name, value) = pair.split_once('=').ok_or("it has no `=`")?;
        let mut value = HeaderValue::from_bytes(&percent_decode_str(value.trim()).collect::<Vec<u8>>())?;
        value.set_sensitive(true);
        Ok((name.trim().parse()?, value))
    };
    let pairs = text.split(',').map(str::trim).enumerate().filter(|(_, pair)| !pair.is_empty());
    pairs.map(|(place, pair)| parse(pair).map_err(|source| TracesError::Header { place: place + 1, source })).collect()
}
