//! An engine as a member of groups: it shares one lock with all other changes, and leaves its old group before it joins another.
//!
//! Decides the order (leave, then join) and how the time is shared. An old group that the engine cannot leave does not prevent the join:
//! the new group has another name. An engine that is stuck in the old one does not respond to the join either, which then reports it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::watch;

use super::{Inner, device};
use crate::group::{GroupServer, OfGroup};
use crate::http::Until;
use crate::server::Server;
use crate::{DeviceInstall, DeviceJob, EngineError, EngineGroup, GroupJoin, GroupJoined, InstallError};
use weightsync_core::protocol::GroupFacts;

pub(super) struct Member<S> {
    pub(super) inner: Arc<Inner<S>>,
    pub(super) server: Arc<dyn GroupServer>,
}

impl<S: Server> Member<S> {
    async fn clear(&self, until: Until) -> Result<(), EngineError> {
        let left = self.server.leave(self.inner.group.get().as_deref(), until).await;
        if left.is_ok() {
            self.inner.group.set(None);
        }
        left
    }
}

#[async_trait]
impl<S: Server> EngineGroup for Member<S> {
    async fn facts(&self, deadline: Duration) -> Result<GroupFacts, EngineError> {
        self.server.facts(Until::new(deadline)).await
    }

    async fn join(&self, join: &GroupJoin, deadline: Duration) -> Result<GroupJoined, EngineError> {
        let until = Until::new(deadline);
        let _turn = self.inner.turn(until).await?;
        let begun = Instant::now();
        if let Err(error) = self.clear(until.at_most(deadline / 2)).await {
            tracing::warn!(engine = self.inner.server.url(), %error, "the group before cannot be left");
        }
        let cleared = begun.elapsed();
        // From here on it may be in the group, whatever it responds.
        self.inner.group.set(Some(join.name.clone()));
        self.server.join(join, until).await?;
        Ok(GroupJoined { cleared, joined: begun.elapsed().saturating_sub(cleared) })
    }

    async fn leave(&self, deadline: Duration) -> Result<(), EngineError> {
        let until = Until::new(deadline);
        let _turn = self.inner.turn(until).await?;
        if self.inner.group.get().is_none() {
            return Ok(());
        }
        self.clear(until).await
    }

    fn ahead(&self) -> bool {
        self.server.ahead()
    }

    async fn begin(&self, job: &DeviceJob, asked: watch::Receiver<Option<u32>>) -> Result<Box<dyn DeviceInstall>, InstallError> {
        let Some(name) = self.inner.group.get() else {
            let what = "the engine is in no group".to_owned();
            let source = EngineError::Unsupported { what, next_step: "it joins with the next epoch".into() };
            return Err(InstallError::before_start(source));
        };
        device::begin(Arc::clone(&self.inner), job.clone(), Some(OfGroup { server: Arc::clone(&self.server), name, asked })).await
    }
}
