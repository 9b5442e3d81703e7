//! The answer to a readiness probe of the pod, and why it is not ready.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::Instant;

use crate::rollout::Rollout;

/// What readiness is made of.
#[derive(Default)]
pub(super) struct Shown {
    pub(super) rollouts: Vec<Arc<Rollout>>,
    /// Of engines whose registration ended. They count against the pod until they may serve, and never for it.
    pub(super) leaving: Vec<Arc<Rollout>>,
    /// When the pod serves although no operator claimed it.
    pub(super) serves_unclaimed: Option<Instant>,
    pub(super) failed: Option<String>,
    /// Why the endpoints of engines could not start, by port.
    pub(super) not_started: BTreeMap<u16, String>,
    /// Whether an object claimed the pod once and none does now.
    pub(super) released: bool,
    /// Whether the engines of the pod register.
    pub(super) registered: bool,
    pub(super) was_ready: Option<bool>,
}

impl Shown {
    /// An operator claimed the pod: what was shown before is over. `failed` is why its object cannot be served.
    pub(super) fn claimed(&mut self, failed: Option<String>) {
        *self = Self { failed, ..Self::default() };
    }

    /// The answer to a probe. A change is logged: it costs users a replica, and the kubelet does not show the reason.
    pub(super) fn answer(&mut self) -> Result<(), String> {
        let ready = self.ready();
        if self.was_ready.replace(ready.is_ok()) != Some(ready.is_ok()) {
            match &ready {
                Ok(()) => tracing::info!("the pod is ready"),
                Err(why) => tracing::info!(why, "the pod is not ready"),
            }
        }
        ready
    }

    fn ready(&self) -> Result<(), String> {
        if let Some(reason) = &self.failed {
            return Err(reason.clone());
        }
        if let Some((port, reason)) = self.not_started.first_key_value().filter(|_| !self.released) {
            return Err(format!("the engine on port {port} takes no part yet: {reason}"));
        }
        self.leaving.iter().try_for_each(|rollout| rollout.ready())?;
        if self.rollouts.is_empty() && self.released {
            return Ok(());
        }
        if self.rollouts.is_empty() && self.registered {
            return Err("no engine has registered yet (weightsync.register_engine)".into());
        }
        if self.rollouts.is_empty() {
            return match self.serves_unclaimed {
                Some(from) if from <= Instant::now() => Ok(()),
                Some(_) => Err("not enrolled yet: the pod serves without an operator a little later".into()),
                None => Err("not enrolled yet".into()),
            };
        }
        self.rollouts.iter().try_for_each(|rollout| rollout.ready())
    }
}

#[cfg(test)]
mod tests {
    use weightsync_core::protocol::ReleaseRequest;

    use super::*;
    use crate::tests::fixture::Fixture;
    use crate::tests::trainer::{TestSource, publish};

    /// A pod was ready between the end of its engine's registration and the end of its endpoint.
    #[tokio::test(flavor = "multi_thread")]
    async fn engine_whose_registration_ended_never_counts_for_its_pod() {
        let mut fixture = Fixture::new();
        let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
        fixture.form(&[&source, &rollout], Some(&source)).await;
        publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
        fixture.ask(&rollout, &ReleaseRequest { id: fixture.id(), reason: "its registration ended".into() }).await.unwrap();
        rollout.until("released", |state| state.epoch.is_none()).await;
        let engine = rollout.rollout().clone();
        assert_eq!(engine.ready(), Ok(()), "released, it serves what it has");
        let mut shown = Shown { leaving: vec![engine.clone()], registered: true, ..Shown::default() };
        assert!(shown.answer().is_err_and(|why| why.contains("no engine has registered yet")));
        shown.rollouts.push(engine);
        assert_eq!(shown.answer(), Ok(()), "another one is registered");
    }
}
