//! The worker's end of the socket pair, without a runtime: a thread that reads requests and descriptors, and answers that are written.
//!
//! The end of the agent is the end of this process, at once and without exit handlers.

use std::collections::VecDeque;
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};
use rustix::process::{Signal, getpid, kill_process};

use super::{Heard, Incoming};
use weightsync_core::protocol::worker::{WorkerCall, WorkerReply, WorkerRequest, decode_worker_frame, encode_worker_frame};

/// Most descriptors next to one read.
const DESCRIPTORS: usize = 16;

/// Reads requests until the agent is gone.
pub(super) fn read(socket: &OwnedFd, to_loop: &Sender<Heard>) {
    let mut received = Vec::new();
    let mut descriptors = VecDeque::new();
    let mut space = vec![0; 64 << 10];
    loop {
        match receive(socket, &mut space, &mut descriptors) {
            Ok(0) => end(),
            Ok(bytes) => received.extend_from_slice(space.get(..bytes).unwrap_or_default()),
            Err(Errno::INTR) => {}
            Err(_) => end(),
        }
        loop {
            match decode_worker_frame::<WorkerCall>(&mut received) {
                Ok(Some(call)) => {
                    // Descriptors come with the first byte of their frame, so in the order of the frames that need one.
                    let descriptor = matches!(call.request, WorkerRequest::MapHost { .. }).then(|| descriptors.pop_front()).flatten();
                    let _ = to_loop.send(Heard::Call(Box::new(Incoming::new(call, descriptor))));
                }
                Ok(None) => break,
                Err(error) => {
                    let _ = writeln!(std::io::stderr(), "the agent talks nonsense: {error}");
                    end();
                }
            }
        }
    }
}

fn receive(socket: &OwnedFd, space: &mut [u8], descriptors: &mut VecDeque<OwnedFd>) -> Result<usize, Errno> {
    let mut alongside = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut alongside = RecvAncillaryBuffer::new(&mut alongside);
    let message = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(space)], &mut alongside, RecvFlags::CMSG_CLOEXEC)?;
    for part in alongside.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    Ok(message.bytes)
}

fn end() {
    // An exit would run handlers of the driver and of NCCL, which may wait for a GPU that waits for a peer.
    let _ = kill_process(getpid(), Signal::KILL);
}

pub(super) struct Replies(OwnedFd);

impl Replies {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    pub(super) fn write(&mut self, reply: &WorkerReply) {
        let frame = match encode_worker_frame(reply) {
            Ok(frame) => frame,
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "an answer cannot be written: {error}");
                return;
            }
        };
        let mut rest = frame.as_slice();
        while !rest.is_empty() {
            match rustix::net::send(&self.0, rest, SendFlags::NOSIGNAL) {
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                // The agent is gone; the other thread sees it too.
                Err(_) => return,
            }
        }
    }
}
