//! Sends trainers with their own data plane the working epoch, and at once its end.
//!
//! An epoch is announced when it is committed and every replica reported its version. It has ended when it is fenced or replaced, and as
//! soon as one of its replicas is lost: a collective that lacks a rank never ends, so no trainer waits for the coordinator's message. The
//! coordinator decides what follows.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::ExternalDesk;
use crate::core::Core;
use crate::group::{Epoch, Standing};
use crate::lead::Leader;
use crate::lead::peers::Peer;
use weightsync_core::protocol::{Delivery, MemberName, MemberPhase, Role, Topology, TopologyReplica};

/// Keeps the desk's epochs up to date until `cancel`.
pub async fn keep(core: Arc<Core>, leader: Arc<Leader>, desk: Arc<ExternalDesk>, cancel: CancellationToken) {
    let mut standing = core.standing();
    let mut reported: Option<u64> = None;
    loop {
        let now = standing.borrow_and_update().clone();
        if let Some(epoch) = reported.filter(|reported| now.id().map(|id| id.epoch) != Some(*reported)) {
            reported = None;
            desk.over(epoch, &core.why_over());
        }
        let watching = async {
            if let Standing::Committed(epoch) = &now {
                if epoch.prepared.policy.delivery == Delivery::External {
                    reported = Some(epoch.id().epoch);
                    follow(&core, &leader, &desk, epoch).await;
                } else {
                    desk.refuse("the object's delivery is not External: give versions to a Publisher, or set spec.delivery to External");
                }
            }
            std::future::pending::<()>().await;
        };
        let alive = tokio::select! {
            () = cancel.cancelled() => false,
            changed = standing.changed() => changed.is_ok(),
            () = watching => false,
        };
        if !alive {
            if let Some(epoch) = reported {
                desk.over(epoch, "the agent is ending");
            }
            return;
        }
    }
}

/// Sends the epoch, and then the first loss in it.
async fn follow(core: &Core, leader: &Leader, desk: &ExternalDesk, epoch: &Arc<Epoch>) {
    let peers = leader.peers(epoch);
    let mut known = peers.watch();
    let rollouts = epoch.rollouts();
    let mut said = false;
    loop {
        let (lost, heard) = {
            let known = known.borrow_and_update();
            let lost = rollouts.iter().find_map(|name| Some((name.clone(), known.get(name)?.lost.clone()?)));
            let all = rollouts.iter().all(|name| known.get(name).is_some_and(|peer| peer.state.is_some()));
            (lost, all.then(|| known.clone()))
        };
        if let Some((member, cause)) = lost {
            desk.over(epoch.id().epoch, &format!("{member} was lost: {cause}"));
            return;
        }
        if let Some(heard) = heard.filter(|_| !said) {
            said = true;
            let current = core.current().map(|current| current.version);
            if let Some(topology) = topology(epoch, current, |name| heard.get(name)) {
                desk.tell(topology);
            }
        }
        if known.changed().await.is_err() {
            return;
        }
    }
}

/// The epoch in the trainer's words; none when this agent's own address is not one.
fn topology<'a>(epoch: &Epoch, version: Option<u64>, peer: impl Fn(&MemberName) -> Option<&'a Peer>) -> Option<Topology> {
    let id = epoch.id();
    let own = epoch.address(epoch.me())?;
    let address: SocketAddr = own.data.parse().ok()?;
    let roster = &epoch.prepared.roster;
    let replicas = roster.members.iter().filter(|member| member.role == Role::Rollout).map(|member| {
        let state = peer(&member.name).and_then(|peer| peer.state.as_ref()).filter(|state| state.phase != MemberPhase::Dirty);
        TopologyReplica {
            name: member.name.clone(),
            url: epoch.address(&member.name).and_then(|address| address.engine_url.clone()),
            rank_offset: member.rank_offset,
            size: member.size,
            version: state.and_then(|state| state.installed.as_ref()).map(|installed| installed.version),
        }
    });
    Some(Topology {
        epoch: id.epoch,
        group: format!("weightsync-{}-{}", id.weightsync, id.epoch),
        world_size: roster.world_size,
        address: address.ip().to_string(),
        port: 0,
        timeout_ms: epoch.prepared.policy.update_timeout_ms,
        min_ready: epoch.prepared.policy.min_ready,
        version,
        replicas: replicas.collect(),
    })
}
