//! What the asker of a publish that failed is reported: the code, whether it is worth another try, and the words.
//!
//! Decides nothing about attempts; every text names the cause and, where there is one, the next step.

use crate::lead::table::Failure;
use weightsync_core::protocol::{EpochId, Hindrance, PublishError, PublishErrorCode, Version};

pub(super) fn publish_error(failure: Failure) -> PublishError {
    let Failure { code, message, phase, member, lasting, .. } = failure;
    let retryable = !lasting
        && matches!(
            code,
            PublishErrorCode::NotEnoughReplicas | PublishErrorCode::Timeout | PublishErrorCode::Cancelled | PublishErrorCode::Fenced
        );
    PublishError { code, message, retryable, phase: Some(phase), member }
}

/// Nothing is published while the spec holds the group at a version.
pub(super) fn pinned(version: Version) -> PublishError {
    let message = format!(
        "spec.targetVersion holds the group at version {version}: publish again once it is cleared \
         (kubectl weightsync rollback NAME --clear)"
    );
    PublishError { code: PublishErrorCode::VersionPinned, message, retryable: true, phase: None, member: None }
}

/// The group refused the version while it was on its way, and was formed again for that.
pub(super) fn refused(version: Version, failed: Option<&(EpochId, Failure)>) -> PublishError {
    let before = failed.map_or_else(String::new, |(_, failure)| format!("; the last attempt: {}", failure.message));
    let message = format!("the canary refused version {version}: give other weights a new number{before}");
    PublishError { code: PublishErrorCode::VersionRefused, message, retryable: false, phase: None, member: None }
}

pub(super) fn by_topology() -> PublishError {
    let message = "the object's delivery is External: the trainer's own data plane moves the bytes (weightsync.Topology), \
                   or set spec.delivery to Agent"
        .into();
    PublishError { code: PublishErrorCode::Invalid, message, retryable: false, phase: None, member: None }
}

pub(super) fn cancelled() -> PublishError {
    let message = "the trainer gave the publish up, or went away before all its bytes were taken".into();
    PublishError { code: PublishErrorCode::Cancelled, message, retryable: true, phase: None, member: None }
}

/// The time is over. Where there was no attempt, `hindrance` is why no group could take the version.
pub(super) fn timed_out(attempts: u32, failed: Option<&(EpochId, Failure)>, hindrance: Option<Hindrance>) -> PublishError {
    let hindrance = hindrance.filter(|_| attempts == 0 && failed.is_none());
    let retryable = hindrance.as_ref().is_none_or(|hindrance| !hindrance.permanent);
    let (code, message) = match failed {
        Some((id, failure)) => (
            PublishErrorCode::Timeout,
            format!("no update succeeded in time; the last attempt, in epoch {}: {}", id.epoch, failure.message),
        ),
        None if attempts == 0 => (
            PublishErrorCode::NotEnoughReplicas,
            match hindrance {
                Some(hindrance) => format!("no group with enough replicas was formed in time: {}", hindrance.message),
                None => "no group with enough replicas was formed in time, and the controller named no cause: check that it runs, and look at the \
                         status of the WeightSync (`kubectl weightsync status`)"
                    .to_owned(),
            },
        ),
        None => (PublishErrorCode::Timeout, "the update did not end in time".into()),
    };
    let failure = failed.map(|(_, failure)| failure);
    PublishError {
        code,
        message,
        retryable,
        phase: failure.map(|failure| failure.phase),
        member: failure.and_then(|failure| failure.member.clone()),
    }
}

pub(super) fn internal(message: &str) -> PublishError {
    PublishError { code: PublishErrorCode::Internal, message: message.to_owned(), retryable: true, phase: None, member: None }
}
