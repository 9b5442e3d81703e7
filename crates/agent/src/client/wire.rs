//! Lines on the socket: read with a cap on their length, written with a deadline, a descriptor next to some of them.
//!
//! Decides nothing about what a line means.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::mpsc;

use super::host_ring::HostRing;
use weightsync_core::protocol::ClientReply;

/// A client that takes no byte for this long does not read any more.
const WRITE_SILENCE: Duration = Duration::from_secs(10);

pub(super) enum Outgoing {
    Line(ClientReply),
    /// A line with the memfd of a new ring next to it.
    WithMemory(ClientReply, Arc<HostRing>),
    /// A line with a listening socket next to it, which is closed here after it.
    WithListener(ClientReply, TcpListener),
    /// Nothing follows; the socket closes. Slots that are still read keep an [`Outbox`], so its end alone would come late.
    Close,
}

/// Where lines for the client are put; they leave in this order.
#[derive(Clone)]
pub(super) struct Outbox {
    lines: mpsc::UnboundedSender<Outgoing>,
    waiting: Arc<AtomicUsize>,
}

impl Outbox {
    pub(super) fn new() -> (Self, Lines) {
        let (to_lines, lines) = mpsc::unbounded_channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        (Self { lines: to_lines, waiting: Arc::clone(&waiting) }, Lines { lines, waiting })
    }

    pub(super) fn say(&self, reply: ClientReply) {
        self.put(Outgoing::Line(reply));
    }

    pub(super) fn put(&self, line: Outgoing) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // A closed channel means that the connection is over; its reader says so to anyone who must know.
        let _ = self.lines.send(line);
    }

    /// Lines that the client has not taken yet.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// The writer's end of an [`Outbox`].
pub(super) struct Lines {
    lines: mpsc::UnboundedReceiver<Outgoing>,
    waiting: Arc<AtomicUsize>,
}

impl Lines {
    /// Writes what comes until [`Outgoing::Close`], or until the client takes nothing any more.
    pub(super) async fn write_to(mut self, mut socket: OwnedWriteHalf) -> io::Result<()> {
        while let Some(line) = self.lines.recv().await {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            match line {
                Outgoing::Close => break,
                Outgoing::Line(reply) => write(&mut socket, &encode(&reply)?).await?,
                Outgoing::WithMemory(reply, ring) => write_with(&mut socket, &encode(&reply)?, ring.memory().fd()).await?,
                Outgoing::WithListener(reply, listener) => write_with(&mut socket, &encode(&reply)?, listener.as_fd()).await?,
            }
        }
        Ok(())
    }
}

fn encode(reply: &ClientReply) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    Ok(line)
}

/// Writes all of it; each byte that is taken extends the deadline.
async fn write(socket: &mut OwnedWriteHalf, mut rest: &[u8]) -> io::Result<()> {
    while !rest.is_empty() {
        let sent = in_time(socket.write(rest)).await?;
        if sent == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        rest = rest.get(sent..).unwrap_or_default();
    }
    Ok(())
}

async fn in_time<T>(step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(WRITE_SILENCE, step).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

async fn write_with(socket: &mut OwnedWriteHalf, line: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let sent = in_time(socket.as_ref().async_io(Interest::WRITABLE, || send_with(socket, line, descriptor))).await?;
    write(socket, line.get(sent..).unwrap_or_default()).await
}

/// Sends the beginning of a line together with the descriptor, and returns how many bytes were sent.
fn send_with(socket: &OwnedWriteHalf, line: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut alongside = SendAncillaryBuffer::new(&mut space);
    let descriptor = [descriptor];
    if !alongside.push(SendAncillaryMessage::ScmRights(&descriptor)) {
        return Err(io::Error::other("no room for one descriptor"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(socket.as_ref(), &[IoSlice::new(line)], &mut alongside, flags)?)
}
