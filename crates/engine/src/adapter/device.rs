//! An install that is fed bucket by bucket from GPU memory, or from the engine's own group.
//!
//! The pause is delayed until the first bucket has arrived, because the engine may serve while the bucket still travels. Buckets must come
//! in the order of the layout, each once: an engine that lacks one is never resumed. Decides when the engine may have begun to change its
//! weights; the session decides the consequences. [`super::proof`] decides when its token may be requested after the install.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;

use super::Inner;
use super::actor::{self, Handle, Way};
use super::session::{Session, at};
use crate::checksums::summarise;
use crate::device::{DeviceBucket, DeviceInstall, DeviceJob, DeviceRoute, Released};
use crate::feed::{Feed, FeedJob};
use crate::group::{FromGroup, OfGroup};
use crate::server::Server;
use crate::{EngineError, InstallError, InstallReport, Left};
use weightsync_core::protocol::{EngineChecksum, HeldVersion, PausePolicy};
use weightsync_core::weights::Cuts;

struct Owner {
    handle: Handle<DeviceBucket, Released>,
    /// Whether the engine is paused before the first bucket: possible if the route names its GPUs.
    holds: bool,
}

/// Checks the server and waits for the lock on its changes.
pub(super) async fn begin<S: Server>(
    inner: Arc<Inner<S>>,
    job: DeviceJob,
    group: Option<OfGroup>,
) -> Result<Box<dyn DeviceInstall>, InstallError> {
    if job.layout.cuts != Cuts::BetweenTensors {
        return Err(InstallError::before_start(EngineError::Unsupported {
            what: "the buckets of this version tear tensors".into(),
            next_step: "cut its layout between tensors".into(),
        }));
    }
    let tensors: Vec<_> = job.layout.tensors().cloned().collect();
    let served = inner.served_model();
    let mut session = Session::open(inner, job.terms.clone(), &tensors).await?;
    let server = &session.inner.server;
    let route = match &group {
        None => server.device_route(job.terms.pause, job.terms.kv_cache, served.as_deref(), session.until).await,
        Some(of) => Ok(DeviceRoute { name: "group", gpus: Vec::new(), gated: of.server.pauses(), why_not_faster: None }),
    };
    let route = match route {
        Ok(route) => route,
        Err(source) => return Err(session.fail(at("start")(source)).await),
    };
    // If the route lets the engine serve, only an engine that is already paused stays paused.
    session.pauses = session.was_half() || (route.gated && job.terms.pause != PausePolicy::External);
    let holds = session.pauses && !route.gpus.is_empty();
    let handle = actor::start(session, FromDevice { job, route, group, feed: None, next: 0, sealed: false });
    Ok(Box::new(Owner { handle, holds }))
}

#[async_trait]
impl DeviceInstall for Owner {
    fn holds(&self) -> bool {
        self.holds
    }

    async fn open(&mut self) -> Result<(), InstallError> {
        self.handle.open().await
    }

    async fn bucket(&mut self, bucket: DeviceBucket) -> Result<Released, InstallError> {
        self.handle.bucket(bucket).await
    }

    async fn seal(&mut self) -> Result<Option<EngineChecksum>, InstallError> {
        self.handle.seal().await
    }

    async fn finish(self: Box<Self>, version: HeldVersion) -> Result<InstallReport, InstallError> {
        self.handle.finish(version).await
    }

    async fn abandon(self: Box<Self>, reason: &str) -> Left {
        self.handle.abandon(reason).await
    }
}

struct FromDevice {
    job: DeviceJob,
    route: DeviceRoute,
    group: Option<OfGroup>,
    feed: Option<Box<dyn Feed>>,
    /// Sequence of the bucket that must come next.
    next: u32,
    /// Whether the engine took its last step.
    sealed: bool,
}

impl FromDevice {
    async fn open_with<S: Server>(&mut self, session: &mut Session<S>, gpus_of_bucket: Vec<String>) -> Result<(), InstallError> {
        session.hold().await?;
        if let Err(source) = self.open_feed(session, gpus_of_bucket).await {
            return Err(self.fail(session, "pause", source).await);
        }
        session.steps.done("pause");
        Ok(())
    }

    async fn open_feed<S: Server>(&mut self, session: &mut Session<S>, gpus_of_bucket: Vec<String>) -> Result<(), EngineError> {
        let until = session.until;
        let feed: Box<dyn Feed> = if let Some(of) = &self.group {
            Box::new(FromGroup::open(of, self.job.layout.clone(), self.job.silence, until).await?)
        } else {
            let gpus = if self.route.gpus.is_empty() { gpus_of_bucket } else { self.route.gpus.clone() };
            let job = FeedJob { job: &self.job, route: &self.route, gpus };
            session.inner.server.open_feed(job, until).await?
        };
        if feed.touched() {
            // An earlier open update may have changed the weights.
            session.loading();
        }
        self.feed = Some(feed);
        if !session.pauses && self.job.terms.pause == PausePolicy::AbortAwake {
            session.inner.server.abort_all(until).await?;
        }
        Ok(())
    }

    /// Releases the engine's workers, and ends the install.
    async fn fail<S: Server>(&mut self, session: &mut Session<S>, step: &'static str, source: EngineError) -> InstallError {
        // An engine that is stuck in a collective does not respond: others wait for this end before they abort it.
        let undo = session.whole.at_most(self.job.silence);
        if let Some(feed) = &mut self.feed {
            let untouched = self.next == 0 && !feed.touched();
            feed.fail(&source.to_string(), undo).await;
            if untouched {
                // The engine never accepted the first bucket: none of it was written.
                session.never_loaded();
            }
        }
        session.fail_within(at(step)(source), undo).await
    }

    /// Has the engine take its last step, once: all of its buckets were handed over.
    async fn end<S: Server>(&mut self, session: &mut Session<S>) -> Result<(), InstallError> {
        if self.sealed {
            return Ok(());
        }
        if self.next != self.job.layout.bucket_count() {
            let what = format!("{} of {} buckets were handed over", self.next, self.job.layout.bucket_count());
            let source = EngineError::BadReply { url: session.inner.server.url().to_owned(), what };
            return Err(self.fail(session, "load", source).await);
        }
        // Not open yet: a version without bytes.
        Way::<S>::open(self, session).await?;
        session.loading();
        if let Err(source) = self.close(session).await {
            return Err(self.fail(session, "load", source).await);
        }
        self.sealed = true;
        Ok(())
    }

    /// The engine's own checksums; none where it has none, or none that prove anything. It is no fault of the weights that it has none.
    async fn checksum<S: Server>(&mut self, session: &Session<S>) -> Option<EngineChecksum> {
        let server = &session.inner.server;
        if self.job.layout.has_draft() {
            // Not every engine counts its draft model in.
            return None;
        }
        let until = session.until.at_most(self.job.silence / 2);
        let busy = session.busy();
        let begun = Instant::now();
        let said = async {
            let said = server.checksums(self.job.layout.total_bytes, until).await.map_err(|error| error.to_string())?;
            let Some(said) = said else { return Ok(None) };
            summarise(server.kind(), &said, begun.elapsed()).map(Some)
        };
        let said: Result<Option<EngineChecksum>, String> = said.await;
        drop(busy);
        said.unwrap_or_else(|why| {
            tracing::warn!(engine = server.url(), why, "the engine's own checksums prove nothing");
            None
        })
    }

    async fn close<S: Server>(&mut self, session: &mut Session<S>) -> Result<(), EngineError> {
        let Some(feed) = &mut self.feed else { return Ok(()) };
        let busy = session.busy();
        let closed = feed.close(session.until.at_most(self.job.silence)).await;
        drop(busy);
        closed?;
        if !session.pauses && self.job.terms.pause == PausePolicy::AbortAwake {
            // Requests that began during the load were computed with a mixture.
            session.inner.server.abort_all(session.until).await?;
        }
        Ok(())
    }
}

#[async_trait]
impl<S: Server> Way<S> for FromDevice {
    type Bucket = DeviceBucket;
    type Receipt = Released;

    async fn open(&mut self, session: &mut Session<S>) -> Result<(), InstallError> {
        if self.feed.is_some() { Ok(()) } else { self.open_with(session, Vec::new()).await }
    }

    async fn bucket(&mut self, session: &mut Session<S>, bucket: DeviceBucket) -> Result<Released, InstallError> {
        if self.job.layout.bucket(self.next) != Some(bucket.bucket) {
            let what = format!("bucket {} came, {} was expected", bucket.bucket.sequence, self.next);
            let source = EngineError::BadReply { url: session.inner.server.url().to_owned(), what };
            return Err(self.fail(session, "load", source).await);
        }
        if self.feed.is_none() {
            self.open_with(session, bucket.places.iter().map(|place| place.gpu.clone()).collect()).await?;
        }
        let Some(feed) = &mut self.feed else { return Err(InstallError::before_start(EngineError::Cancelled)) };
        session.loading();
        let busy = session.busy();
        let handed = feed.bucket(&bucket, session.until.at_most(self.job.silence)).await;
        drop(busy);
        match handed {
            Ok(released) => {
                self.next += 1;
                Ok(released)
            }
            Err(source) => Err(self.fail(session, "load", source).await),
        }
    }

    async fn taken(&mut self, session: &mut Session<S>, _more_than: u32) -> Result<u32, InstallError> {
        let what = "buckets in GPU memory are taken one by one".to_owned();
        let source = EngineError::BadReply { url: session.inner.server.url().to_owned(), what };
        Err(self.fail(session, "load", source).await)
    }

    async fn seal(&mut self, session: &mut Session<S>) -> Result<Option<EngineChecksum>, InstallError> {
        self.end(session).await?;
        session.steps.done("load");
        let checksum = self.checksum(session).await;
        session.steps.done("checksum");
        Ok(checksum)
    }

    async fn finish(&mut self, session: &mut Session<S>, version: HeldVersion) -> Result<InstallReport, InstallError> {
        self.end(session).await?;
        session.conclude(version, Some(self.route.name)).await
    }

    async fn give_up(&mut self, session: &mut Session<S>, reason: &str) -> Left {
        if self.feed.is_some() {
            tracing::warn!(
                engine = session.inner.server.url(),
                version = self.job.terms.version.version,
                reason,
                "an install was given up"
            );
        }
        self.fail(session, "load", EngineError::Cancelled).await.left
    }
}
