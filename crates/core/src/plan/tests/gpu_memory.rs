//! The ring on each GPU: a table, and properties of every choice.

use proptest::prelude::*;

use crate::plan::{GpuNeed, GpuRing, GpuRoom, NCCL_ESTIMATE, NoRing, RingLoad, RingWish, gpu_ring, slots_with_copies};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn room(free: u64) -> GpuRoom {
    GpuRoom { gpu: "actors/a-0 GPU-1".to_owned(), free, total: 140 * GIB }
}

fn of(bytes: u64) -> RingLoad {
    RingLoad { bytes, largest: 0 }
}

/// Whether a ring of exactly this shape fits on one GPU.
fn fits(ring: &GpuRing, room: &GpuRoom) -> Result<(), NoRing> {
    let wish = RingWish { slots: Some(ring.slots), slot_bytes: Some(ring.slot_bytes) };
    gpu_ring(wish, of(0), std::slice::from_ref(room)).map(|choice| assert_eq!(choice.ring, *ring))
}

#[test]
fn default_ring_follows_model_and_tightest_gpu() {
    let cases = [
        // The GPUs are unknown, or have enough memory: at most a quarter of the model.
        (of(5 * GIB), None, (3, GIB)),
        (of(5 * GIB), Some(20 * GIB), (3, GIB)),
        (of(70 * GIB), Some(100 * GIB), (3, GIB)),
        (of(3 * GIB), Some(20 * GIB), (3, 512 * MIB)),
        (of(4 * MIB), Some(20 * GIB), (3, MIB)),
        (of(0), None, (3, MIB)),
        // Half of the free memory, without NCCL's share: fewer slots come before shorter ones.
        (of(5 * GIB), Some(5 * GIB), (2, GIB)),
        (of(5 * GIB), Some(4 * GIB), (3, 512 * MIB)),
        (of(5 * GIB), Some(GIB), (2, 128 * MIB)),
        // A tensor that must be handed over in one piece.
        (RingLoad { bytes: 5 * GIB, largest: 1_200_000_000 }, Some(20 * GIB), (3, 1145 * MIB)),
        (RingLoad { bytes: 5 * GIB, largest: 300 * MIB }, Some(20 * GIB), (3, GIB)),
        (RingLoad { bytes: 5 * GIB, largest: 300 * MIB }, Some(2 * GIB), (2, 512 * MIB)),
    ];
    for (load, free, (slots, slot_bytes)) in cases {
        let rooms: Vec<_> = free.map(room).into_iter().collect();
        let choice = gpu_ring(RingWish::default(), load, &rooms).unwrap();
        assert_eq!(choice.ring, GpuRing { slots, slot_bytes }, "{load:?} {free:?}: {}", choice.why);
    }
}

#[test]
fn what_the_object_says_is_kept_or_refused_with_both_numbers() {
    let wish = RingWish { slots: Some(4), slot_bytes: Some(256 * MIB) };
    let choice = gpu_ring(wish, of(5 * GIB), &[room(2 * GIB), room(3 * GIB)]).unwrap();
    assert_eq!(choice.ring, GpuRing { slots: 4, slot_bytes: 256 * MIB });
    assert!(choice.why.contains("as the object says") && choice.why.contains("2 GiB of 140 GiB"), "{}", choice.why);
    let refused = gpu_ring(wish, of(5 * GIB), &[room(3 * GIB), room(GIB)]).unwrap_err().to_string();
    for word in ["actors/a-0 GPU-1", "1.5 GiB are needed", "4 slots of 256 MiB", "512 MiB for NCCL", "1 GiB of 140 GiB are free"] {
        assert!(refused.contains(word), "{word}: {refused}");
    }
    assert_eq!(gpu_ring(RingWish { slots: Some(0), slot_bytes: None }, of(1), &[]), Err(NoRing::Empty));
    assert_eq!(gpu_ring(RingWish { slots: None, slot_bytes: Some(0) }, of(1), &[]), Err(NoRing::Empty));
    let short = RingWish { slots: None, slot_bytes: Some(MIB) };
    let refused = gpu_ring(short, RingLoad { bytes: GIB, largest: MIB + 1 }, &[]).unwrap_err().to_string();
    assert!(refused.contains("a slot of 1 MiB") && refused.contains("at least 2 MiB"), "{refused}");
}

/// sgl-project/sglang#10597, THUDM/slime#669: out of memory in an update; NCCL's buffers were not counted.
/// Story F64.
#[test]
fn gpu_without_room_is_refused_before_allocation() {
    let ring = GpuRing { slots: 2, slot_bytes: GIB };
    let exact = 2 * GIB + NCCL_ESTIMATE;
    assert_eq!(fits(&ring, &room(exact)), Ok(()));
    let refused = fits(&ring, &room(exact - 1)).unwrap_err();
    assert!(refused.to_string().contains("2.5 GiB are needed"), "{refused}");
    // An engine took 95 % of its GPU and left less than NCCL needs.
    let refused = gpu_ring(RingWish::default(), of(16 * GIB), &[room(NCCL_ESTIMATE)]).unwrap_err();
    assert!(matches!(refused, NoRing::TooLittle { free: NCCL_ESTIMATE, .. }), "{refused}");
    let need = GpuNeed::of(&ring);
    assert_eq!(need.total(), need.ring + need.nccl + need.context);
}

#[test]
fn the_last_room_is_used_where_nothing_smaller_works() {
    let load = RingLoad { bytes: 5 * GIB, largest: GIB };
    let choice = gpu_ring(RingWish::default(), load, &[room(3 * GIB)]).unwrap();
    assert_eq!(choice.ring, GpuRing { slots: 2, slot_bytes: GIB }, "more than half, but a whole tensor needs it");
    assert!(gpu_ring(RingWish::default(), load, &[room(2 * GIB)]).is_err());
}

proptest! {
    #[test]
    fn chosen_ring_fits_gpus_largest_tensor_and_wishes(
        bytes in 0_u64..200 * GIB,
        largest in 0_u64..2 * GIB,
        frees in proptest::collection::vec(0_u64..140 * GIB, 0..5),
        slots in proptest::option::of(1_u32..16),
        slot_bytes in proptest::option::of(1_u64..4 * GIB),
    ) {
        let wish = RingWish { slots, slot_bytes };
        let rooms: Vec<_> = frees.iter().copied().map(room).collect();
        match gpu_ring(wish, RingLoad { bytes, largest }, &rooms) {
            Ok(choice) => {
                for room in &rooms {
                    prop_assert_eq!(fits(&choice.ring, room), Ok(()));
                }
                prop_assert!(choice.ring.slot_bytes >= largest);
                prop_assert!(slots.is_none_or(|slots| slots == choice.ring.slots));
                prop_assert!(slot_bytes.is_none_or(|bytes| bytes == choice.ring.slot_bytes));
                // Never the whole model, unless it is tiny, its largest tensor needs that, or the user requests it.
                let asked = slots.is_some() || slot_bytes.is_some() || largest > bytes / 4;
                prop_assert!(asked || choice.ring.bytes() < bytes.max(16 * MIB));
            }
            Err(NoRing::SlotTooShort { .. }) => prop_assert!(slot_bytes.is_some_and(|bytes| bytes < largest)),
            Err(NoRing::TooLittle { ring, free, .. }) => {
                prop_assert_eq!(Some(free), frees.iter().copied().min());
                prop_assert!(fits(&ring, &room(free)).is_err(), "refused although it fits");
            }
            Err(NoRing::Empty) => prop_assert!(false, "nothing empty was asked for"),
        }
    }

    #[test]
    fn more_free_memory_never_makes_the_ring_smaller(bytes in 0_u64..100 * GIB, one in 0_u64..20 * GIB, more in 0_u64..20 * GIB) {
        let of = |free| gpu_ring(RingWish::default(), RingLoad { bytes, largest: 0 }, &[room(free)]).map(|choice| choice.ring.bytes());
        if let Ok(tight) = of(one) {
            prop_assert!(of(one + more).is_ok_and(|ring| ring >= tight));
        }
    }
}

#[test]
fn source_with_copied_buckets_gets_more_slots_with_room() {
    let ring = GpuRing { slots: 3, slot_bytes: GIB };
    for (buckets, free, slots) in [
        (6, 120 * GIB, 4),
        (19, 1000 * GIB, 13),
        (6, 48 * GIB, 3),
        (19, 80 * GIB, 5),
        (2, 120 * GIB, 3),
        (0, 0, 3),
        (u32::MAX, u64::MAX, (1 << 30) - 1),
    ] {
        assert_eq!(slots_with_copies(&ring, buckets, free), slots, "{buckets} buckets, {free} bytes free");
    }
    assert_eq!(slots_with_copies(&GpuRing { slots: 2, slot_bytes: 0 }, 9, GIB), 2);
}
