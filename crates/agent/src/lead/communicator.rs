//! Forms the communicator of an epoch on commit: makes its id, has every member join at once, and names those that cannot.
//!
//! The id travels only in these calls, over mutual TLS. Anyone who is at fault is reported by its own agent (its worker ended or hangs); a rank that
//! merely waited for others in vain blames no one.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Leader;
use super::calls::Calls;
use crate::group::{Epoch, refusal};
use weightsync_core::protocol::{JoinRequest, JoinResponse, MemberName, Refusal, RefusalCode};
use weightsync_net::https::CallError;

/// Making an id takes no time, unless the worker hangs.
const UNIQUE_ID: Duration = Duration::from_secs(2);

/// What is left for the one element over the chain when the communicator stands.
const PROBE: Duration = Duration::from_millis(1000);

impl Leader {
    pub(super) async fn form(&self, epoch: &Arc<Epoch>, deadline: Instant) -> Result<(), Refusal> {
        let gpus = self.gpus().ok_or_else(|| refusal(RefusalCode::Internal, "this agent uses no GPU"))?;
        let deadline = deadline - PROBE.min(deadline.saturating_duration_since(Instant::now()) / 4);
        let begun = Instant::now();
        let nccl = gpus.unique_id(UNIQUE_ID).await?;
        let calls = Calls::new(self.client.clone(), epoch.clone());
        let mut joins: JoinSet<(MemberName, Result<JoinResponse, Refusal>)> = JoinSet::new();
        // Guests have no rank, and nothing to join: they are lent memory when the communicator stands.
        for member in epoch.others().into_iter().filter(|member| epoch.has_rank(member)) {
            let within = deadline.saturating_duration_since(Instant::now());
            let deadline_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
            let (calls, request) = (calls.clone(), JoinRequest { id: epoch.id().clone(), nccl, deadline_ms });
            joins.spawn(async move {
                let answer = calls.ask(&member, &request, within).await;
                (member, answer.map_err(|error| said(&error)))
            });
        }
        let (own, epoch_of, me) = (gpus.clone(), epoch.clone(), epoch.me().clone());
        joins.spawn(async move {
            let joined = own.join(&epoch_of, nccl, deadline).await;
            (me, joined)
        });
        let mut failed: Vec<(MemberName, Refusal)> = Vec::new();
        while let Some(joined) = joins.join_next().await {
            match joined {
                Ok((member, Ok(joined))) => tracing::debug!(%member, init_ms = joined.init_ms, warm_up_ms = joined.warm_up_ms, "joined"),
                Ok((member, Err(refusal))) => failed.push((member, refusal)),
                Err(error) => tracing::error!(%error, "a join ended without an outcome"),
            }
            // Anyone who is named did fail by itself; the others wait for it in vain.
            if failed.iter().any(|(_, refusal)| refusal.code != RefusalCode::PeerUnreachable) {
                break;
            }
        }
        if failed.is_empty() {
            let took = begun.elapsed();
            tracing::info!(epoch = %epoch.id(), world = epoch.communicator().map(weightsync_core::protocol::CommunicatorPlan::world), ?took, "a communicator stands");
            self.lend(epoch, deadline).await;
            return Ok(());
        }
        gpus.transport().leave(epoch.id());
        let own_fault = failed.iter().find(|(_, refusal)| refusal.code != RefusalCode::PeerUnreachable);
        match own_fault.or(failed.first()) {
            Some((member, why)) if why.code != RefusalCode::PeerUnreachable && member != epoch.me() => {
                self.core.peer_lost(epoch.id(), member, &why.message);
                Err(refusal(RefusalCode::PeerUnreachable, format!("{member} cannot join the communicator: {}", why.message)))
            }
            Some((member, why)) if member == epoch.me() && why.code != RefusalCode::PeerUnreachable => Err(why.clone()),
            Some((member, why)) => {
                let message = format!("the communicator cannot be formed and no one is known to be at fault ({member}: {})", why.message);
                Err(refusal(RefusalCode::Internal, message))
            }
            None => Ok(()),
        }
    }
}

/// What a call that failed says about the member.
fn said(error: &CallError) -> Refusal {
    match error {
        CallError::Refused { refusal, .. } => refusal.clone(),
        CallError::Timeout { .. } => refusal(RefusalCode::Timeout, error.to_string()),
        _ => refusal(RefusalCode::Internal, error.to_string()),
    }
}
