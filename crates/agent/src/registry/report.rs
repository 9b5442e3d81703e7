//! Reports the registered engines to the controller, and follows the assignment that answers.
//!
//! Decides when to report: at each change, every ten seconds, and at once when an assignment names other engines than are registered: a new
//! controller knows none. It never reports an empty list while engines may still return to an agent that started again.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::Registry;
use crate::enrollment::AnnouncingEnded;
use weightsync_core::protocol::{Assignment, Incarnation, RegisteredEngines};
use weightsync_net::https::{CallError, ControllerClient};

/// Between reports without a change.
const EVERY: Duration = Duration::from_secs(10);
/// Between reports until the assignment names the engines that are registered.
const SOON: Duration = Duration::from_millis(250);
/// How long engines of the assignment have to register again after a start of the agent. Their processes try four times a second.
const RETURN: Duration = Duration::from_secs(3);

/// What it takes to report.
pub(crate) struct Reporter {
    pub client: ControllerClient,
    pub namespace: String,
    pub incarnation: Incarnation,
    pub registry: Arc<Registry>,
    pub assignment: watch::Sender<Assignment>,
}

impl Reporter {
    /// Reports until `cancel`, or until the pod is not claimed any more.
    pub async fn run(self, cancel: CancellationToken) -> AnnouncingEnded {
        let (mut changes, mut assignments) = (self.registry.changes(), self.assignment.subscribe());
        let assigned = |assignment: &Assignment| assignment.engines.iter().map(|engine| engine.port).collect::<Vec<_>>();
        let before = assigned(&self.assignment.borrow());
        let returned = Instant::now() + RETURN;
        let mut problem = String::new();
        loop {
            changes.mark_unchanged();
            let ports = self.registry.ports();
            let returning = Instant::now() < returned && before.iter().any(|port| !ports.contains(port));
            let mut wait = SOON;
            if !returning {
                let report =
                    RegisteredEngines { namespace: self.namespace.clone(), incarnation: self.incarnation.clone(), ports: ports.clone() };
                let asked = self.client.ask(&report, RegisteredEngines::WITHIN);
                let answer = tokio::select! {
                    () = cancel.cancelled() => return AnnouncingEnded::Cancelled,
                    answer = asked => answer,
                };
                match answer {
                    Ok(response) => {
                        if assigned(&response.assignment) == ports {
                            wait = EVERY;
                        }
                        self.assignment.send_if_modified(|now| {
                            let differs = *now != response.assignment;
                            *now = response.assignment;
                            differs
                        });
                    }
                    Err(CallError::Rejected { rejection, .. }) if !rejection.retryable => {
                        return AnnouncingEnded::Unclaimed { message: rejection.message };
                    }
                    Err(error) => {
                        wait = SOON * 4;
                        let error = error.to_string();
                        if error != problem {
                            tracing::warn!(error, "the registered engines are not reported, trying again");
                            problem = error;
                        }
                    }
                }
            }
            let contradicted = assignments.wait_for(|assignment| wait == EVERY && assigned(assignment) != ports);
            tokio::select! {
                () = cancel.cancelled() => return AnnouncingEnded::Cancelled,
                _changed = timeout(wait, changes.changed()) => {}
                _contradicted = contradicted => {}
            }
        }
    }
}
