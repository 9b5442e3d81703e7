//! How handlers read requests and respond: refusals as JSON with a fitting status, event streams as one JSON object a line.

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::identity::PeerIdentity;
use weightsync_core::protocol::{Call, Refusal, RefusalCode, Rejection};

/// What the handler of a call returns.
pub type Answered<C, E = Refusal> = Result<Json<<C as Call>::Answer>, Failed<E>>;

/// The response of a handler that refuses a request: a [`Refusal`] or a [`Rejection`], as JSON with a fitting status.
#[derive(Debug)]
pub struct Failed<E>(pub E);

impl<E> From<E> for Failed<E> {
    fn from(cause: E) -> Self {
        Self(cause)
    }
}

impl IntoResponse for Failed<Refusal> {
    fn into_response(self) -> Response {
        let status = match self.0.code {
            RefusalCode::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
            RefusalCode::Forbidden => StatusCode::FORBIDDEN,
            _ => StatusCode::CONFLICT,
        };
        (status, Json(self.0)).into_response()
    }
}

impl IntoResponse for Failed<Rejection> {
    fn into_response(self) -> Response {
        let status = if self.0.retryable { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::FORBIDDEN };
        (status, Json(self.0)).into_response()
    }
}

/// A JSON body. A request without a readable one gets a [`Refusal`] of [`RefusalCode::Invalid`].
pub struct Valid<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Valid<T> {
    type Rejection = Failed<Refusal>;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failed<Refusal>> {
        let invalid = |message: String| Failed(Refusal { code: RefusalCode::Invalid, message });
        let body = Bytes::from_request(request, state).await.map_err(|cause| invalid(cause.to_string()))?;
        serde_json::from_slice(&body).map(Self).map_err(|cause| invalid(format!("the body cannot be understood: {cause}")))
    }
}

/// Handlers take the peer's identity as an argument; a peer without a certificate is refused.
impl<S: Send + Sync> FromRequestParts<S> for PeerIdentity {
    type Rejection = Failed<Refusal>;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Failed<Refusal>> {
        let message = "this needs a certificate; enrol first";
        parts.extensions.get().cloned().ok_or_else(|| Failed(Refusal { code: RefusalCode::Forbidden, message: message.into() }))
    }
}

/// Responds with one JSON object a line until `events` ends.
pub fn ndjson<T: Serialize>(events: impl Stream<Item = T> + Send + 'static) -> Response {
    let lines = events.map(|event| {
        let mut line = serde_json::to_vec(&event)?;
        line.push(b'\n');
        Ok::<_, serde_json::Error>(Bytes::from(line))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}
