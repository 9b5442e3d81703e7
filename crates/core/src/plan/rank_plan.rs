//! Which members of a group have ranks of its communicator, and which have none because they use the source's GPU.
//!
//! NCCL refuses two ranks on one GPU. So a rollout whose only GPU is the source's (trainer and engine colocated) has no rank, and copies
//! the stream from the source's memory. If two members share any other GPU, the later one is left out with the reason. Pure; members are in
//! the order of their ranks.

use std::collections::BTreeMap;

use crate::protocol::MemberName;

/// The members with ranks and those without.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankPlan {
    /// Members with ranks, one for each GPU, in the given order.
    pub ranks: Vec<(MemberName, Vec<String>)>,
    /// Members without a rank, on the source's GPU.
    pub guests: Vec<MemberName>,
    /// Members that can be neither, with the reason.
    pub out: BTreeMap<MemberName, String>,
}

/// Assigns ranks. `members` are in the order of their ranks, the source first, each with the UUIDs of its GPUs, at least one.
pub fn rank_plan(members: &[(&MemberName, Vec<String>)]) -> RankPlan {
    let mut rank_plan = RankPlan::default();
    let mut taken: BTreeMap<&str, &MemberName> = BTreeMap::new();
    let source: &[String] = members.first().map(|(_, gpus)| gpus.as_slice()).unwrap_or_default();
    for (place, (name, gpus)) in members.iter().enumerate() {
        let shared = gpus.iter().find_map(|gpu| taken.get(gpu.as_str()).map(|other| (gpu, *other)));
        match shared {
            None => {
                taken.extend(gpus.iter().map(|gpu| (gpu.as_str(), *name)));
                rank_plan.ranks.push(((*name).clone(), gpus.clone()));
            }
            Some(_) if place > 0 && gpus.as_slice() == source && gpus.len() == 1 => rank_plan.guests.push((*name).clone()),
            Some((gpu, other)) => {
                let why = if source.contains(gpu) {
                    format!(
                        "its {gpu} is the source's too: an engine can share the source's GPU only when it has no other; give the trainer's \
                         first pod a GPU of its own"
                    )
                } else {
                    format!("it is on {gpu} as {other} is: a communicator has one rank a GPU")
                };
                rank_plan.out.insert((*name).clone(), why);
            }
        }
    }
    rank_plan
}
