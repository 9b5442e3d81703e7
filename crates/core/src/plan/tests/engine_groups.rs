//! Which engines share a group that they join by themselves, and which prevent one.

use proptest::prelude::*;

use crate::plan::{Joiner, MOST_RANKS, engine_groups};
use crate::protocol::{GpuReport, GroupFacts, MemberGpu, MemberName, Rendezvous};

fn name(number: usize) -> MemberName {
    MemberName(format!("actors/r{number}"))
}

fn gpus(uuids: &[&str]) -> GpuReport {
    let gpu = |uuid: &&str| MemberGpu { uuid: (*uuid).into(), name: "H200".into(), free_bytes: 64 << 30, memory_bytes: 141 << 30 };
    GpuReport { gpus: uuids.iter().map(gpu).collect(), nccl: Some(23007), ..GpuReport::default() }
}

fn facts(rendezvous: Rendezvous, size: u32) -> GroupFacts {
    GroupFacts { rendezvous, size, why_not: String::new() }
}

/// Kind of a group, and its members with their sizes.
type Joined = (Rendezvous, Vec<(MemberName, u32)>);

/// The groups of these engines, each of its size in the roster: kind and members.
fn joined(joiners: &[(u32, GroupFacts)]) -> Result<Vec<Joined>, Vec<(MemberName, String)>> {
    let names: Vec<MemberName> = (0..joiners.len()).map(name).collect();
    let none = GpuReport::default();
    let joiners: Vec<Joiner<'_>> =
        joiners.iter().zip(&names).map(|((size, facts), name)| Joiner { name, size: *size, facts: Some(facts), gpus: &none }).collect();
    let source = MemberName("trainer/t".into());
    let planned = engine_groups((&source, &gpus(&["GPU-0"])), &joiners);
    planned
        .map(|plan| plan.groups.into_iter().map(|group| (group.rendezvous, group.members)).collect())
        .map_err(|out| out.into_iter().collect())
}

#[test]
fn engines_with_one_rendezvous_share_a_group() {
    let groups = joined(&[(2, facts(Rendezvous::Store, 2)), (4, facts(Rendezvous::UniqueId, 4)), (1, facts(Rendezvous::Store, 1))]);
    let expected = [(Rendezvous::Store, vec![(name(0), 2), (name(2), 1)]), (Rendezvous::UniqueId, vec![(name(1), 4)])];
    assert_eq!(groups.unwrap(), expected);
}

/// Story F19.
#[test]
fn ranks_follow_the_engines_real_size_or_refuse_it() {
    let out = joined(&[(8, facts(Rendezvous::Store, 4))]).unwrap_err();
    assert!(out[0].1.contains("takes 4 ranks") && out[0].1.contains("says 8"), "{out:?}");
}

/// Story F20.
#[test]
fn engine_with_colliding_ranks_says_why_it_cannot_join() {
    let colliding = GroupFacts::cannot("its pipeline stages would all take the same ranks (--pp-size)");
    let out = joined(&[(2, facts(Rendezvous::Store, 2)), (4, colliding)]).unwrap_err();
    assert_eq!(out[0].0, name(1));
    assert!(out[0].1.contains("--pp-size"), "{out:?}");
}

#[test]
fn gpu_shared_by_source_and_engine_gets_no_second_rank() {
    let (source, joiner) = (MemberName("trainer/t".into()), name(0));
    let facts = facts(Rendezvous::Store, 1);
    let joiners = [Joiner { name: &joiner, size: 1, facts: Some(&facts), gpus: &gpus(&["GPU-0"]) }];
    let out = engine_groups((&source, &gpus(&["GPU-0"])), &joiners).unwrap_err();
    assert!(out[&joiner].contains("use delivery Agent"), "{out:?}");
    let none = GpuReport { reason: "no NVIDIA driver".into(), ..GpuReport::default() };
    let out = engine_groups((&source, &none), &joiners).unwrap_err();
    assert!(out[&source].contains("no NVIDIA driver"), "{out:?}");
}

proptest! {
    #[test]
    fn offsets_are_dense_and_within_torchs_limit(
        joiners in prop::collection::vec((1_u32..MOST_RANKS, any::<bool>()), 1..40),
    ) {
        let joiners: Vec<_> = joiners
            .into_iter()
            .map(|(size, store)| (size, facts(if store { Rendezvous::Store } else { Rendezvous::UniqueId }, size)))
            .collect();
        let names: Vec<MemberName> = (0..joiners.len()).map(name).collect();
        let none = GpuReport::default();
        let seen: Vec<Joiner<'_>> =
            joiners.iter().zip(&names).map(|((size, facts), name)| Joiner { name, size: *size, facts: Some(facts), gpus: &none }).collect();
        let plan = engine_groups((&MemberName("t".into()), &gpus(&["GPU-0"])), &seen).unwrap();
        prop_assert_eq!(plan.members().len(), names.len());
        for group in &plan.groups {
            let mut next = 1;
            for (member, size) in &group.members {
                prop_assert_eq!(group.offset(member), Some(next));
                next += size;
            }
            prop_assert_eq!(group.world(), next);
            prop_assert!(next <= MOST_RANKS);
        }
    }
}
