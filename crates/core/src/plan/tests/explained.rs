//! The contents of an explanation.

use super::world::{actor, pool, world};
use crate::plan::{Bandwidth, GpuNeed, GpuRing, MemberMemory, ModelFacts, explain, plan, roster};

const MIB: u64 = 1 << 20;

fn model(bytes: u64) -> ModelFacts {
    ModelFacts {
        tensors: Some(3),
        bytes,
        bucket_bytes: 64 * MIB,
        ring_buckets: 4,
        receive_bytes: 4 * MIB,
        retain_bytes: 1024 * MIB,
        keep: 1,
        gpu_ring: None,
    }
}

fn link(bytes_per_second: u64) -> Bandwidth {
    Bandwidth { name: "link".to_owned(), bytes_per_second }
}

#[test]
fn buckets_and_floors_round_up() {
    let roster = roster(&plan(&world(pool(), (0..4).map(actor))).candidates);
    let explanation = explain(&roster, Some(model(1000 * MIB + 1)), &[link(1000 * MIB), link(0)]);
    assert_eq!(explanation.buckets, Some(16));
    assert_eq!(explanation.floors[0].chain_us, 1_000_001);
    assert_eq!(explanation.floors[0].one_by_one_us, 4_000_001);
    assert!(explanation.floors[1].chain_us > 0, "no speed at all is no division by zero");
}

#[test]
fn memory_report_names_kept_and_drops_what_exceeds_limit() {
    let roster = roster(&plan(&world(pool(), [actor(0)])).candidates);
    let of = |bytes| {
        let members = explain(&roster, Some(model(bytes)), &[]).members;
        members.iter().map(|member| member.memory.unwrap()).collect::<Vec<_>>()
    };
    let both = of(512 * MIB);
    assert_eq!(both[0], MemberMemory { in_flight: 256 * MIB, retained: 1024 * MIB, ..MemberMemory::default() });
    assert_eq!(both[1], MemberMemory { in_flight: 4 * MIB, versions: 1024 * MIB, ..MemberMemory::default() });
    assert_eq!(both[1].total(), 1028 * MIB);
    assert_eq!(of(512 * MIB + 1)[0].retained, 512 * MIB + 1, "the version before is dropped first");
    assert_eq!(of(1024 * MIB + 1)[0].retained, 0);
    assert_eq!((of(MIB)[0].in_flight, of(MIB)[1].in_flight), (64 * MIB, MIB), "no more is on its way than there is");
}

#[test]
fn without_a_model_only_the_order_is_explained() {
    let roster = roster(&plan(&world(pool(), [actor(0), actor(1)])).candidates);
    let explanation = explain(&roster, None, &[link(1)]);
    assert_eq!(explanation.floors, []);
    assert_eq!(explanation.members.iter().map(|member| member.hop).collect::<Vec<_>>(), [None, Some(1), Some(2)]);
    assert_eq!(explanation.world_size, 3);
}

#[test]
fn ring_on_each_gpu_moves_bytes_in_gpu_memory() {
    let roster = roster(&plan(&world(pool(), [actor(0)])).candidates);
    let ring = GpuRing { slots: 3, slot_bytes: 256 * MIB };
    let members = explain(&roster, Some(ModelFacts { gpu_ring: Some(ring), ..model(512 * MIB) }), &[]).members;
    let [source, rollout] = [0, 1].map(|at| members[at].memory.unwrap());
    let need = GpuNeed::of(&ring);
    let gpu = Some(need);
    assert_eq!(source, MemberMemory { retained: 1024 * MIB, pinned: true, gpu, ..MemberMemory::default() });
    assert_eq!(rollout, MemberMemory { versions: 1024 * MIB, gpu, ..MemberMemory::default() });
    assert_eq!(need.ring, 768 * MIB);
}
