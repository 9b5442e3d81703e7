//! An install that is fed from shared host memory.
//!
//! The workers receive descriptions of buckets and check them before the pause. The pause begins only when there is no room for more, or
//! nothing more to come. Decides that moment; the session decides the rest.

use std::sync::Arc;

use async_trait::async_trait;

use super::Inner;
use super::actor::{self, Handle, Way};
use super::session::{Busy, Session, at};
use crate::host::{HostBucket, HostDigest, HostInstall, HostJob};
use crate::host_feed::HostFeed;
use crate::server::Server;
use crate::{EngineError, InstallError, InstallReport, Left};
use weightsync_core::protocol::HeldVersion;

struct Owner {
    handle: Handle<HostBucket, ()>,
    digest: HostDigest,
}

/// Checks the server, waits for the lock on its changes, and makes its workers connect.
pub(super) async fn begin<S: Server>(inner: Arc<Inner<S>>, job: HostJob) -> Result<Box<dyn HostInstall>, InstallError> {
    let tensors: Vec<_> = job.layout.tensors().cloned().collect();
    let mut session = Session::open(inner, job.terms.clone(), &tensors).await?;
    let feed = match session.inner.server.open_host_feed(&job, session.until).await {
        Ok(feed) => feed,
        Err(source) => return Err(session.fail(at("start")(source)).await),
    };
    let digest = feed.digest();
    let handle = actor::start(session, FromHost { job, feed, busy: None });
    Ok(Box::new(Owner { handle, digest }))
}

#[async_trait]
impl HostInstall for Owner {
    fn digest(&self) -> HostDigest {
        self.digest
    }

    async fn bucket(&mut self, bucket: HostBucket) -> Result<(), InstallError> {
        self.handle.bucket(bucket).await
    }

    async fn taken(&mut self, more_than: u32) -> Result<u32, InstallError> {
        self.handle.taken(more_than).await
    }

    async fn finish(self: Box<Self>, version: HeldVersion) -> Result<InstallReport, InstallError> {
        self.handle.finish(version).await
    }

    async fn abandon(self: Box<Self>, reason: &str) -> Left {
        self.handle.abandon(reason).await
    }
}

struct FromHost<S: Server> {
    job: HostJob,
    feed: Box<dyn HostFeed>,
    /// Set once the engine loads.
    busy: Option<Busy<S>>,
}

impl<S: Server> FromHost<S> {
    /// Releases the workers. An engine that began to load stays paused.
    async fn fail(&mut self, session: &mut Session<S>, step: &'static str, source: EngineError) -> InstallError {
        self.feed.fail(&source.to_string(), session.whole).await;
        self.busy = None;
        session.fail(at(step)(source)).await
    }
}

#[async_trait]
impl<S: Server> Way<S> for FromHost<S> {
    type Bucket = HostBucket;
    type Receipt = ();

    async fn open(&mut self, session: &mut Session<S>) -> Result<(), InstallError> {
        if self.busy.is_some() {
            return Ok(());
        }
        session.steps.done("stage");
        if let Err(error) = session.hold().await {
            self.feed.fail(&error.source.to_string(), session.whole).await;
            return Err(error);
        }
        session.steps.done("pause");
        session.loading();
        self.busy = Some(session.busy());
        match self.feed.load(session.until).await {
            Ok(()) => Ok(()),
            Err(source) => Err(self.fail(session, "load", source).await),
        }
    }

    async fn bucket(&mut self, session: &mut Session<S>, bucket: HostBucket) -> Result<(), InstallError> {
        let until = session.until.at_most(self.job.silence);
        match self.feed.bucket(&bucket, until).await {
            Ok(()) => Ok(()),
            Err(source) => Err(self.fail(session, "load", source).await),
        }
    }

    async fn taken(&mut self, session: &mut Session<S>, more_than: u32) -> Result<u32, InstallError> {
        self.open(session).await?;
        let until = session.until.at_most(self.job.silence);
        match self.feed.taken(more_than, until).await {
            Ok(taken) => Ok(taken),
            Err(source) => Err(self.fail(session, "load", source).await),
        }
    }

    async fn finish(&mut self, session: &mut Session<S>, version: HeldVersion) -> Result<InstallReport, InstallError> {
        if let Err(source) = self.feed.end(self.job.silence, session.until).await {
            return Err(self.fail(session, "stage", source).await);
        }
        self.open(session).await?;
        let closed = self.feed.close(session.until).await;
        self.busy = None;
        if let Err(source) = closed {
            return Err(self.fail(session, "load", source).await);
        }
        session.conclude(version, None).await
    }

    async fn give_up(&mut self, session: &mut Session<S>, reason: &str) -> Left {
        tracing::warn!(
            engine = session.inner.server.url(),
            version = self.job.terms.version.version,
            reason,
            "an install from shared memory was given up"
        );
        self.fail(session, "load", EngineError::Cancelled).await.left
    }
}
