//! Frames on the agent's end of the socket pair: written with a descriptor next to them where one belongs, read until the other side ends.
//!
//! Decides nothing about what a frame means.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use weightsync_core::protocol::worker::{WorkerReply, decode_worker_frame};

pub(super) struct Outgoing {
    pub frame: Vec<u8>,
    pub descriptor: Option<OwnedFd>,
}

/// Writes what comes until the sender is gone or the worker is.
pub(super) async fn write(mut frames: mpsc::UnboundedReceiver<Outgoing>, mut socket: OwnedWriteHalf) {
    while let Some(Outgoing { frame, descriptor }) = frames.recv().await {
        let rest = match &descriptor {
            None => Ok(frame.as_slice()),
            Some(descriptor) => {
                let send = || send_alongside(&socket, &frame, descriptor);
                let sent = socket.as_ref().async_io(Interest::WRITABLE, send).await;
                sent.map(|sent| frame.get(sent..).unwrap_or_default())
            }
        };
        let written = match rest {
            Ok(rest) => socket.write_all(rest).await,
            Err(error) => Err(error),
        };
        // A worker that reads nothing any more has ended, or hangs: its requests say which.
        if written.is_err() {
            return;
        }
    }
}

/// Sends the beginning of a frame together with the descriptor, and returns how many bytes were sent.
fn send_alongside(socket: &OwnedWriteHalf, frame: &[u8], descriptor: &OwnedFd) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut alongside = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    if !alongside.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("no room for one descriptor"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(socket.as_ref(), &[IoSlice::new(frame)], &mut alongside, flags)?)
}

/// Reads answers until the worker ends or sends invalid data; returns which.
pub(super) async fn read(mut socket: OwnedReadHalf, mut heard: impl FnMut(WorkerReply)) -> String {
    let mut received = Vec::new();
    loop {
        match socket.read_buf(&mut received).await {
            Ok(0) => return "it closed its socket".into(),
            Ok(_) => {}
            Err(error) => return error.to_string(),
        }
        loop {
            match decode_worker_frame(&mut received) {
                Ok(Some(reply)) => heard(reply),
                Ok(None) => break,
                Err(error) => return error.to_string(),
            }
        }
    }
}
