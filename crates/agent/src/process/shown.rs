//! The answer to a readiness probe of the pod, and why it is not ready.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::Instant;

use crate::rollout::Rollout;

/// What readiness is made of.
#[derive(Default)]
pub(super) struct Shown {
    pub(super) rollouts: Vec<Arc<Rollout>>,
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
