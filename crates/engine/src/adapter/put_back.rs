//! The way out of half an update if no version can be installed in time: the complete start-up weights of the server.
//!
//! Decides the order, and the final state if even that fails: an engine that stays paused, holds no request, and carries the mark.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::Inner;
use super::session::Busy;
use crate::http::Until;
use crate::mixed::now_ms;
use crate::server::Server;
use crate::{EngineError, Holding};
use weightsync_core::protocol::{HeldVersion, KvCachePolicy, PausePolicy};

impl<S: Server> Inner<S> {
    /// Restores the start-up weights and resumes the engine.
    pub(super) async fn put_back(self: &Arc<Self>, whole: Until) -> Result<(), EngineError> {
        let until = whole.keeping(whole.total() / 5);
        let _turn = self.turn(until).await?;
        let put_back = self.load_startup(until).await;
        if let Err(error) = &put_back {
            self.start.failed(error);
            // No client waits without end for an engine that will not respond.
            if let Err(error) = self.server.abort_all(whole.at_most(Duration::from_secs(10))).await {
                tracing::warn!(engine = self.server.url(), %error, "the requests of an engine that holds half an update cannot be ended");
            }
        }
        put_back
    }

    async fn load_startup(self: &Arc<Self>, until: Until) -> Result<(), EngineError> {
        let version = match self.server.holding(until).await? {
            Holding::Startup => return self.run_and_compute(until).await,
            Holding::Version(version) | Holding::HalfAnUpdate(version) => version,
            Holding::Foreign(_) => HeldVersion { version: 0, manifest: "0".repeat(64) },
        };
        if !self.server.is_paused(until).await? {
            self.server.pause(PausePolicy::Keep, KvCachePolicy::Reset, until).await?;
        }
        self.mixed.close(now_ms());
        let checkpoint = self.server.startup_checkpoint(until).await?;
        self.server.stage(Path::new(&checkpoint), until).await?;
        self.write(Holding::HalfAnUpdate(version), until).await?;
        {
            let _busy = Busy::new(self.clone());
            self.server.clear_failed_load(until).await?;
            self.server.load(Path::new(&checkpoint), until).await?;
        }
        self.server.reset_cache(until).await?;
        self.write(Holding::Startup, until).await?;
        self.run_and_compute(until).await
    }

    async fn run_and_compute(&self, until: Until) -> Result<(), EngineError> {
        self.run_again(until).await?;
        self.computes(until).await
    }
}
