//! Where the bytes of a version come from: one contract for the trainer's ring, a checkpoint directory and a retained copy.
//!
//! The leader of an update takes the layout, then the buckets in order, and never asks which of the three it reads. A source decides
//! how bytes are obtained and who is at fault when they are not; it never decides whether an attempt is repeated.

use std::time::Duration;

use async_trait::async_trait;

use weightsync_core::protocol::{MemberName, PublishError, PublishErrorCode, UpdatePhase};
use weightsync_core::weights::{Bucket, Layout};
use weightsync_transport::Payload;

/// Gives the stream of one version, bucket by bucket.
#[async_trait]
pub trait VersionSource: Send {
    /// Tensors, places and cut; the same before the first bucket and after the last, in every attempt.
    fn layout(&self) -> &Layout;

    /// Lays the version out again, as the group that stands now wants it. Called once, when a group stands and before the first
    /// [`next`](Self::next): a publish may have been asked for when no one knew yet how weights would travel.
    fn lay_out(&mut self) {}

    /// Whether [`restart`](Self::restart) can succeed. False for a trainer that can write its tensors only once.
    fn repeatable(&self) -> bool;

    /// Whether the buckets that were not taken yet can still come as they are. False when memory that they were written into is gone (a GPU
    /// worker died): only [`restart`](Self::restart) helps then.
    fn holds(&self) -> bool {
        true
    }

    /// The next bucket in order, or `None` after the last. Ends with an error after `silence` without a sign of life from what is read.
    ///
    /// The bytes may lie in memory that the source uses again: it is given back when the last clone of the [`Payload`] is dropped, and a
    /// source has only a few of them. Holding all of them and asking for one more therefore ends in [`SourceError::Silent`].
    async fn next(&mut self, silence: Duration) -> Result<Option<(Bucket, Payload)>, SourceError>;

    /// Goes back to the first bucket for another attempt; `reason` says, for a person, why the last one failed.
    /// A [`Payload`] of the failed attempt may still be held meanwhile.
    async fn restart(&mut self, reason: &str) -> Result<(), SourceError>;

    /// No bucket will be asked for any more: a trainer may change its tensors.
    async fn released(&mut self);

    /// A second reader of the same bytes, from the first one on, when they stay where they are (a checkpoint): no copy in memory is needed
    /// then to try again or to feed others. None for bytes that a trainer writes.
    fn another(&self) -> Option<Box<dyn VersionSource>> {
        None
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SourceError {
    #[error("the trainer went away ({cause}) before all bytes were taken: publish the version again")]
    Gone { cause: String },
    #[error("the trainer gave the publish up: {reason}")]
    Cancelled { reason: String },
    #[error("the trainer wrote nothing for {silence:?}: its tensors take longer than that to gather, or it hangs")]
    Silent { silence: Duration },
    #[error("{what}")]
    Nonsense { what: String },
    #[error("the attempt failed ({reason}) and the trainer's source can be read only once: publish from a factory, or with retain")]
    NotRepeatable { reason: String },
    #[error("{what}")]
    BadCheckpoint { what: String },
    #[error("{what}: {cause}")]
    Io { what: String, cause: String },
}

impl SourceError {
    /// What the trainer is reported; `member` is the name of the source itself.
    pub fn publish_error(&self, member: Option<&MemberName>) -> PublishError {
        let (code, retryable) = match self {
            Self::Gone { .. } => (PublishErrorCode::Cancelled, true),
            Self::Cancelled { .. } => (PublishErrorCode::Cancelled, true),
            Self::Silent { .. } => (PublishErrorCode::Timeout, true),
            Self::Nonsense { .. } => (PublishErrorCode::Invalid, false),
            Self::NotRepeatable { .. } => (PublishErrorCode::Internal, true),
            Self::BadCheckpoint { .. } => (PublishErrorCode::BadCheckpoint, false),
            Self::Io { .. } => (PublishErrorCode::Internal, true),
        };
        PublishError { code, message: self.to_string(), retryable, phase: Some(UpdatePhase::Transfer), member: member.cloned() }
    }
}
