//! Ranks of a replica, and stories of other projects that counted them wrongly.

use super::world::{actor, pool, refusal, world};
use crate::plan::{PlanRefusal, PoolSpec, plan, roster};

#[test]
fn ranks_above_the_limit_are_refused_with_the_number() {
    for ranks in [0, 65_537] {
        let plan = plan(&world(PoolSpec { ranks, ..pool() }, [actor(0)]));
        assert!(matches!(plan.refusal, Some(PlanRefusal::InvalidSpec { .. })), "{plan:?}");
        assert!(refusal(&plan).contains(&format!("actors.ranks: {ranks} is not from 1 to 65536")), "{}", refusal(&plan));
    }
}

/// NVIDIA-NeMo/RL#2608: rank 12 in a world of 8, with expert parallelism over external data parallelism.
/// Story F15.
#[test]
fn ranks_of_replicas_end_at_the_world_size() {
    let roster = roster(&plan(&world(PoolSpec { ranks: 8, ..pool() }, [actor(0), actor(1)])).candidates);
    let offsets: Vec<_> = roster.members.iter().map(|member| (member.rank_offset, member.size)).collect();
    assert_eq!(offsets, [(0, 1), (1, 8), (9, 8)]);
    assert_eq!(roster.world_size, 17);
}

/// llm-d-rl, bug 2: every engine got rank offset 1.
/// Story F18.
#[test]
fn no_two_engines_share_a_rank() {
    let roster = roster(&plan(&world(PoolSpec { ranks: 3, ..pool() }, (0..5).map(actor))).candidates);
    let offsets: Vec<_> = roster.members.iter().map(|member| member.rank_offset).collect();
    assert_eq!(offsets, [0, 1, 4, 7, 10, 13]);
    assert_eq!(roster.world_size, 16);
}

#[test]
fn world_beyond_the_limit_is_refused_before_overflow() {
    let spec = PoolSpec { ranks: 65_536, ..pool() };
    let plan = plan(&world(spec, (0..16).map(actor)));
    assert_eq!(plan.refusal, Some(PlanRefusal::WorldTooLarge { ranks: 1_048_577, max: 1_048_576 }));
    assert!(refusal(&plan).contains("1048577") && plan.candidates.is_empty());
}
