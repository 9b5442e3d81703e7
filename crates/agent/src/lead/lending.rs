//! Lends the source's ring to the members of an epoch that are on its GPU and have no rank, before the epoch counts.
//!
//! A member that cannot open the memory, does not find the check in it, or does not answer in time is not lost by that: it gets the bytes
//! over a connection, through the host, and status has the reason. Decides nothing else.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::time::Instant;

use super::Leader;
use super::calls::Calls;
use crate::group::Epoch;
use weightsync_core::protocol::{LendRequest, MemberName};
use weightsync_net::https::CallError;
use weightsync_transport::nccl::Communicator;

/// Longest wait for a member to open the ring: it opens memory that is there, and may allocate a ring of its own.
const LENDING: Duration = Duration::from_secs(10);

/// What is left of the time before the deadline, for what follows.
const REST: f32 = 0.5;

impl Leader {
    /// Lends it to all of them at once, and notes what came of it.
    pub(super) async fn lend(&self, epoch: &Arc<Epoch>, deadline: Instant) {
        let guests = epoch.communicator().map(|plan| plan.guests.clone()).unwrap_or_default();
        if guests.is_empty() {
            return;
        }
        let within = deadline.saturating_duration_since(Instant::now()).mul_f32(REST).min(LENDING);
        let communicator = self.gpus().and_then(|gpus| gpus.transport().communicator(epoch.id()));
        let lent = join_all(guests.into_iter().map(async |guest| {
            let lent = match &communicator {
                Some(communicator) => self.lend_to(epoch, communicator, &guest, within).await,
                None => Err("the communicator is over".to_owned()),
            };
            (guest, lent)
        }));
        let (mut borrowers, mut words, mut refused) = (Vec::new(), Vec::new(), false);
        for (guest, lent) in lent.await {
            match lent {
                Ok(()) => {
                    words.push(format!("{guest} by CUDA IPC"));
                    borrowers.push(guest);
                }
                Err(why) => {
                    words.push(format!("{guest} through the host, over a connection ({why})"));
                    refused = true;
                }
            }
        }
        if let Some(communicator) = &communicator {
            communicator.lent_to(borrowers);
        }
        let how = words.join(", ");
        if refused {
            tracing::warn!(epoch = %epoch.id(), how, "members on this GPU get the bytes");
        } else {
            tracing::info!(epoch = %epoch.id(), how, "members on this GPU get the bytes");
        }
        self.core.set_facts(|facts| facts.lent = Some((epoch.id().clone(), how)));
    }

    async fn lend_to(&self, epoch: &Arc<Epoch>, communicator: &Communicator, guest: &MemberName, within: Duration) -> Result<(), String> {
        let first = epoch.communicator().and_then(|plan| plan.ranks.first());
        if first.is_none_or(|(first, _)| first != epoch.me()) {
            return Err("the member on its GPU does not lead here".into());
        }
        let gpus = self.gpus().ok_or("this agent uses no GPU")?;
        let offer = gpus.offer(communicator, within).await.map_err(|error| format!("the source's ring cannot be offered: {error}"))?;
        let deadline_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        let request = LendRequest { id: epoch.id().clone(), memory: offer.memory.clone(), deadline_ms };
        let calls = Calls::new(self.client.clone(), epoch.clone());
        let answer = calls.ask(guest, &request, within).await;
        // The check stays where it is until the member looked.
        drop(offer);
        match answer {
            Ok(()) => Ok(()),
            Err(CallError::Refused { refusal, .. }) => Err(refusal.message),
            Err(error) => Err(error.to_string()),
        }
    }
}
