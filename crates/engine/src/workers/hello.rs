//! The agreement with a worker of an engine before the first bucket.

use std::time::Duration;

use serde::Deserialize;
use tokio::io::BufReader;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// The agreement before the first bucket.
pub(crate) struct Rules {
    pub(crate) token: String,
    /// Whether a draft model follows the model.
    pub(crate) draft: bool,
    /// What to do where its workers cannot be fed like this.
    pub(crate) otherwise: &'static str,
    /// Longest time between two lines to a worker. After half of it without a bucket, the agent sends a sign of life.
    pub(crate) silence: Duration,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Hello {
    pub(crate) token: String,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) device: String,
    pub(crate) digests: Vec<String>,
    /// Whether a session is open that an earlier incarnation of an agent left.
    pub(crate) open: bool,
    /// Whether it accepts buckets for a draft model.
    #[serde(default)]
    pub(crate) draft: bool,
    /// UUID (`GPU-...`) of the GPU that it computes on.
    #[serde(default)]
    pub(crate) gpu: Option<String>,
}

/// The two directions of a worker's connection.
pub(crate) struct Parts {
    pub(crate) reader: BufReader<OwnedReadHalf>,
    pub(crate) writer: OwnedWriteHalf,
}

impl Parts {
    pub(crate) fn new(socket: UnixStream) -> Self {
        let (reader, writer) = socket.into_split();
        Self { reader: BufReader::new(reader), writer }
    }
}
