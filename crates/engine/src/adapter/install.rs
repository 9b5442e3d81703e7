//! An install from a directory: the server loads it in one call.
//!
//! Decides when a load is repeated, and that a load counts only if the engine opened a weight file. The session decides the meaning of a
//! failure.

use std::path::Path;
use std::sync::Arc;

use super::Inner;
use super::session::{Session, at};
use crate::evidence::Evidence;
use crate::http::Until;
use crate::server::Server;
use crate::{EngineError, InstallError, InstallJob, InstallReport};
use weightsync_core::weights::safetensors::Checkpoint;

impl<S: Server> Inner<S> {
    pub(super) async fn install(self: Arc<Self>, job: &InstallJob) -> Result<InstallReport, InstallError> {
        self.server.takes_directories().map_err(InstallError::before_start)?;
        let offered = Checkpoint::open(&job.local_directory).map_err(|cause| {
            InstallError::before_start(EngineError::Unsupported {
                what: format!("the version's directory cannot be read: {cause}"),
                next_step: "write the version to a directory that this process and the engine both see".into(),
            })
        });
        let mut session = Session::open(self.clone(), job.terms.clone(), &offered?.specs()).await?;
        let staged = tokio::select! {
            biased;
            () = job.terms.cancel.cancelled() => Err(EngineError::Cancelled),
            staged = self.server.stage(&job.local_directory, session.until) => staged,
        };
        let staged = match staged {
            Ok(staged) => staged,
            Err(source) => return Err(session.fail(at("start")(source)).await),
        };
        session.hold().await?;
        session.steps.done("pause");
        let busy = session.busy();
        let loaded = self.load(job, staged.as_deref(), session.was_half(), session.until).await;
        drop(busy);
        match loaded {
            Ok(()) => session.loading(),
            Err(source) => {
                if !never_arrived(&source) {
                    session.loading();
                }
                return Err(session.fail(at("load")(source)).await);
            }
        }
        session.conclude(job.terms.version.clone(), None).await
    }

    /// Loads. A failed load is repeated once from the same complete directory, with the engine still paused.
    async fn load(&self, job: &InstallJob, staged: Option<&Path>, was_half: bool, until: Until) -> Result<(), EngineError> {
        let witness = Evidence::watch(staged.unwrap_or(&job.local_directory));
        if was_half {
            self.server.clear_failed_load(until).await?;
        }
        match self.server.load(&job.directory, until).await {
            Ok(()) => {}
            // A second load must not overlap one that may still run. A load that never arrived left nothing to repair.
            Err(error @ EngineError::Timeout { .. }) => return Err(error),
            Err(error) if never_arrived(&error) => return Err(error),
            Err(error) => {
                tracing::warn!(engine = self.server.url(), %error, "the load failed: clearing it and loading once more");
                self.server.clear_failed_load(until).await?;
                self.server.load(&job.directory, until).await?;
            }
        }
        match witness {
            Some(witness) if !witness.was_opened() => Err(EngineError::NotSuccess {
                url: self.server.url().to_owned(),
                body: "it reported that the weights were loaded, but opened none of their files".to_owned(),
            }),
            _ => Ok(()),
        }
    }
}

/// Whether a call cannot have had an effect: no server listened, or it has no such route.
fn never_arrived(error: &EngineError) -> bool {
    match error {
        EngineError::Unreachable { source, .. } => source.is_connect(),
        EngineError::Status { status, .. } => matches!(status, 401 | 403 | 404 | 405),
        _ => false,
    }
}
