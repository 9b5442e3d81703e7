//! The webhook that adds the agent to pods as they are created, for clusters whose API server has no MutatingAdmissionPolicy.
//!
//! Decides the response to one AdmissionReview; [`inject`](crate::inject) decides the lines. Every controller responds, not only the leader.
//! It never changes a pod without the label, never injects twice, and never calls the API server.

mod certificate;
mod shares;
#[cfg(test)]
mod tests;

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::StreamExt;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview, Operation};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;

#[cfg(test)]
pub(super) use certificate::judge;
pub(super) use certificate::{Served, keep};

use self::shares::{Lane, PART, Share};
use crate::inject::{Options, Resources, inject};
use weightsync_net::https::ENROLLMENT_STRANGERS;

/// Path of the webhook; the chart's MutatingWebhookConfiguration names it.
pub(super) const PATH: &str = "/v1/inject";
/// The longest body of a review: the API server takes requests of at most 3 MiB.
const BODY: usize = 3 << 20;
/// All long bodies that are read at once, in bytes.
const LONG: usize = 12 << 20;
/// All bodies of at most one part, in bytes: a pod has 10 to 50 KiB. There is one for each peer without a certificate that the listener keeps,
/// so that a pod waits for no other body.
const SHORT: usize = ENROLLMENT_STRANGERS * PART;
/// The first byte of a body comes with its head, or right after it.
const FIRST: Duration = Duration::from_millis(250);
/// Longest silence in a body.
const NEXT: Duration = Duration::from_secs(1);
/// Below the 5 seconds of the chart's `timeoutSeconds`, so that the caller learns the cause.
const DEADLINE: Duration = Duration::from_secs(4);

/// What the injected lines contain beyond what the controller knows. The chart gives it as JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct WebhookSettings {
    /// Requests and limits of the added containers.
    pub resources: Resources,
    /// Limit of the volume at /dev/shm that a pod gets.
    pub shared_memory: Option<String>,
    /// Names of Secrets for pulling the image.
    pub image_pull_secrets: Vec<String>,
}

/// The webhook, as the chart sets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injection {
    /// What it adds.
    pub lines: WebhookSettings,
    /// Folder with `tls.crt` and `tls.key`, by which the API server knows it.
    pub certificate: PathBuf,
}

struct Webhook {
    options: Options,
    short: Lane,
    long: Lane,
}

/// The route of the webhook, for the enrolment server's listener.
pub(super) fn router(options: Options) -> Router {
    let webhook = Webhook { options, short: Lane::new(SHORT), long: Lane::new(LONG) };
    Router::new().route(PATH, post(answer)).with_state(Arc::new(webhook))
}

/// Why a request is no review that can be answered. The API server then refuses the pod, with this text.
#[derive(Debug, thiserror::Error)]
enum ReviewError {
    #[error("the request has no Content-Length: send the body's length")]
    Unmeasured,
    #[error("the body has {0} bytes; at most {BODY} are read")]
    TooLarge(usize),
    #[error("the body stopped after {0} bytes: send it without a pause")]
    Silent(usize),
    #[error("the body could not be read: {0}")]
    Unread(#[from] axum::Error),
    #[error("the request was not answered within {DEADLINE:?}: the controller has too many at once; create the pod again")]
    Late,
    #[error("the body is no AdmissionReview of admission.k8s.io/v1: {0}")]
    Unreadable(String),
    #[error("the response cannot be written: {0}")]
    Unwritable(#[from] serde_json::Error),
}

impl IntoResponse for ReviewError {
    fn into_response(self) -> Response {
        let status = match &self {
            Self::Unmeasured => StatusCode::LENGTH_REQUIRED,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Silent(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Late => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unread(_) | Self::Unreadable(_) => StatusCode::BAD_REQUEST,
            Self::Unwritable(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, self.to_string()).into_response()
    }
}

async fn answer(State(webhook): State<Arc<Webhook>>, request: Request) -> Response {
    let reviewed = timeout(DEADLINE, read_and_review(&webhook, request)).await.unwrap_or(Err(ReviewError::Late));
    let mut response = match reviewed {
        Ok(review) => Json(review).into_response(),
        Err(error) => {
            tracing::warn!(%error, "an admission review was not answered");
            error.into_response()
        }
    };
    // The server closes idle connections of callers without a certificate: a request on one that just closes would fail.
    response.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("close"));
    response
}

async fn read_and_review(webhook: &Webhook, request: Request) -> Result<Value, ReviewError> {
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    let length = length.ok_or(ReviewError::Unmeasured)?;
    if length > BODY {
        return Err(ReviewError::TooLarge(length));
    }
    let from = request.extensions().get::<ConnectInfo<SocketAddr>>().map_or(Ipv6Addr::UNSPECIFIED.into(), |from| from.0.ip());
    let lane = if length <= PART { &webhook.short } else { &webhook.long };
    // Held until the answer is made: that takes as much again.
    let mut share = lane.share(from);
    let body = read(request.into_body(), length, &mut share).await?;
    review(&body, &webhook.options)
}

/// The body, in room that is taken as it arrives.
async fn read(body: Body, length: usize, share: &mut Share<'_>) -> Result<Vec<u8>, ReviewError> {
    let (mut frames, mut text, mut patience) = (body.into_data_stream(), Vec::new(), FIRST);
    loop {
        let frame = timeout(patience, frames.next()).await.map_err(|_| ReviewError::Silent(text.len()))?;
        let Some(frame) = frame.transpose()? else { return Ok(text) };
        let together = text.len() + frame.len();
        if together > length {
            return Err(ReviewError::TooLarge(together));
        }
        while share.bytes() < together {
            share.grow().await;
        }
        text.reserve_exact(share.bytes().min(length).saturating_sub(text.len()));
        text.extend_from_slice(&frame);
        patience = NEXT;
    }
}

/// The response to the review in this body.
fn review(body: &[u8], options: &Options) -> Result<Value, ReviewError> {
    let unreadable = |cause: &dyn std::fmt::Display| ReviewError::Unreadable(cause.to_string());
    let review: AdmissionReview<DynamicObject> = serde_json::from_slice(body).map_err(|cause| unreadable(&cause))?;
    if (review.types.kind.as_str(), review.types.api_version.as_str()) != ("AdmissionReview", "admission.k8s.io/v1") {
        return Err(unreadable(&format!("it is a {} of {}", review.types.kind, review.types.api_version)));
    }
    let request: AdmissionRequest<DynamicObject> = review.try_into().map_err(|_| unreadable(&"it has no request"))?;
    let response = AdmissionResponse::from(&request);
    let pod = (request.kind.group.as_str(), request.kind.kind.as_str()) == ("", "Pod");
    let whole = request.sub_resource.as_deref().unwrap_or_default().is_empty();
    let Some(object) = request.object.filter(|_| pod && whole && request.operation == Operation::Create) else {
        return Ok(serde_json::to_value(response.into_review())?);
    };
    let before = serde_json::to_value(object)?;
    let mut after = before.clone();
    if let Err(cause) = inject(&mut after, options) {
        return Ok(serde_json::to_value(response.deny(cause).into_review())?);
    }
    let mut review = serde_json::to_value(response.into_review())?;
    if after != before
        && let Some(response) = review.get_mut("response").and_then(Value::as_object_mut)
    {
        // Kubernetes documents base64; kube would write a list of numbers.
        let patch = STANDARD.encode(serde_json::to_vec(&json_patch::diff(&before, &after))?);
        response.insert("patchType".to_owned(), json!("JSONPatch"));
        response.insert("patch".to_owned(), json!(patch));
    }
    Ok(review)
}
