//! Which transport an epoch gets, from the spec and the members' GPUs.
//!
//! Decides by facts of prepared members only. NCCL needs a GPU for every member, no GPU twice (a member on the source's GPU has no rank:
//! [`rank_plan`]), the same minor version of the library everywhere, and room for a ring. `auto` falls back to TCP with a reason. When NCCL is
//! required, members that prevent it are named and left out, like any member that refuses. Reads through NIXL need no GPU; `auto` uses them
//! if all members have an RDMA device and NCCL is not possible.

use std::collections::BTreeMap;

use crate::plan::{GpuRoom, Joiner, RankPlan, RingChoice, RingWish, USUAL_LOAD, engine_groups, gpu_ring, rank_plan};
use crate::protocol::{
    CommunicatorPlan, Delivery, FabricPlan, FabricReport, GpuReport, GroupFacts, MemberGpu, MemberName, Role, RosterMember,
    TransportChoice, TransportPolicy, TransportWish, UpdatePolicy,
};

/// A member that prevents the required transport.
pub(super) type InTheWay = BTreeMap<MemberName, String>;

/// A member of an epoch, as far as the choice needs it.
pub(super) struct Prepared<'a> {
    pub(super) member: &'a RosterMember,
    pub(super) gpus: &'a GpuReport,
    pub(super) fabric: &'a FabricReport,
    /// Its engine's ability to join.
    pub(super) groups: Option<&'a GroupFacts>,
}

/// The transport of an epoch. `members` are in the order of their ranks, sources first.
pub(super) fn choose(policy: &UpdatePolicy, members: &[Prepared<'_>]) -> Result<TransportChoice, InTheWay> {
    match policy.delivery {
        Delivery::Agent if policy.transport.wish == TransportWish::Gdr => {
            by_reads(&policy.transport, members, "spec.transport.type is GDR")
        }
        Delivery::Agent => {
            let reports: Vec<_> = members.iter().map(|prepared| (&prepared.member.name, prepared.gpus)).collect();
            let choice = between_agents(&policy.transport, &reports)?;
            // Reads need no GPU; over TCP they would be no better than the chain.
            let better =
                policy.transport.wish == TransportWish::Auto && choice.nccl.is_none() && members.iter().all(|member| member.fabric.rdma);
            let reads = better.then(|| by_reads(&policy.transport, members, "auto: every member has NIXL and an RDMA device"));
            Ok(reads.and_then(Result::ok).unwrap_or(choice))
        }
        Delivery::Engine => between_engines(members),
        Delivery::External => Ok(TransportChoice::tcp("delivery External: the bytes travel in the user's own data plane")),
    }
}

/// The groups that engines join. Without a source nothing is published: joiners are fed over connections.
fn between_engines(members: &[Prepared<'_>]) -> Result<TransportChoice, InTheWay> {
    let Some(source) = members.iter().find(|prepared| prepared.member.role == Role::Source) else {
        return Ok(TransportChoice::tcp("delivery Engine: without the source nothing is broadcast"));
    };
    let rollouts = members.iter().filter(|prepared| prepared.member.role == Role::Rollout);
    let joiners: Vec<Joiner<'_>> = rollouts
        .map(|Prepared { member, gpus, groups, .. }| Joiner { name: &member.name, size: member.size, facts: *groups, gpus })
        .collect();
    let engines = engine_groups((&source.member.name, source.gpus), &joiners)?;
    let ranks: Vec<String> = engines.groups.iter().map(|group| group.world().to_string()).collect();
    let reason = format!("delivery Engine: the engines join; ranks of each group, with the source's: {}", ranks.join(", "));
    Ok(TransportChoice { nccl: None, gdr: None, engines: Some(engines), reason })
}

/// Reads along the chain. Members without NIXL prevent it.
fn by_reads(policy: &TransportPolicy, members: &[Prepared<'_>], asked: &str) -> Result<TransportChoice, InTheWay> {
    let lacking = members.iter().filter(|prepared| prepared.fabric.nixl.is_none());
    let in_the_way: InTheWay = lacking.map(|Prepared { member, fabric, .. }| (member.name.clone(), fabric.reason.clone())).collect();
    if !in_the_way.is_empty() {
        return Err(in_the_way);
    }
    let (plan, why) = slots(policy, members)?;
    let nixl = members.first().and_then(|prepared| prepared.fabric.nixl.as_deref()).unwrap_or_default();
    let reason = format!("{asked}; {nixl}; {why}");
    Ok(TransportChoice { nccl: None, gdr: Some(plan), engines: None, reason })
}

/// The slots of each member: on GPUs if the source's can be there, and the reason.
fn slots(policy: &TransportPolicy, members: &[Prepared<'_>]) -> Result<(FabricPlan, String), InTheWay> {
    let source = members.iter().find(|prepared| prepared.member.role == Role::Source);
    if !source.is_some_and(|source| source.fabric.gpu) {
        let plan = FabricPlan::of(policy.slots, policy.slot_bytes);
        return Ok((plan, format!("{} slots of {} MiB", plan.slots, plan.slot_bytes >> 20)));
    }
    let with_gpus = members.iter().filter(|prepared| prepared.fabric.gpu);
    let rooms: Vec<(&MemberName, GpuRoom)> = with_gpus
        .flat_map(|Prepared { member, gpus, .. }| gpus.gpus.iter().map(move |gpu| (&member.name, room(&member.name, gpu, 1))))
        .collect();
    let chosen = ring_in(policy, &rooms).map_err(|tightest| InTheWay::from([tightest]))?;
    let plan = FabricPlan { slots: chosen.ring.slots, slot_bytes: chosen.ring.slot_bytes, on_gpus: true };
    Ok((plan, format!("slots on GPUs: {}", chosen.why)))
}

/// The transport between agents. `members` are in the order of their ranks, sources first.
fn between_agents(policy: &TransportPolicy, members: &[(&MemberName, &GpuReport)]) -> Result<TransportChoice, InTheWay> {
    if policy.wish == TransportWish::Tcp {
        return Ok(TransportChoice::tcp("spec.transport.type is TCP"));
    }
    let mut in_the_way = unfit(members);
    let rank_plan = rank_plan(&members.iter().map(|(name, report)| (*name, uuids(report))).collect::<Vec<_>>());
    in_the_way.extend(rank_plan.out.clone());
    if in_the_way.is_empty() {
        match ring(policy, members, &rank_plan) {
            Ok((plan, why)) => {
                let asked = if policy.wish == TransportWish::Nccl { "spec.transport.type is NCCL" } else { "auto: every member has a GPU" };
                let notes = [alongside(&rank_plan), unshared(members)].concat();
                return Ok(TransportChoice { nccl: Some(plan), gdr: None, engines: None, reason: format!("{asked}; ring: {why}{notes}") });
            }
            Err((member, why)) => _ = in_the_way.insert(member, why),
        }
    }
    match policy.wish {
        TransportWish::Nccl => Err(in_the_way),
        TransportWish::Auto | TransportWish::Tcp | TransportWish::Gdr => {
            let first = in_the_way.iter().next().map(|(member, why)| format!("{member}: {why}")).unwrap_or_default();
            let more = match in_the_way.len() {
                0 | 1 => String::new(),
                count => format!(" (and {} more)", count - 1),
            };
            Ok(TransportChoice::tcp(format!("auto: no NCCL, {first}{more}")))
        }
    }
}

fn uuids(report: &GpuReport) -> Vec<String> {
    report.gpus.iter().map(|gpu| gpu.uuid.clone()).collect()
}

/// Names the members that are on the source's GPU.
fn alongside(rank_plan: &RankPlan) -> String {
    let guests: Vec<&str> = rank_plan.guests.iter().map(|guest| guest.0.as_str()).collect();
    match guests.as_slice() {
        [] => String::new(),
        guests => format!("; without a rank, on the source's GPU: {}", guests.join(", ")),
    }
}

/// Names the first member that cannot share GPU memory with its engine: such a group works, but more slowly.
fn unshared(members: &[(&MemberName, &GpuReport)]) -> String {
    let mut all = members.iter().filter(|(_, report)| !report.unshared.is_empty());
    let Some((name, report)) = all.next() else { return String::new() };
    let more = match all.count() {
        0 => String::new(),
        count => format!(" (and {count} more)"),
    };
    format!("; memory of its GPU cannot be shared with the engine of {name}{more}: {}", report.unshared)
}

/// Members that cannot be in one communicator with the others, each compared with those before it: the first source is never left out.
fn unfit(members: &[(&MemberName, &GpuReport)]) -> InTheWay {
    let mut unfit = InTheWay::new();
    let mut version: Option<(u32, &MemberName)> = None;
    for (name, report) in members {
        let Some(nccl) = report.nccl.filter(|_| !report.gpus.is_empty()) else {
            let reason = if report.reason.is_empty() { "it has no GPU" } else { &report.reason };
            unfit.insert((*name).clone(), reason.to_owned());
            continue;
        };
        if let Some((first, of)) = version
            && minor(first) != minor(nccl)
        {
            let why = format!("its NCCL is {}, that of {of} is {}: they must agree in the minor version", shown(nccl), shown(first));
            unfit.insert((*name).clone(), why);
            continue;
        }
        version.get_or_insert((nccl, name));
    }
    unfit
}

fn ring(
    policy: &TransportPolicy,
    members: &[(&MemberName, &GpuReport)],
    rank_plan: &RankPlan,
) -> Result<(CommunicatorPlan, String), (MemberName, String)> {
    // On the source's GPU each member without a rank has a ring as well.
    let rings = |name: &MemberName| {
        let first = rank_plan.ranks.first().is_some_and(|(first, _)| first == name);
        1 + if first { u64::try_from(rank_plan.guests.len()).unwrap_or(u64::MAX - 1) } else { 0 }
    };
    let ranked: Vec<_> = members.iter().filter(|(name, _)| !rank_plan.guests.contains(name)).collect();
    let rooms: Vec<(&MemberName, GpuRoom)> =
        ranked.iter().flat_map(|(name, report)| report.gpus.iter().map(|gpu| (*name, room(name, gpu, rings(name))))).collect();
    let chosen = ring_in(policy, &rooms)?;
    let (ranks, guests) = (rank_plan.ranks.clone(), rank_plan.guests.clone());
    let plan = CommunicatorPlan { slots: chosen.ring.slots, slot_bytes: chosen.ring.slot_bytes, ranks, guests };
    Ok((plan, chosen.why))
}

/// Memory of a GPU for one of `rings` rings of equal length, at least one.
fn room(name: &MemberName, gpu: &MemberGpu, rings: u64) -> GpuRoom {
    let of = match rings {
        1 => format!("{} of {name}", gpu.uuid),
        rings => format!("{} of {name} for each of {rings} rings", gpu.uuid),
    };
    GpuRoom { gpu: of, free: gpu.free_bytes / rings.max(1), total: gpu.memory_bytes }
}

/// A ring that all these GPUs have room for; else the member with the least room, and what it lacks.
fn ring_in(policy: &TransportPolicy, rooms: &[(&MemberName, GpuRoom)]) -> Result<RingChoice, (MemberName, String)> {
    let all: Vec<GpuRoom> = rooms.iter().map(|(_, room)| room.clone()).collect();
    // Not the model's own size: rings would change with each model, and members that opened one would have to open another.
    gpu_ring(RingWish::of(policy.slots, policy.slot_bytes), USUAL_LOAD, &all).map_err(|none| {
        let tightest = rooms.iter().min_by_key(|(_, room)| room.free).map(|(name, _)| (*name).clone());
        (tightest.unwrap_or_else(|| MemberName(String::new())), none.to_string())
    })
}

/// Major and minor version from `ncclGetVersion` (22809: 2.28).
fn minor(version: u32) -> u32 {
    version / 100
}

fn shown(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}
