//! Several sources, and parts of the stream for some ranks only.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use crate::plan::{Candidate, Destinations, Need, ShipmentError, roster, shipments};
use crate::protocol::{MemberName, Role, Roster};

fn group(sources: u32, sizes: &[u32]) -> Roster {
    let member = |name: String, role, size| Candidate { name: MemberName(name), role, size, pods: Vec::new(), port: None };
    let sources = (0..sources).map(|index| member(format!("trainer/{index}"), Role::Source, 1));
    let rollouts = sizes.iter().enumerate().map(|(index, size)| member(format!("actors/{index}"), Role::Rollout, *size));
    roster(&sources.chain(rollouts).collect::<Vec<_>>())
}

fn need(offset: u64, bytes: u64, ranks: &[u32]) -> Need {
    Need { offset, bytes, destinations: Destinations::Ranks(ranks.iter().copied().collect()) }
}

#[test]
fn one_source_and_no_needs_give_the_layouts_own_buckets() {
    let shipments = shipments(&group(1, &[2, 2]), 250, 100, &[]).unwrap();
    let cut: Vec<_> = shipments.iter().map(|s| (s.source, s.sequence, s.offset, s.bytes)).collect();
    assert_eq!(cut, [(0, 0, 0, 100), (0, 1, 100, 100), (0, 2, 200, 50)]);
    assert!(shipments.iter().all(|s| s.destinations == Destinations::All));
}

#[test]
fn two_sources_send_one_run_of_the_stream_each_and_count_for_themselves() {
    let shipments = shipments(&group(2, &[1]), 400, 100, &[]).unwrap();
    let cut: Vec<_> = shipments.iter().map(|s| (s.source, s.sequence, s.offset)).collect();
    assert_eq!(cut, [(0, 0, 0), (0, 1, 100), (1, 0, 200), (1, 1, 300)]);
}

#[test]
fn a_part_that_some_ranks_need_goes_to_them_alone() {
    // Ranks 1 and 2 hold one half each of a tensor that lies in bytes 100 to 200.
    let needs = [Need { offset: 0, bytes: 100, destinations: Destinations::All }, need(100, 50, &[1]), need(150, 50, &[2])];
    let shipments = shipments(&group(1, &[2]), 200, 100, &needs).unwrap();
    let cut: Vec<_> = shipments.iter().map(|s| (s.offset, s.bytes, &s.destinations)).collect();
    let (one, two) = (Destinations::Ranks([1].into()), Destinations::Ranks([2].into()));
    assert_eq!(cut, [(0, 100, &Destinations::All), (100, 50, &one), (150, 50, &two)]);
}

#[test]
fn what_cannot_be_shipped_is_named() {
    let two = group(1, &[2]);
    let error = |roster: &Roster, total, bucket, needs: &[Need]| shipments(roster, total, bucket, needs).unwrap_err();
    assert_eq!(error(&group(0, &[1]), 10, 10, &[]), ShipmentError::NoSource);
    assert_eq!(error(&two, 10, 0, &[]), ShipmentError::EmptyBucket);
    assert_eq!(error(&two, 10, 10, &[need(5, 6, &[1])]), ShipmentError::BeyondStream { offset: 5, end: 11, total: 10 });
    let far = ShipmentError::BeyondStream { offset: u64::MAX, end: u128::from(u64::MAX) + 6, total: 10 };
    assert_eq!(error(&two, 10, 10, &[need(u64::MAX, 6, &[1])]), far);
    assert_eq!(error(&two, 10, 10, &[need(0, 1, &[0])]), ShipmentError::UnknownRank { rank: 0 });
    assert_eq!(error(&two, 10, 10, &[need(0, 1, &[3])]), ShipmentError::UnknownRank { rank: 3 });
    let twice = [need(0, 6, &[1, 2]), need(4, 6, &[2])];
    assert_eq!(error(&two, 10, 10, &twice), ShipmentError::Twice { rank: 2, offset: 4 });
}

proptest! {
    #[test]
    fn every_rank_gets_every_byte_that_it_needs_once_and_the_sources_share_the_work(
        sources in 1_u32..4,
        sizes in prop::collection::vec(1_u32..4, 1..4),
        total in 0_u64..300,
        bucket in 1_u64..80,
        // For each rank, the cuts between bytes that it needs and bytes that it does not.
        cuts in prop::collection::vec(prop::collection::btree_set(0_u64..300, 0..6), 12),
    ) {
        let roster = group(sources, &sizes);
        let mut needs = Vec::new();
        let mut wanted: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        for (rank, cuts) in (sources..roster.world_size).zip(&cuts) {
            let cuts: Vec<u64> = cuts.iter().map(|cut| (*cut).min(total)).collect();
            for ends in cuts.chunks(2) {
                if let [start, end] = ends {
                    needs.push(need(*start, end - start, &[rank]));
                    wanted.entry(rank).or_default().extend(*start..*end);
                }
            }
        }
        if needs.is_empty() {
            for rank in sources..roster.world_size {
                wanted.entry(rank).or_default().extend(0..total);
            }
        }
        let shipments = shipments(&roster, total, bucket, &needs).unwrap();
        let mut got: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        let mut load: BTreeMap<u32, u64> = BTreeMap::new();
        let mut sequences: BTreeMap<u32, u32> = BTreeMap::new();
        for shipment in &shipments {
            prop_assert!(shipment.bytes >= 1 && shipment.bytes <= bucket);
            prop_assert_eq!(shipment.offset / bucket, (shipment.offset + shipment.bytes - 1) / bucket, "a bucket crosses a cut");
            let next = sequences.entry(shipment.source).or_default();
            prop_assert_eq!(shipment.sequence, *next);
            *next += 1;
            *load.entry(shipment.source).or_default() += shipment.bytes;
            let ranks: BTreeSet<u32> = match &shipment.destinations {
                Destinations::All => (sources..roster.world_size).collect(),
                Destinations::Ranks(ranks) => ranks.clone(),
            };
            for rank in ranks {
                for byte in shipment.offset..shipment.offset + shipment.bytes {
                    prop_assert!(got.entry(rank).or_default().insert(byte), "rank {} got byte {} twice", rank, byte);
                }
            }
        }
        wanted.retain(|_, bytes| !bytes.is_empty());
        prop_assert_eq!(got, wanted);
        let all: u64 = load.values().sum();
        for source in 0..sources {
            let mine = load.get(&source).copied().unwrap_or(0);
            prop_assert!(mine <= all / u64::from(sources) + bucket + 1, "source {} sends {} of {}", source, mine, all);
        }
    }
}
