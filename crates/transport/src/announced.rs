//! Whether a member's announcements of payloads outside of the connection are valid: heads, the pieces of each bucket, digests.
//!
//! Decides only the order: all pieces of a bucket are announced before the next bucket, and its digest follows its last piece. It never
//! reads a byte.

use weightsync_core::protocol::{BucketHeader, LentPiece};

/// An invalid announcement.
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
    /// The bucket that was announced last, and the number of its announced bytes.
    open: Option<(BucketHeader, u64)>,
    /// Number of completely announced buckets, and of digests.
    whole: u64,
    digests: u64,
}

impl Announcements {
    /// Begins a bucket whose pieces are announced one by one.
    pub(crate) fn head(&mut self, header: BucketHeader) -> Result<(), Disorder> {
        if self.open.replace((header, 0)).is_some() {
            return Err(Disorder::Short);
        }
        Ok(())
    }

    /// Records a bucket without separate pieces.
    pub(crate) fn whole(&mut self) {
        self.whole += 1;
    }

    /// Records the next piece; returns its bucket.
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

    /// Records the digest of the next bucket.
    pub(crate) fn digest(&mut self) -> Result<(), Disorder> {
        self.digests += 1;
        if self.digests > self.whole { Err(Disorder::Short) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
