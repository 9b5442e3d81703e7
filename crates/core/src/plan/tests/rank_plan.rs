//! Which member has a rank, which is fed on the source's GPU, and which is left out.

use proptest::prelude::*;

use crate::plan::{RankPlan, rank_plan};
use crate::protocol::MemberName;

fn given(members: &[(&str, &[&str])]) -> RankPlan {
    let named: Vec<(MemberName, Vec<String>)> =
        members.iter().map(|(name, gpus)| (MemberName((*name).into()), gpus.iter().map(|gpu| (*gpu).to_owned()).collect())).collect();
    rank_plan(&named.iter().map(|(name, gpus)| (name, gpus.clone())).collect::<Vec<_>>())
}

fn names(members: &[MemberName]) -> Vec<&str> {
    members.iter().map(|name| name.0.as_str()).collect()
}

#[test]
fn members_on_gpus_of_their_own_have_a_rank_for_each_of_them() {
    let rank_plan = given(&[("trainer", &["0"]), ("a", &["1", "2"]), ("b", &["3"])]);
    assert_eq!(rank_plan.ranks.iter().map(|(_, gpus)| gpus.len()).collect::<Vec<_>>(), [1, 2, 1]);
    assert!(rank_plan.guests.is_empty() && rank_plan.out.is_empty());
}

#[test]
fn an_engine_on_the_sources_gpu_has_no_rank_and_is_fed_there() {
    let rank_plan = given(&[("trainer", &["0"]), ("a", &["0"]), ("b", &["1"])]);
    assert_eq!(rank_plan.ranks.iter().map(|(name, _)| name.0.as_str()).collect::<Vec<_>>(), ["trainer", "b"]);
    assert_eq!(names(&rank_plan.guests), ["a"]);
    let two = given(&[("trainer", &["0"]), ("a", &["0"]), ("b", &["0"])]);
    assert_eq!((two.ranks.len(), names(&two.guests)), (1, vec!["a", "b"]));
}

#[test]
fn member_that_could_not_be_fed_is_left_out_with_the_reason() {
    let half = given(&[("trainer", &["0"]), ("a", &["0", "1"])]);
    assert!(half.guests.is_empty());
    assert!(half.out[&MemberName("a".into())].contains("a GPU of its own"), "{half:?}");
    let engines = given(&[("trainer", &["0"]), ("a", &["1"]), ("b", &["1"])]);
    assert!(engines.out[&MemberName("b".into())].contains("as a is"), "{engines:?}");
    let all = given(&[("trainer", &["0", "1"]), ("a", &["0", "1"])]);
    assert_eq!(all.out.len(), 1, "a source has one GPU");
}

proptest! {
    #[test]
    fn every_member_is_seated_once_and_no_gpu_twice(gpus in proptest::collection::vec(proptest::collection::btree_set(0..6_u8, 1..3), 1..7)) {
        let members: Vec<(MemberName, Vec<String>)> =
            gpus.iter().enumerate().map(|(at, gpus)| (MemberName(format!("m{at}")), gpus.iter().map(u8::to_string).collect())).collect();
        let rank_plan = rank_plan(&members.iter().map(|(name, gpus)| (name, gpus.clone())).collect::<Vec<_>>());
        prop_assert_eq!(rank_plan.ranks.len() + rank_plan.guests.len() + rank_plan.out.len(), members.len());
        let mut taken: Vec<&String> = rank_plan.ranks.iter().flat_map(|(_, gpus)| gpus).collect();
        let count = taken.len();
        taken.sort();
        taken.dedup();
        prop_assert_eq!(taken.len(), count);
        prop_assert_eq!(&rank_plan.ranks[0].0, &members[0].0);
        for guest in &rank_plan.guests {
            let gpus = &members.iter().find(|(name, _)| name == guest).unwrap().1;
            prop_assert_eq!(gpus, &members[0].1);
        }
    }
}
