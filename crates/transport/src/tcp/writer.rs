//! The output on one connection to the next member of a chain: items in their order, signs of life between them, and a last message.
//!
//! Decides how many bytes go into one call, and that the reason for a cancelled stream comes before anything else. Never reads.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::AsyncWriteExt;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc, watch};
use tokio::time::sleep;

use super::frame::{Frame, put_part_start};
use super::socket::Writer;
use weightsync_core::protocol::{BucketHeader, LentPiece, StreamFailure};

/// Held by all unsent parts of a bucket.
pub(super) type Sent = Arc<OwnedSemaphorePermit>;

pub(super) enum Item {
    Head(BucketHeader),
    /// Bytes, at most a block of them, so that a sign of life or a failure need not wait for more.
    Part(Bytes, Option<Sent>),
    /// The stream continues on another connection.
    Cut,
    Digest(u128),
    Lent(LentPiece),
    End,
}

/// When a sign of life is sent.
#[derive(Clone)]
pub(super) struct Life {
    /// After each interval.
    pub(super) by_itself: Option<Duration>,
    /// Otherwise, on each notification.
    pub(super) reported: Arc<Notify>,
}

impl Life {
    async fn due(&self) {
        match self.by_itself {
            Some(period) => sleep(period).await,
            None => self.reported.notified().await,
        }
    }
}

/// Sends items, signs of life between them, and at last the reason for the end of the stream. Ends when the connection breaks or the last
/// message was sent.
pub(super) async fn send_items(
    mut writer: Writer,
    mut items: mpsc::UnboundedReceiver<Item>,
    mut aborted: watch::Receiver<Option<StreamFailure>>,
    life: Life,
) -> io::Result<()> {
    let mut small = Vec::with_capacity(4096);
    loop {
        let failure = aborted.borrow_and_update().clone();
        if let Some(failure) = failure {
            Frame::Failure(failure).put(&mut small);
            writer.write_all(&small).await?;
            return writer.shutdown().await;
        }
        let item = if let Ok(item) = items.try_recv() {
            item
        } else {
            // Nothing more fits into one write.
            writer.write_all(&small).await?;
            writer.flush().await?;
            small.clear();
            tokio::select! {
                biased;
                _ = aborted.changed() => continue,
                Some(item) = items.recv() => item,
                () = life.due() => {
                    Frame::Alive.put(&mut small);
                    continue;
                }
            }
        };
        match item {
            Item::Head(header) => Frame::Head(header).put(&mut small),
            Item::Cut => Frame::Cut.put(&mut small),
            Item::Digest(digest) => Frame::Digest(digest).put(&mut small),
            Item::Lent(piece) => Frame::Lent(piece).put(&mut small),
            Item::End => Frame::End.put(&mut small),
            Item::Part(part, _sent) => send_part(&mut writer, &mut small, part).await?,
        }
    }
}

/// Sends the bytes in `small`, and a part after them, in as few calls as the kernel allows.
async fn send_part(writer: &mut Writer, small: &mut Vec<u8>, part: Bytes) -> io::Result<()> {
    put_part_start(small, part.len());
    writer.write_all_buf(&mut Buf::chain(small.as_slice(), part)).await?;
    small.clear();
    Ok(())
}
