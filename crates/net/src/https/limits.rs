//! How much a peer of a listener may take, and for how long: one set of numbers for each kind of listener.
//!
//! Holds numbers only. [`super::places`] decides which peer gets a place; the server enforces the times.

use std::time::Duration;

/// Longest request body that the enrolment server reads before it knows the caller: a signing request and a projected token take 4 KiB.
pub const ENROLLMENT_BODY: usize = 8 << 10;
/// Most peers without a certificate that may be connected to the enrolment server.
pub const ENROLLMENT_STRANGERS: usize = 256;

/// How much and how long a peer may take.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Longest TLS handshake.
    pub handshake: Duration,
    /// Longest time without a byte before the handshake, and from the handshake to the end of the first request's head.
    pub first: Duration,
    /// Longest wait for the head of a request; also how long an idle connection is kept.
    pub head: Duration,
    /// Longest time until a handler responds; streams may continue after that.
    pub answer: Duration,
    /// Bytes sent but not taken by the peer for this long end the connection.
    pub stalled: Duration,
    /// Longest time that requests may still run after a stop was requested.
    pub drain: Duration,
    /// Most connections.
    pub connections: usize,
    /// Most connections from one address.
    pub per_address: usize,
    /// Most connections of peers without a certificate.
    pub strangers: usize,
    /// Longest head of a request in bytes, at least 8192.
    pub head_bytes: usize,
    /// Longest body of a request in bytes.
    pub body_bytes: usize,
}

/// For a server of members of one group: bodies as long as the layout of a large model.
impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            first: Duration::from_secs(2),
            head: Duration::from_secs(15),
            answer: Duration::from_secs(120),
            stalled: Duration::from_secs(15),
            drain: Duration::from_secs(2),
            connections: 512,
            per_address: 128,
            strangers: 256,
            head_bytes: 16 << 10,
            // The layout of a model with 100 000 tensors is about 20 MB of JSON.
            body_bytes: 64 << 20,
        }
    }
}

impl Limits {
    /// For an enrolment server, which answers peers without a certificate: at most 2 MiB of bodies from all of them.
    pub fn enrollment() -> Self {
        Self {
            connections: 2 * ENROLLMENT_STRANGERS,
            per_address: 64,
            strangers: ENROLLMENT_STRANGERS,
            body_bytes: ENROLLMENT_BODY,
            ..Self::default()
        }
    }

    /// For plain pages: metrics, roster, log level, web page. All peers are strangers.
    pub fn pages() -> Self {
        Self { connections: 256, per_address: 64, strangers: 256, body_bytes: 4 << 10, ..Self::default() }
    }

    /// For probes, on a listener of their own: `/healthz` and `/readyz`.
    pub fn probes() -> Self {
        Self {
            head: Duration::from_secs(5),
            answer: Duration::from_secs(5),
            stalled: Duration::from_secs(5),
            connections: 64,
            per_address: 16,
            strangers: 64,
            head_bytes: 8 << 10,
            body_bytes: 1 << 10,
            ..Self::default()
        }
    }
}
