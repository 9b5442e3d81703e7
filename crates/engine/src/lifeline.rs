//! An idle connection to an engine's server. Its end shows at once that the server's process ended.
//!
//! When a process ends, the kernel closes its connections, even those that it never accepted. No other process can listen on its port
//! before that. Nothing is ever sent on the connection: uvicorn (vLLM, SGLang, LMDeploy, FastDeploy) and hyper wait for a first request
//! without a limit. Decides only whether the connection is open; its end does not prove that the process ended.

use std::time::Duration;

use reqwest::Url;
use rustix::net::RecvFlags;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::localhost::{self, LOCALHOST};

#[derive(Debug)]
pub(super) struct Lifeline(TcpStream);

impl Lifeline {
    /// Connects to the server at `http://HOST:PORT`; `None` if the connection is not accepted within `limit`.
    pub(super) async fn open(url: &str, limit: Duration) -> Option<Self> {
        let url = Url::parse(url).ok()?;
        let (host, port) = (url.host_str()?, url.port_or_known_default()?);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let connect = async {
            if host == LOCALHOST {
                return TcpStream::connect(localhost::addresses(port).as_slice()).await;
            }
            TcpStream::connect((host, port)).await
        };
        timeout(limit, connect).await.ok()?.ok().map(Self)
    }

    /// Whether it is open; asks only the kernel.
    pub(super) fn stands(&self) -> bool {
        let mut byte = [0];
        // Unrequested bytes come from a server that reports why it closes.
        let peeked = rustix::net::recv(&self.0, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        matches!(peeked, Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR))
    }

    pub(super) async fn broke(&self) {
        // Any result means the end.
        let _ = self.0.peek(&mut [0]).await;
    }
}
