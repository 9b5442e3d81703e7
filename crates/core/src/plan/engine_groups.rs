//! Which engines share a group that they join by themselves, and which cannot be in one.
//!
//! Pure; members are in the order of their ranks. Engines that find rank 0 in different ways cannot share a communicator: vLLM proves it
//! with an all-reduce that SGLang and LMDeploy never enter. No group has more than 128 ranks, because torch makes larger communicators in
//! another way. Two engines with different NCCL libraries cannot share one either, but no engine reports its library. That shows when the
//! first bucket is sent: the attempt then ends with NCCL's own message.

use std::collections::BTreeMap;

use crate::protocol::{EngineGroup, EngineGroups, GpuReport, GroupFacts, MemberName, Rendezvous};

/// Most ranks of one group (`TORCH_NCCL_RANKS_PER_ROOT` of torch 2.9 to 2.15).
pub const MOST_RANKS: u32 = 128;

/// A rollout that will join.
#[derive(Debug, Clone, Copy)]
pub struct Joiner<'a> {
    /// Its name.
    pub name: &'a MemberName,
    /// Its ranks in the roster.
    pub size: u32,
    /// The facts that its engine reports.
    pub facts: Option<&'a GroupFacts>,
    /// GPUs that its agent sees, if it uses any.
    pub gpus: &'a GpuReport,
}

/// The groups, or the members that prevent them, with the reasons. `source` is the member that sends, with its GPUs.
pub fn engine_groups(source: (&MemberName, &GpuReport), joiners: &[Joiner<'_>]) -> Result<EngineGroups, BTreeMap<MemberName, String>> {
    let mut in_the_way = BTreeMap::new();
    let (name, gpus) = source;
    if gpus.gpus.is_empty() || gpus.nccl.is_none() {
        let reason = if gpus.reason.is_empty() { "it has no GPU" } else { &gpus.reason };
        in_the_way.insert(name.clone(), format!("delivery Engine sends from a GPU of the source: {reason}"));
    }
    let mut groups: Vec<EngineGroup> = Vec::new();
    for joiner in joiners {
        match fit(joiner, gpus) {
            Ok(rendezvous) => place(&mut groups, rendezvous, joiner),
            Err(why) => _ = in_the_way.insert(joiner.name.clone(), why),
        }
    }
    if in_the_way.is_empty() { Ok(EngineGroups { groups }) } else { Err(in_the_way) }
}

fn fit(joiner: &Joiner<'_>, source: &GpuReport) -> Result<Rendezvous, String> {
    let facts = joiner.facts.ok_or("its engine was not asked whether it can join a group")?;
    if !facts.why_not.is_empty() {
        return Err(format!("its engine cannot join a group: {}", facts.why_not));
    }
    if facts.size != joiner.size {
        return Err(format!("its engine takes {} ranks of a group, the spec says {}: correct `ranks`", facts.size, joiner.size));
    }
    if joiner.size >= MOST_RANKS {
        return Err(format!("its engine has {} ranks, and a group has at most {MOST_RANKS} with the source's", joiner.size));
    }
    let shared = joiner.gpus.gpus.iter().find(|gpu| source.gpus.iter().any(|own| own.uuid == gpu.uuid));
    match shared {
        Some(gpu) => Err(format!("its {} is the source's too, and a communicator has one rank a GPU: use delivery Agent", gpu.uuid)),
        None => Ok(facts.rendezvous),
    }
}

/// Puts a member into the first group of its kind that has room.
fn place(groups: &mut Vec<EngineGroup>, rendezvous: Rendezvous, joiner: &Joiner<'_>) {
    let member = (joiner.name.clone(), joiner.size);
    let fits = |group: &&mut EngineGroup| group.rendezvous == rendezvous && group.world().saturating_add(joiner.size) <= MOST_RANKS;
    match groups.iter_mut().find(fits) {
        Some(group) => group.members.push(member),
        None => groups.push(EngineGroup { rendezvous, members: vec![member] }),
    }
}
