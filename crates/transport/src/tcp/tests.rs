//! Properties of TCP only: frames on a wire, strangers, TLS, and a leader that dies with its socket.
#![allow(clippy::cast_possible_truncation)]

mod frames;
mod lanes;
mod strangers;
mod stream;
mod tls;

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::frame::StreamId;
use super::frame::{Frame, Parser};
use crate::tests::fixture::LONG;
use weightsync_core::protocol::{DATA_MAGIC, DataHello, StreamFailure};

/// A leader that sends the test's own bytes.
struct Wire {
    stream: TcpStream,
    parser: Parser,
    unread: Vec<u8>,
    /// Number of connections that the member agreed to, and the name that they must send.
    agreed: Option<(u32, StreamId)>,
}

impl Wire {
    async fn open(address: &str, hello: &DataHello) -> Self {
        Self::begin(address, serde_json::to_vec(hello).unwrap()).await
    }

    /// Requests so many connections.
    async fn open_with(lanes: usize, address: &str, hello: &DataHello) -> Self {
        let mut json = serde_json::to_value(hello).unwrap();
        json["lanes"] = lanes.into();
        Self::begin(address, serde_json::to_vec(&json).unwrap()).await
    }

    async fn begin(address: &str, json: Vec<u8>) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        let mut wire = Self { stream, parser: Parser::default(), unread: Vec::new(), agreed: None };
        wire.write(&[&DATA_MAGIC, (json.len() as u32).to_le_bytes().as_slice(), &json].concat()).await;
        wire
    }

    async fn write(&mut self, bytes: &[u8]) {
        timeout(LONG, self.stream.write_all(bytes)).await.unwrap().unwrap();
    }

    async fn frame(&mut self, frame: Frame<'_>) {
        let mut bytes = Vec::new();
        frame.put(&mut bytes);
        self.write(&bytes).await;
    }

    /// The next reply that is not a sign of life; `None` at the end of the connection.
    async fn answer(&mut self) -> Option<Result<&'static str, StreamFailure>> {
        loop {
            let unread = std::mem::take(&mut self.unread);
            let mut input = unread.as_slice();
            let found = self.parser.next(&mut input).unwrap().map(|frame| match frame {
                Frame::Alive => None,
                Frame::Admitted => Some(Ok("admitted")),
                Frame::Done => Some(Ok("done")),
                Frame::Failure(failure) => Some(Err(failure)),
                Frame::Lanes(count, id) => {
                    self.agreed = Some((count, id));
                    Some(Ok("lanes"))
                }
                other => panic!("{other:?}"),
            });
            self.unread = input.to_vec();
            match found {
                Some(Some(answer)) => return Some(answer),
                Some(None) => {}
                None => {
                    let mut more = [0; 1000];
                    let length = timeout(LONG, self.stream.read(&mut more)).await.expect("no answer").unwrap_or(0);
                    if length == 0 {
                        return None;
                    }
                    self.unread.extend_from_slice(&more[..length]);
                }
            }
        }
    }
}

async fn closes(stream: &mut TcpStream, limit: Duration) -> bool {
    let mut rest = Vec::new();
    timeout(limit, stream.read_to_end(&mut rest)).await.is_ok()
}
