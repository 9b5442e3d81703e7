//! Whether what a member announces of the payloads that travel outside of the connection makes sense: heads, the pieces of each bucket, digests.
//!
//! Decides only the order: a bucket is announced whole, piece after piece, before the next one, and its digest follows its last piece. It
//! never looks at a byte.

use weightsync_core::protocol::{BucketHeader, LentPiece};

/// What does not make sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Disorder {
    #[error("a bucket is longer than its head says, or a piece does not follow the one before")]
    Piece,
    #[error("a bucket is shorter than its head says")]
    Short,
}

/// The announcements of one stream so far.
#[derive(Default)]
pub(crate) struct Announcements {
    /// The bucket that was announced last, and how many of its bytes.
    open: Option<(BucketHeader, u64)>,
    /// Buckets of which all pieces were announced, and digests.
    whole: u64,
    digests: u64,
}

impl Announcements {
    /// A bucket whose pieces are announced one by one.
    pub(crate) fn head(&mut self, header: BucketHeader) -> Result<(), Disorder> {
        if self.open.replace((header, 0)).is_some() {
            return Err(Disorder::Short);
        }
        Ok(())
    }

    /// A bucket that comes by itself.
    pub(crate) fn whole(&mut self) {
        self.whole += 1;
    }

    /// The next piece; gives its bucket.
    pub(crate) fn piece(&mut self, piece: &LentPiece) -> Result<BucketHeader, Disorder> {
        let (header, at) = self.open.as_mut().ok_or(Disorder::Piece)?;
        let header = *header;
        let end = piece.offset.checked_add(piece.bytes).filter(|end| *end <= header.bytes);
        let end = end.filter(|_| piece.offset == *at && piece.bytes > 0).ok_or(Disorder::Piece)?;
        *at = end;
        if end == header.bytes {
            self.open = None;
            self.whole += 1;
        }
        Ok(header)
    }

    /// The digest of the next bucket.
    pub(crate) fn digest(&mut self) -> Result<(), Disorder> {
        self.digests += 1;
        if self.digests > self.whole { Err(Disorder::Short) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
