//! The agreement with a worker of vLLM before the first bucket.

use std::time::Duration;

use serde::Deserialize;
use tokio::io::BufReader;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// The agreement before the first bucket.
pub(super) struct Rules {
    pub(super) token: String,
    /// Whether a draft model follows the model.
    pub(super) draft: bool,
    /// Longest time between two lines to a worker. After half of it without a bucket, the agent sends a sign of life.
    pub(super) silence: Duration,
}

#[derive(Debug, Deserialize)]
pub(super) struct Hello {
    pub(super) token: String,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) device: String,
    pub(super) digests: Vec<String>,
    /// Whether a session is open that an earlier incarnation of an agent left.
    pub(super) open: bool,
    /// Whether it accepts buckets for a draft model.
    #[serde(default)]
    pub(super) draft: bool,
    /// UUID (`GPU-...`) of the GPU that it computes on.
    #[serde(default)]
    pub(super) gpu: Option<String>,
}

/// The two directions of a worker's connection.
pub(super) struct Parts {
    pub(super) reader: BufReader<OwnedReadHalf>,
    pub(super) writer: OwnedWriteHalf,
}

impl Parts {
    pub(super) fn new(socket: UnixStream) -> Self {
        let (reader, writer) = socket.into_split();
        Self { reader: BufReader::new(reader), writer }
    }
}
