//! The server on a real socket: with the blocking client for whole publishes, and with raw lines for what a client must not do.

mod nonsense;
mod outcomes;
mod streams;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{ClientServer, ClientServerConfig, PublishQueue, SocketName};
use crate::publish_job::PublishJob;
use weightsync_core::protocol::{Activation, ClientReply, ClientRequest, PublishResult, QueuePolicy, RosterView};
use weightsync_core::weights::{Dtype, TensorSpec};

/// Longer than anything here takes; a hang is a failure and not a wait.
const LIMIT: Duration = Duration::from_secs(30);

struct Agent {
    socket: SocketName,
    queue: Arc<PublishQueue>,
    roster: watch::Sender<RosterView>,
    _shutdown: DropGuard,
}

/// A server with buckets of 4 KiB and two slots, so that every test goes round the ring.
fn agent() -> Agent {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("test-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let socket = SocketName::of_pod(&name).unwrap();
    let config = ClientServerConfig { slots: 2, bucket_bytes: 4096, ..ClientServerConfig::at(socket.clone()) };
    let (roster, seen) = watch::channel(RosterView { epoch: Some(3), version: Some(1), replicas: Vec::new() });
    let queue = Arc::new(PublishQueue::default());
    let shutdown = CancellationToken::new();
    let server = ClientServer::bind(config, Arc::clone(&queue), seen).unwrap();
    tokio::spawn(server.run(shutdown.clone()));
    Agent { socket, queue, roster, _shutdown: shutdown.drop_guard() }
}

impl Agent {
    async fn job(&self) -> PublishJob {
        tokio::time::timeout(LIMIT, self.queue.take()).await.expect("a publish")
    }

    fn raw(&self) -> Raw {
        let stream = self.socket.connect().unwrap();
        stream.set_nonblocking(true).unwrap();
        Raw(UnixStream::from_std(stream).unwrap(), Vec::new())
    }

    async fn greeted(&self) -> Raw {
        let mut raw = self.raw();
        raw.say(r#"{"op":"hello","protocol":1,"client":"test"}"#).await;
        assert!(matches!(raw.hear().await, Some(ClientReply::Welcome { protocol: 1, version: Some(1), .. })));
        raw
    }
}

/// A client that says whatever a test wants.
struct Raw(UnixStream, Vec<u8>);

impl Raw {
    async fn say(&mut self, line: &str) {
        self.0.write_all(line.as_bytes()).await.unwrap();
        self.0.write_all(b"\n").await.unwrap();
    }

    async fn ask(&mut self, request: &ClientRequest) {
        self.say(&serde_json::to_string(request).unwrap()).await;
    }

    /// The next line that is not a sign of life; `None` when the agent closed the connection.
    async fn hear(&mut self) -> Option<ClientReply> {
        loop {
            if let Some(end) = self.1.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.1.drain(..=end).collect();
                match serde_json::from_slice(&line).unwrap() {
                    ClientReply::Alive => continue,
                    reply => return Some(reply),
                }
            }
            // Not `read`: it takes a short read for the last one, and a read ends early next to a descriptor (tokio 1.54).
            let mut chunk = [0; 4096];
            let receive = || Ok(rustix::net::recv(&self.0, &mut chunk[..], rustix::net::RecvFlags::DONTWAIT)?.1);
            let received = tokio::time::timeout(LIMIT, self.0.async_io(Interest::READABLE, receive)).await.expect("a line in time");
            match received.unwrap_or(0) {
                0 => return None,
                received => self.1.extend_from_slice(&chunk[..received]),
            }
        }
    }
}

/// Tensors that need nine buckets of 4 KiB, an empty one and a scalar among them.
fn tensors() -> Vec<TensorSpec> {
    let spec = |name: &str, dtype, shape: &[u64]| TensorSpec::new(name.into(), dtype, shape.into());
    vec![
        spec("embed", Dtype::BF16, &[64, 128]),
        spec("scale", Dtype::F32, &[]),
        spec("nothing", Dtype::F32, &[0, 7]),
        spec("head", Dtype::F32, &[33, 128]),
    ]
}

fn publish(version: u64) -> ClientRequest {
    let (queue, activation) = (QueuePolicy::Wait, Activation::Auto);
    ClientRequest::Publish { version, tensors: tensors(), queue, activation, repeatable: true, timeout_ms: 20_000, gpu: None }
}

fn result(version: u64) -> PublishResult {
    let (installed, behind, phases_ms) = (Vec::new(), Vec::new(), Vec::new());
    PublishResult {
        version,
        epoch: 3,
        attempts: 1,
        bytes: 0,
        manifest: "m".into(),
        installed,
        behind,
        phases_ms,
        mixed: Vec::new(),
        notes: Vec::new(),
    }
}
