//! Makes the status. Pure: the decision, the coordinator's view and the previous status in, the new status out. A condition's time changes
//! only when its status changes, so equal facts give equal bytes and no write.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::decide::Decided;
use super::object::Unreadable;
use crate::api::{
    ConditionType, EdgeStatus, EdgeVerdict, GdrDevices, GdrStatus, LONGEST_REQUEST, LastUpdate, MAX_MEMBERS, MemberStateName, MemberStatus,
    PhaseTime, PreflightStatus, ProofName, ReplicaCount, TrainerStatus, TransferStatus, TransportStatus, WeightSync, WeightSyncStatus,
};
use weightsync_core::membership::{GroupStage, MemberStanding, MemberView, MembershipView};
use weightsync_core::protocol::{
    Arrangement, EdgeOutcome, EdgeReport, GpuDevices, MOST_EDGES, MemberFabric, MemberName, PreflightReport, ProvenBy, Reason, Received,
    Role, UpdateView, cut,
};

/// Longest message of a member, in bytes.
const MEMBER_MESSAGE: usize = 1024;
/// Longest message of a condition, in bytes.
const CONDITION_MESSAGE: usize = 2048;
/// Longest reason of a transport, in bytes.
const TRANSPORT_REASON: usize = 1024;
/// Name of host memory among the places that network devices serve.
const HOST_MEMORY: &str = "host";
/// Longest name of a member, in bytes.
const LONGEST_NAME: usize = 384;
/// Longest name of a node, in bytes.
const LONGEST_NODE: usize = 253;
/// Pods of one member that are listed.
const MAX_PODS: usize = 16;

/// Kept versions of one member that are listed.
const MAX_RETAINED: usize = 32;

/// Status, reason and message of a condition.
struct Judgement(Option<bool>, Reason, String);

pub(super) struct Facts<'a> {
    pub(super) object: &'a WeightSync,
    pub(super) decided: &'a Decided,
    pub(super) view: &'a MembershipView,
    /// What users must do about agents.
    pub(super) problems: &'a [(Reason, String)],
    /// Why the object's coordinator stopped deciding, while no group was formed since.
    pub(super) stepped_down: Option<&'a str>,
}

impl Facts<'_> {
    /// What prevents every group, independent of its members.
    fn obstacle(&self) -> Option<(Reason, String)> {
        let stepped_down = self.stepped_down.map(|message| (Reason::PersistFailed, message.to_owned()));
        let unwritten = || {
            let found = self.view.degraded.iter().find(|degradation| degradation.reason == Reason::PersistFailed)?;
            Some((Reason::PersistFailed, found.message.clone()))
        };
        stepped_down.or_else(unwritten).filter(|_| !self.view.committed || self.stepped_down.is_some())
    }
}

/// The status without `epoch` and `term`, which belong to another field manager.
pub(super) fn status(facts: &Facts<'_>, before: &[Condition], now: Timestamp) -> WeightSyncStatus {
    let Facts { object, decided, view, .. } = facts;
    let generation = object.metadata.generation;
    let source = view.members.iter().find(|member| member.role == Role::Source).and_then(|member| member.pods.first());
    let held = view.version.as_ref();
    WeightSyncStatus {
        observed_generation: generation,
        conditions: ConditionType::ALL.iter().map(|kind| condition(*kind, judge(*kind, facts), before, generation, now)).collect(),
        epoch: None,
        term: None,
        world_size: view.committed.then(|| signed(view.world_size)),
        transport: view
            .transport
            .as_ref()
            .map(|transport| TransportStatus { name: transport.name().to_owned(), reason: cut(&transport.reason, TRANSPORT_REASON) }),
        preflight: view.preflight.as_deref().map(preflight),
        version: held.map(|held| signed_long(held.version)),
        manifest: held.map(|held| held.manifest.clone()).filter(|manifest| !manifest.is_empty()),
        rolled_back_from: held
            .and_then(|held| view.returned.filter(|returned| returned.from > held.version && view.wanted == view.version))
            .map(|returned| signed_long(returned.from)),
        refused: view.refused.iter().map(|number| signed_long(*number)).collect(),
        last_update: view.update.as_ref().map(last_update),
        replicas: Some(ReplicaCount::new(view.ready, decided.replicas.max(view.ready))),
        members: view.members.iter().take(MAX_MEMBERS).map(member).collect(),
        trainer: source.map(|pod| TrainerStatus { pod: pod.name.clone(), uid: pod.uid.clone() }),
    }
}

/// The status of an invalid object without a coordinator: unchanged, except for what is wrong.
pub(super) fn not_followed(message: &str, generation: Option<i64>, before: &WeightSyncStatus, now: Timestamp) -> WeightSyncStatus {
    WeightSyncStatus {
        observed_generation: generation,
        conditions: refused(message, generation, &before.conditions, now),
        ..before.clone()
    }
}

/// The same for an object that cannot be parsed.
pub(super) fn unreadable(object: &Unreadable, now: Timestamp) -> Map<String, Value> {
    let before = object.status.get("conditions").cloned().unwrap_or_default();
    let before: Vec<Condition> = serde_json::from_value(before).unwrap_or_default();
    let message = format!("the object cannot be read: {}", object.error);
    let mut status = object.status.clone();
    status.insert("conditions".to_owned(), json!(refused(&message, object.metadata.generation, &before, now)));
    status
}

/// The previous conditions, except for those that become false because the spec cannot be applied.
fn refused(message: &str, generation: Option<i64>, before: &[Condition], now: Timestamp) -> Vec<Condition> {
    let false_now = [ConditionType::Ready, ConditionType::Accepted];
    let fresh = false_now.map(|kind| {
        let judgement = Judgement(Some(false), Reason::InvalidSpec, message.to_owned());
        condition(kind, judgement, before, generation, now)
    });
    let others = before.iter().filter(|known| false_now.iter().all(|kind| kind.as_str() != known.type_)).cloned();
    let mut all: Vec<Condition> = fresh.into_iter().chain(others).collect();
    // The order in which status shows them: equal facts give equal bytes.
    all.sort_by_key(|known| ConditionType::ALL.iter().position(|kind| kind.as_str() == known.type_));
    all
}

fn signed(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

fn signed_long(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn condition(kind: ConditionType, judgement: Judgement, before: &[Condition], generation: Option<i64>, now: Timestamp) -> Condition {
    let Judgement(holds, reason, message) = judgement;
    let status = match holds {
        Some(true) => "True",
        Some(false) => "False",
        None => "Unknown",
    };
    let same = before.iter().find(|condition| condition.type_ == kind.as_str() && condition.status == status);
    Condition {
        type_: kind.as_str().to_owned(),
        status: status.to_owned(),
        reason: reason.as_str().to_owned(),
        message: cut(&message, CONDITION_MESSAGE),
        observed_generation: generation,
        // Kubernetes keeps whole seconds; a fraction would make each status differ from the one that is stored.
        last_transition_time: same.map_or_else(|| Time(whole_seconds(now)), |condition| condition.last_transition_time.clone()),
    }
}

fn whole_seconds(now: Timestamp) -> Timestamp {
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

fn judge(kind: ConditionType, facts: &Facts<'_>) -> Judgement {
    let Facts { object, decided, view, .. } = facts;
    match kind {
        ConditionType::Accepted => accepted(decided),
        _ if object.spec.suspend => suspended(kind, view),
        ConditionType::Ready => ready(facts),
        ConditionType::Progressing => progressing(view),
        ConditionType::Degraded => degraded(facts),
    }
}

fn accepted(decided: &Decided) -> Judgement {
    match &decided.refused {
        Some((reason, message)) => Judgement(Some(false), *reason, message.clone()),
        None => Judgement(Some(true), Reason::AsWanted, "the spec is valid, and no older object claims the pods".into()),
    }
}

fn suspended(kind: ConditionType, view: &MembershipView) -> Judgement {
    let message = if view.released { "all pods were released" } else { "pods are being released" };
    Judgement(Some(kind == ConditionType::Progressing && !view.released), Reason::Suspended, message.into())
}

fn ready(facts: &Facts<'_>) -> Judgement {
    let Facts { decided, view, .. } = facts;
    if let Some((reason, message)) = &decided.refused {
        return Judgement(Some(false), *reason, message.clone());
    }
    if let Some(message) = &decided.no_source {
        return Judgement(Some(false), Reason::NoSource, message.clone());
    }
    if let Some((reason, message)) = facts.obstacle() {
        return Judgement(Some(false), reason, message);
    }
    let counts = format!("{} of {} replicas serve the current version, minReady is {}", view.ready, decided.replicas, view.min_ready);
    if view.ready >= view.min_ready && view.committed {
        let reason = if view.version.is_some() { Reason::VersionReached } else { Reason::NoVersion };
        let message = view.version.as_ref().map_or_else(
            || format!("a group of {} ranks waits for the first version", view.world_size),
            |held| format!("version {}: {counts}", held.version),
        );
        return Judgement(Some(true), reason, message);
    }
    let cause = first_cause(view).unwrap_or((Reason::BelowMinReady, String::new()));
    let message = if cause.1.is_empty() { counts } else { format!("{counts}; {}", cause.1) };
    Judgement(Some(false), if view.committed { Reason::BelowMinReady } else { cause.0 }, message)
}

/// Why there is no group, or which member is missing: the degraded cause first, then the first member outside the group.
fn first_cause(view: &MembershipView) -> Option<(Reason, String)> {
    let degraded =
        view.degraded.first().map(|degradation| (degradation.reason, name_first(degradation.member.as_ref(), &degradation.message)));
    let aside = || {
        let aside = |member: &&MemberView| {
            matches!(member.standing, MemberStanding::Out | MemberStanding::Waiting | MemberStanding::Dirty | MemberStanding::Unknown)
        };
        view.members.iter().find(aside).map(|member| (member.reason, format!("{}: {}", member.name, member.message)))
    };
    degraded.or_else(aside)
}

fn name_first(member: Option<&MemberName>, message: &str) -> String {
    match member {
        Some(member) if !message.contains(&member.0) => format!("{member}: {message}"),
        _ => message.to_owned(),
    }
}

fn runs(update: &UpdateView) -> bool {
    !update.phase.is_over()
}

fn progressing(view: &MembershipView) -> Judgement {
    match view.stage {
        GroupStage::Adopting => Judgement(Some(true), Reason::GroupForming, "this controller started and waits for agents".into()),
        GroupStage::Persisting | GroupStage::Preparing | GroupStage::Committing => {
            Judgement(Some(true), Reason::GroupForming, format!("epoch {} is being formed", view.epoch))
        }
        _ => match view.update.as_ref().filter(|update| runs(update)) {
            _ if view.wanted.is_some() && view.wanted != view.version => {
                let wanted = view.wanted.as_ref().map_or(0, |held| held.version);
                let refused = view.version.as_ref().filter(|version| view.refused.contains(&version.version));
                let why = refused.map_or_else(
                    || "because of targetVersion".to_owned(),
                    |refused| format!("because the canary refuses version {}", refused.version),
                );
                Judgement(Some(true), Reason::RolledBack, format!("members are switched to version {wanted}, {why}"))
            }
            Some(update) => Judgement(Some(true), Reason::Updating, format!("an update to version {} runs", update.version)),
            None => match view.returned.filter(|returned| returned.pinned) {
                Some(returned) => {
                    let message = format!("held at version {} by targetVersion: publishes are refused", returned.to);
                    Judgement(Some(false), Reason::RolledBack, message)
                }
                None => match lagging(view) {
                    Some(message) => Judgement(Some(true), Reason::Updating, message),
                    None => Judgement(Some(false), Reason::AsWanted, at_rest(view)),
                },
            },
        },
    }
}

fn at_rest(view: &MembershipView) -> String {
    if view.committed {
        format!("epoch {} with {} ranks; no update runs", view.epoch, view.world_size)
    } else {
        "there is no group, and none is being formed".to_owned()
    }
}

/// The members that lag and are about to be fed.
fn lagging(view: &MembershipView) -> Option<String> {
    let held = view.version.as_ref().filter(|_| view.committed && view.feeder.is_some())?;
    let lacks = |member: &&MemberView| matches!(member.standing, MemberStanding::Behind | MemberStanding::Dirty | MemberStanding::Unknown);
    let names: Vec<String> = view.members.iter().filter(lacks).map(|member| member.name.to_string()).collect();
    (!names.is_empty()).then(|| format!("{} do not serve version {}", listed(&names), held.version))
}

fn listed(names: &[String]) -> String {
    let shown = names.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(5) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn degraded(facts: &Facts<'_>) -> Judgement {
    let Facts { decided, view, problems, .. } = facts;
    let of_view =
        view.degraded.iter().map(|degradation| (degradation.reason, name_first(degradation.member.as_ref(), &degradation.message)));
    let of_group = facts.obstacle().into_iter().chain(problems.iter().cloned());
    let all: Vec<(Reason, String)> = of_group.chain(of_view).chain(decided.misfits.iter().cloned()).collect();
    match all.first() {
        None => Judgement(Some(false), Reason::AsWanted, "no problem is known".into()),
        Some((reason, _)) => {
            let mut messages: Vec<&str> = all.iter().map(|(_, message)| message.as_str()).collect();
            messages.dedup();
            Judgement(Some(true), *reason, messages.join("; "))
        }
    }
}

fn preflight(report: &PreflightReport) -> PreflightStatus {
    PreflightStatus {
        state: if report.done { "Done" } else { "Running" }.to_owned(),
        transport: report.transport.clone(),
        request: cut(&report.asked, LONGEST_REQUEST),
        measured: signed(report.measured),
        milliseconds: signed_long(report.took_ms),
        edges: report.edges.iter().take(MOST_EDGES).map(|found| edge(found, &report.arrangement)).collect(),
    }
}

fn edge(found: &EdgeReport, arrangement: &Arrangement) -> EdgeStatus {
    let EdgeReport { from, to, places, outcome } = found;
    let poor = arrangement.poor.iter().find(|poor| poor.member == *to && poor.from == *from);
    let poor = poor.or(arrangement.source.as_ref().filter(|source| source.member == *from));
    let (verdict, figures, message) = match (outcome, poor) {
        (EdgeOutcome::Broken { cause }, _) => (EdgeVerdict::Broken, None, cause.as_str()),
        (EdgeOutcome::Unmeasured { cause }, _) => (EdgeVerdict::Unmeasured, None, cause.as_str()),
        (EdgeOutcome::Verified(figures), Some(poor)) => (EdgeVerdict::Slow, Some(figures), poor.why.as_str()),
        (EdgeOutcome::Verified(figures), None) => (EdgeVerdict::Good, Some(figures), ""),
    };
    EdgeStatus {
        from: from.0.clone(),
        to: to.0.clone(),
        from_node: cut(&places.0, LONGEST_NODE),
        to_node: cut(&places.1, LONGEST_NODE),
        verdict,
        bytes_per_second: figures.map(|figures| signed_long(figures.rate())),
        round_trip_microseconds: figures.and_then(|figures| figures.round_trip_us).map(signed_long),
        mtu: figures.and_then(|figures| figures.mtu).map(signed),
        clock_milliseconds: figures.and_then(|figures| figures.clock_ms),
        message: cut(message, MEMBER_MESSAGE),
    }
}

fn last_update(update: &UpdateView) -> LastUpdate {
    LastUpdate {
        version: signed_long(update.version),
        attempt: signed(update.attempt),
        state: format!("{:?}", update.phase),
        bytes: signed_long(update.total_bytes),
        feeding: update.feeding,
        phases: phases(&update.phases_ms),
        failure: update.failure.as_deref().map(|failure| cut(failure, MEMBER_MESSAGE)),
    }
}

/// The list is a map by name: a phase that ran twice counts as one.
fn phases(times: &[(String, u64)]) -> Vec<PhaseTime> {
    let mut phases: Vec<PhaseTime> = Vec::new();
    for (name, milliseconds) in times {
        let (name, milliseconds) = (cut(name, 32), signed_long(*milliseconds));
        match phases.iter_mut().find(|phase| phase.name == name) {
            Some(phase) => phase.milliseconds = phase.milliseconds.saturating_add(milliseconds),
            None => phases.push(PhaseTime { name, milliseconds }),
        }
    }
    phases.truncate(16);
    phases
}

fn member(member: &MemberView) -> MemberStatus {
    MemberStatus {
        name: member.name.to_string(),
        pods: member.pods.iter().take(MAX_PODS).map(|pod| pod.name.clone()).collect(),
        rank_offset: member.rank_offset.map(signed),
        size: signed(member.size),
        state: match member.standing {
            MemberStanding::Ready => MemberStateName::Ready,
            MemberStanding::Updating => MemberStateName::Updating,
            MemberStanding::Behind => MemberStateName::Behind,
            MemberStanding::Dirty => MemberStateName::Dirty,
            MemberStanding::Unknown => MemberStateName::Unknown,
            MemberStanding::Forming => MemberStateName::Forming,
            MemberStanding::Waiting => MemberStateName::Waiting,
            MemberStanding::Out => MemberStateName::Out,
        },
        version: member.installed.as_ref().map(|held| signed_long(held.version)),
        proven_by: member.proven_by.map(|by| match by {
            ProvenBy::Digests => ProofName::Digests,
            ProvenBy::Engine => ProofName::Engine,
            ProvenBy::Nothing => ProofName::Nothing,
        }),
        retained: member.keeps.iter().take(MAX_RETAINED).map(|held| signed_long(held.version)).collect(),
        paused_until: member
            .paused_until
            .and_then(|until| Timestamp::from_millisecond(signed_long(until)).ok())
            .map(|at| Time(whole_seconds(at))),
        last_transfer: member.received.as_ref().map(transfer),
        gdr: member.fabric.as_deref().map(|fabric| gdr(fabric.clone().bounded())),
        reason: member.reason.as_str().to_owned(),
        message: cut(&member.message, MEMBER_MESSAGE),
    }
}

fn transfer(received: &Received) -> TransferStatus {
    TransferStatus {
        version: signed_long(received.version),
        from: cut(&received.from.0, LONGEST_NAME),
        transport: received.by.as_str().to_owned(),
        bytes: signed_long(received.bytes),
        milliseconds: signed_long(received.microseconds / 1000),
        bytes_per_second: signed_long(received.rate()),
    }
}

fn gdr(fabric: MemberFabric) -> GdrStatus {
    let MemberFabric { library, version, plugin, transports, devices } = fabric;
    let mut places: Vec<GdrDevices> = Vec::new();
    for GpuDevices { gpu, names } in devices {
        let memory = gpu.filter(|gpu| !gpu.is_empty()).unwrap_or_else(|| HOST_MEMORY.to_owned());
        // The list is a map by memory: what comes twice counts once.
        if places.iter().all(|place| place.memory != memory) {
            places.push(GdrDevices { memory, names });
        }
    }
    GdrStatus { library, version, plugin, transports, devices: places }
}
