//! HTTP between controller and agents: JSON over mutual TLS, with the peer's identity, and a deadline on every wait.
//!
//! [`serve_https`] and [`serve_plain`] run axum routers within [`Limits`]. [`AgentClient`] and [`ControllerClient`] call them and classify
//! failures. [`EventStream`] reads one JSON object a line, and distinguishes a closed connection from a silent one. Nothing here retries:
//! only the caller knows whether that is safe.

mod client;
mod limits;
mod places;
mod replies;
mod server;
mod stream;
#[cfg(test)]
mod tests;

pub use client::{AgentClient, CallError, ControllerClient, root_cause};
pub use limits::{ENROLLMENT_BODY, ENROLLMENT_STRANGERS, Limits};
pub use replies::{Answered, Failed, Valid, ndjson};
pub use server::{Access, serve_https, serve_plain};
pub use stream::{EventStream, StreamEnd};

/// reqwest requires a TLS configuration even for plain HTTP, and panics if it must find a provider by itself.
pub fn no_tls() -> Result<rustls::ClientConfig, rustls::Error> {
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(config.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth())
}
