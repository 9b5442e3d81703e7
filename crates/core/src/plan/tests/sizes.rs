//! Ranks of a replica, and stories of peers that counted them wrongly.

use super::world::{actor, left_out, names, pool, refusal, why, world};
use crate::plan::{EndpointKey, LeftOutCode, Parallelism, PlanRefusal, PoolSpec, plan, roster};

fn sizes(tensor: u32, pipeline: u32, data: u32, expert: u32) -> Parallelism {
    Parallelism { tensor, pipeline, data, expert }
}

#[test]
fn tensor_pipeline_and_data_ranks_multiply_and_experts_do_not() {
    let cases = [((1, 1, 1, 1), 1), ((2, 1, 1, 1), 2), ((2, 3, 1, 1), 6), ((2, 3, 5, 1), 30), ((4, 1, 2, 8), 8), ((8, 2, 1, 8), 16)];
    for ((tensor, pipeline, data, expert), expected) in cases {
        assert_eq!(sizes(tensor, pipeline, data, expert).size(), Ok(expected));
    }
}

#[test]
fn sizes_that_cannot_be_are_refused_with_their_numbers() {
    assert!(sizes(0, 1, 1, 1).size().unwrap_err().contains("at least 1"));
    assert!(sizes(2, 1, 2, 3).size().unwrap_err().contains("2 x 2 = 4 ranks, which expert: 3 does not divide"));
    assert!(sizes(u32::MAX, u32::MAX, u32::MAX, 1).size().unwrap_err().contains("more than 65536"));
}

/// NVIDIA-NeMo/RL#2608: rank 12 in a world of 8, with expert parallelism over external data parallelism.
/// Story F15.
#[test]
fn experts_give_no_rank_beyond_the_world() {
    let spec = PoolSpec { parallelism: sizes(2, 1, 4, 8), ..pool() };
    let roster = roster(&plan(&world(spec, [actor(0), actor(1)])).candidates);
    let offsets: Vec<_> = roster.members.iter().map(|member| (member.rank_offset, member.size)).collect();
    assert_eq!(offsets, [(0, 1), (1, 8), (9, 8)]);
    assert_eq!(roster.world_size, 17);
}

/// PrimeIntellect-ai/prime-rl#3060: data parallel ranks counted by the engine and by the spec, so that the trainer waits for ranks that
/// never come.
/// Story F16.
#[test]
fn data_parallel_ranks_count_once() {
    let mut input = world(PoolSpec { parallelism: sizes(2, 1, 4, 1), ..pool() }, [actor(0)]);
    let endpoint = EndpointKey { pod_uid: "uid-actor-0".to_owned(), port: 8000 };
    input.engine_sizes.insert(endpoint.clone(), 8);
    assert_eq!(roster(&plan(&input).candidates).world_size, 9, "what the engine reports and the spec says is one number");
    input.engine_sizes.insert(endpoint, 32);
    assert_eq!(why(&plan(&input), "actors/actor-0").code, LeftOutCode::SizeMismatch);
}

/// llm-d-rl, bug 2: every engine got rank offset 1.
/// Story F18.
#[test]
fn no_two_engines_share_a_rank() {
    let roster = roster(&plan(&world(PoolSpec { parallelism: sizes(3, 1, 1, 1), ..pool() }, (0..5).map(actor))).candidates);
    let offsets: Vec<_> = roster.members.iter().map(|member| member.rank_offset).collect();
    assert_eq!(offsets, [0, 1, 4, 7, 10, 13]);
    assert_eq!(roster.world_size, 16);
}

/// radixark/miles#2510, NovaSky-AI/SkyRL#1271: offsets follow the engine's real size, not the configured one.
/// Story F19.
#[test]
fn engine_of_another_size_than_the_spec_is_refused() {
    let mut input = world(PoolSpec { parallelism: sizes(8, 1, 1, 1), ..pool() }, [actor(0), actor(1)]);
    for (name, size) in [("actor-0", 4), ("actor-1", 8)] {
        input.engine_sizes.insert(EndpointKey { pod_uid: format!("uid-{name}"), port: 8000 }, size);
    }
    let plan = plan(&input);
    assert_eq!(left_out(&plan), [("actors/actor-0", LeftOutCode::SizeMismatch)]);
    let message = &why(&plan, "actors/actor-0").message;
    assert!(message.contains("has 4 worker ranks") && message.contains("says 8"), "{message}");
    assert_eq!(names(&plan), ["trainer/trainer-0", "actors/actor-1"]);
    assert_eq!(roster(&plan.candidates).world_size, 9);
}

#[test]
fn claims_of_an_earlier_pod_of_one_name_do_not_count() {
    let mut input = world(pool(), [actor(0)]);
    input.engine_sizes.insert(EndpointKey { pod_uid: "uid-of-its-predecessor".to_owned(), port: 8000 }, 4);
    input.engine_sizes.insert(EndpointKey { pod_uid: "uid-actor-0".to_owned(), port: 9000 }, 4);
    assert_eq!(plan(&input).left_out, []);
}

#[test]
fn world_beyond_the_limit_is_refused_before_overflow() {
    let spec = PoolSpec { parallelism: sizes(65_536, 1, 1, 1), ..pool() };
    let plan = plan(&world(spec, (0..16).map(actor)));
    assert_eq!(plan.refusal, Some(PlanRefusal::WorldTooLarge { ranks: 1_048_577, max: 1_048_576 }));
    assert!(refusal(&plan).contains("1048577") && plan.candidates.is_empty());
}
