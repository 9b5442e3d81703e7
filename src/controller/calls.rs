//! Calls to the API server. Each ends within a deadline; kube itself has no read timeout, so a hung call would hang the reconcile of its
//! object for ever. Requests are counted below, by [`counted`](super::counted).

#[cfg(test)]
mod tests;

use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

const DEADLINE: Duration = Duration::from_secs(10);
/// Concurrent calls, without those of the lease.
static TURNS: Semaphore = Semaphore::const_new(64);
/// Longest wait in the queue.
const TURN: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    #[error("{what}: no response within {deadline:?}")]
    Timeout { what: String, deadline: Duration },
    #[error("{what}: {source}")]
    Kube { what: String, source: Box<kube::Error> },
}

impl ApiError {
    /// The response of the API server, if there was one.
    pub(super) fn status(&self) -> Option<&kube::core::Status> {
        match self {
            Self::Kube { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => Some(status),
                _ => None,
            },
            Self::Timeout { .. } => None,
        }
    }

    pub(super) fn is_conflict(&self) -> bool {
        self.status().is_some_and(kube::core::Status::is_conflict)
    }

    /// The object is missing, or is another one under the same name (a patch with another UID gives 409 or 422).
    pub(super) fn is_gone(&self) -> bool {
        self.status().is_some_and(|status| {
            status.is_not_found()
                || (status.is_conflict() && names_another_uid(&status.message))
                || (status.is_invalid() && changes_uid(status))
        })
    }
}

/// Texts that no object's name can contain: names have neither spaces nor capital letters.
fn names_another_uid(message: &str) -> bool {
    message.contains("UID in precondition") || message.contains("UID in the precondition")
}

fn changes_uid(status: &kube::core::Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.field == "metadata.uid") || status.message.contains(": metadata.uid: ")
}

#[derive(Clone, Copy, Default)]
pub(super) struct Calls;

impl Calls {
    /// Runs one call; `what` describes it in errors.
    pub(super) async fn run<T>(self, what: impl Into<String>, call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, ApiError> {
        let what = what.into();
        // Each concurrent call opens its own connection: five hundred at once cost more than the calls themselves.
        let Ok(_turn) = timeout(TURN, TURNS.acquire()).await else { return Err(ApiError::Timeout { what, deadline: TURN }) };
        match timeout(DEADLINE, call).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(source)) => Err(ApiError::Kube { what, source: Box::new(source) }),
            Err(_) => Err(ApiError::Timeout { what, deadline: DEADLINE }),
        }
    }
}
