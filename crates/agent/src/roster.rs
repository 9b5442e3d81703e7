//! The roster for routers and trainers: which replica serves which version.
//!
//! Decides each replica's state from its last report. It never sends a request, and it never calls a replica ready that did not report
//! itself that its engine confirmed the version.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::core::Core;
use super::group::{Epoch, Standing};
use super::lead::Leader;
use super::lead::peers::Peer;
use weightsync_core::protocol::{
    HeldVersion, MemberName, MemberPhase, MemberState, Role, RosterReplica, RosterView, Skew, Version, newest_in_service, skew,
};

/// The roster by what is known now. An agent that leads no one knows of itself only.
pub fn view(epoch: Option<&Epoch>, current: Option<&HeldVersion>, peers: &BTreeMap<MemberName, Peer>, own: &MemberState) -> RosterView {
    let mut replicas = Vec::new();
    // As in any update, those that were not taken back yet serve until enough were.
    let mine = |member: &MemberName| own.member.as_ref() == Some(member);
    let serving = |member: &MemberName| if mine(member) { Some(own) } else { peers.get(member)?.state.as_ref() };
    let going_back = epoch.filter(|epoch| {
        let there = |name: &MemberName| {
            let installed = serving(name).and_then(|state| state.installed.as_ref());
            installed.zip(current).is_some_and(|(installed, current)| installed.is(current))
        };
        let reached = epoch.rollouts().iter().filter(|name| there(name)).count();
        epoch.returned().is_some() && reached < usize::try_from(epoch.prepared.policy.min_ready.max(1)).unwrap_or(usize::MAX)
    });
    let limit = epoch.zip(current).and_then(|(epoch, current)| {
        let most = epoch.prepared.policy.max_skew?;
        let rollouts = epoch.rollouts();
        let held = rollouts.iter().filter_map(|name| serving(name).filter(|state| !state.phase.must_not_serve())?.installed.as_ref());
        let held = held.map(|held| held.version).filter(|version| !epoch.left(*version));
        Some(Limit { most, counts: current.version, newest: newest_in_service(most, current.version, held) })
    });
    let members = epoch.map(|epoch| epoch.prepared.roster.members.as_slice()).unwrap_or_default();
    for member in members.iter().filter(|member| member.role == Role::Rollout) {
        let peer = peers.get(&member.name);
        if !mine(&member.name) && peer.is_none() {
            continue;
        }
        let lost = peer.is_some_and(|peer| peer.lost.is_some());
        let state = serving(&member.name);
        replicas.push(RosterReplica {
            name: member.name.clone(),
            url: epoch.and_then(|epoch| epoch.address(&member.name)).and_then(|address| address.engine_url.clone()),
            state: word(state.filter(|_| !lost), epoch, current, going_back.is_some(), limit).to_owned(),
            version: state.and_then(|state| state.installed.as_ref()).map(|installed| installed.version),
            proven_by: state.and_then(|state| state.proven_by),
            rank_offset: member.rank_offset,
            size: member.size,
            mixed: state.map_or_else(Vec::new, |state| state.mixed.clone()),
        });
    }
    RosterView { epoch: epoch.map(|epoch| epoch.id().epoch), version: current.map(|current| current.version), replicas }
}

/// How far versions in service may be apart, and from what that is counted.
#[derive(Clone, Copy)]
struct Limit {
    most: Version,
    counts: Version,
    newest: Version,
}

fn word(
    state: Option<&MemberState>,
    epoch: Option<&Epoch>,
    current: Option<&HeldVersion>,
    going_back: bool,
    limit: Option<Limit>,
) -> &'static str {
    let Some(state) = state else { return "out" };
    // While a group forms, an engine serves what it served before.
    let phase = match state.phase {
        MemberPhase::Prepared if state.installed.is_some() && current.is_some() => MemberPhase::Ready,
        phase => phase,
    };
    let left = |installed: &HeldVersion| epoch.is_some_and(|epoch| epoch.left(installed.version));
    match (phase, &state.installed, current) {
        (MemberPhase::Dirty, ..) => "dirty",
        (MemberPhase::Unknown, ..) => "unknown",
        (MemberPhase::Updating, ..) => "updating",
        (MemberPhase::EngineDown | MemberPhase::Idle | MemberPhase::Prepared, ..) => "out",
        (MemberPhase::Ready, _, _) if !state.healthy => "out",
        (MemberPhase::Ready, _, None) => "ready",
        (MemberPhase::Ready, Some(installed), Some(current)) if installed.is(current) => "ready",
        (MemberPhase::Ready, Some(installed), _) if going_back && left(installed) => "ready",
        (MemberPhase::Ready, Some(installed), Some(current)) if installed.version != current.version => {
            let within = |Limit { most, counts, newest }| skew(most, counts, newest, installed.version) == Skew::Within;
            // A version may have come since this agent heard of one: its readiness and the controller count it as well.
            let newer = limit.is_none() && installed.version > current.version && !left(installed);
            if newer || limit.is_some_and(within) { "ready" } else { "behind" }
        }
        (MemberPhase::Ready, ..) => "behind",
    }
}

/// Whether the roster says of these replicas what a publish that brought them `version` says. Who was lost or spoiled after its word, or is in
/// no group any more, is reported as that.
pub fn tells(shown: &RosterView, version: Version, installed: &[MemberName]) -> bool {
    shown.version >= Some(version)
        && installed.iter().all(|name| {
            let replica = shown.replicas.iter().find(|replica| replica.name == *name);
            replica.is_none_or(|replica| replica.version >= Some(version) || matches!(replica.state.as_str(), "out" | "dirty" | "unknown"))
        })
}

/// The group whose replicas are shown. While a new group forms, it is the one before: its engines serve, and its agents say what changes.
fn shown(standing: &Standing, before: Option<Arc<Epoch>>) -> Option<Arc<Epoch>> {
    match standing {
        Standing::Idle => None,
        Standing::Prepared(_) | Standing::Committing(_) => before,
        Standing::Committed(epoch) => Some(epoch.clone()),
    }
}

/// Gives each member that was not heard in its new group yet the state that it had in the group before, if it is the same process. It is
/// heard soon, or counts as lost.
fn fill(peers: &mut BTreeMap<MemberName, Peer>, before: &BTreeMap<MemberName, Peer>, epoch: &Epoch) {
    for (name, peer) in peers.iter_mut().filter(|(_, peer)| peer.state.is_none() && peer.lost.is_none()) {
        let earlier = before.get(name).filter(|earlier| earlier.lost.is_none()).and_then(|earlier| earlier.state.clone());
        peer.state = earlier.filter(|state| epoch.address(name).is_some_and(|address| address.incarnation == state.incarnation));
    }
}

/// Keeps `to` up to date until `cancel`. For a source, this is also what listens to all rollouts of each epoch from its commit on.
pub async fn keep(core: Arc<Core>, leader: Arc<Leader>, to: watch::Sender<RosterView>, cancel: CancellationToken) {
    let mut standing = core.standing();
    let mut states = core.events().states();
    let mut current = core.watch_current();
    let leads = core.me().role == Role::Source;
    let mut epoch = None;
    let mut peers = BTreeMap::new();
    loop {
        epoch = shown(&standing.borrow_and_update(), epoch);
        let heard = epoch.as_ref().filter(|epoch| leads || epoch.feeds()).map(|epoch| leader.peers(epoch));
        if heard.is_none() {
            leader.forget_peers();
        }
        let mut known = heard.as_ref().map(|heard| heard.watch());
        let own = states.borrow_and_update().clone();
        let now = current.borrow_and_update().clone();
        let mut fresh = known.as_mut().map(|known| known.borrow_and_update().clone()).unwrap_or_default();
        if let Some(epoch) = &epoch {
            fill(&mut fresh, &peers, epoch);
        }
        peers = fresh;
        let view = view(epoch.as_deref(), now.as_ref(), &peers, &own);
        to.send_if_modified(|shown| {
            let changed = *shown != view;
            *shown = view;
            changed
        });
        let peers_changed = async {
            match known.as_mut() {
                Some(known) => known.changed().await.is_ok(),
                None => std::future::pending().await,
            }
        };
        let alive = tokio::select! {
            () = cancel.cancelled() => false,
            changed = standing.changed() => changed.is_ok(),
            changed = states.changed() => changed.is_ok(),
            changed = current.changed() => changed.is_ok(),
            alive = peers_changed => alive,
        };
        if !alive {
            return;
        }
    }
}
