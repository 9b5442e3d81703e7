//! Reads one JSON object a line from a response without an end. Decides how a stream ended: closed (the peer died or left), silent (it may
//! run, but sends nothing), or invalid.

use std::marker::PhantomData;
use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, StreamExt, TryStreamExt};
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tokio_util::codec::{FramedRead, LinesCodec, LinesCodecError};
use tokio_util::io::StreamReader;
use weightsync_core::protocol::LONGEST_EVENT;

/// How a stream of events ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum StreamEnd {
    #[error("the connection was closed ({0})")]
    Closed(String),
    #[error("nothing was heard for {0:?}")]
    Silent(Duration),
    #[error("invalid line: {0}")]
    BadLine(String),
}

/// Events of one peer, one JSON object a line.
pub struct EventStream<T> {
    lines: Pin<Box<dyn Stream<Item = Result<String, LinesCodecError>> + Send>>,
    silence: Duration,
    events: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> EventStream<T> {
    pub(super) fn new(response: reqwest::Response, silence: Duration) -> Self {
        let bytes = StreamReader::new(response.bytes_stream().map_err(std::io::Error::other));
        let lines = FramedRead::new(bytes, LinesCodec::new_with_max_length(LONGEST_EVENT));
        Self { lines: Box::pin(lines), silence, events: PhantomData }
    }

    /// The next event. Safe to cancel. Nothing follows an error.
    pub async fn next(&mut self) -> Result<T, StreamEnd> {
        match timeout(self.silence, self.lines.next()).await {
            Err(_) => Err(StreamEnd::Silent(self.silence)),
            Ok(None) => Err(StreamEnd::Closed("end of stream".into())),
            Ok(Some(Err(LinesCodecError::MaxLineLengthExceeded))) => Err(StreamEnd::BadLine(format!("longer than {LONGEST_EVENT} bytes"))),
            Ok(Some(Err(LinesCodecError::Io(error)))) => Err(StreamEnd::Closed(error.to_string())),
            Ok(Some(Ok(line))) => serde_json::from_str(&line).map_err(|cause| StreamEnd::BadLine(cause.to_string())),
        }
    }
}
