use std::collections::BTreeMap;

use super::*;
use crate::protocol::EdgeFigures;

/// A network in which each member sends and receives at its own rate in MB/s, and some pairs at another rate.
struct Network {
    sends: BTreeMap<&'static str, u64>,
    receives: BTreeMap<&'static str, u64>,
    pairs: BTreeMap<(&'static str, &'static str), u64>,
    nodes: BTreeMap<&'static str, &'static str>,
    measured: BTreeMap<(MemberName, MemberName), EdgeOutcome>,
}

const USUAL: u64 = 1_000;

fn name(name: &str) -> MemberName {
    MemberName(name.to_owned())
}

impl Network {
    fn new() -> Self {
        let (sends, receives) = (BTreeMap::new(), BTreeMap::new());
        Self { sends, receives, pairs: BTreeMap::new(), nodes: BTreeMap::new(), measured: BTreeMap::new() }
    }

    fn rate(&self, from: &str, to: &str) -> u64 {
        let own = self.pairs.iter().find(|((one, other), _)| *one == from && *other == to).map(|(_, rate)| *rate);
        own.unwrap_or_else(|| {
            let [sends, receives] = [(&self.sends, from), (&self.receives, to)].map(|(of, who)| of.get(who).copied().unwrap_or(USUAL));
            sends.min(receives)
        })
    }

    /// Measures the requested edges until there is an order, and counts the measurements.
    fn arrange(&mut self, rollouts: &[&str]) -> (Arrangement, usize) {
        let names: Vec<MemberName> = rollouts.iter().copied().map(name).collect();
        for count in 0..100 {
            match arrange(&name("source"), &names, self) {
                Next::Arranged(arrangement) => return (arrangement, count),
                Next::Measure(from, to) => {
                    let outcome = match self.rate(&from.0, &to.0) {
                        0 => EdgeOutcome::Broken { cause: "no byte".to_owned() },
                        rate => EdgeOutcome::Verified(EdgeFigures {
                            bytes: rate * 1_000_000,
                            nanoseconds: 1_000_000_000,
                            round_trip_us: None,
                            mtu: None,
                            clock_ms: None,
                        }),
                    };
                    assert!(self.measured.insert((from, to), outcome).is_none(), "measured twice");
                }
            }
        }
        panic!("it never ends");
    }
}

impl Edges for Network {
    fn outcome(&self, from: &MemberName, to: &MemberName) -> Option<&EdgeOutcome> {
        self.measured.get(&(from.clone(), to.clone()))
    }

    fn on_one_node(&self, from: &MemberName, to: &MemberName) -> bool {
        let [from, to] = [from, to].map(|member| self.nodes.get(member.0.as_str()));
        from.is_some() && from == to
    }
}

fn order(arrangement: &Arrangement) -> Vec<&str> {
    arrangement.order.iter().map(|name| name.0.as_str()).collect()
}

fn poor(arrangement: &Arrangement) -> Vec<&str> {
    arrangement.poor.iter().map(|poor| poor.member.0.as_str()).collect()
}

#[test]
fn equal_edges_keep_the_planned_order() {
    let (arrangement, count) = Network::new().arrange(&["a", "b", "c", "d"]);
    assert_eq!(order(&arrangement), ["a", "b", "c", "d"]);
    assert_eq!(arrangement, Arrangement { order: arrangement.order.clone(), ..Arrangement::default() });
    // The four planned ones, and the one that closes the ring.
    assert_eq!(count, 5);
}

#[test]
fn member_with_a_slow_link_is_last_and_named() {
    for rollouts in [&["a", "b"][..], &["a", "b", "c"], &["a", "b", "c", "d", "e", "f", "g", "h"]] {
        for slow in rollouts {
            for (sends, receives) in [(USUAL, 100), (100, 100)] {
                let mut network = Network::new();
                network.sends.insert(slow, sends);
                network.receives.insert(slow, receives);
                let (arrangement, count) = network.arrange(rollouts);
                assert_eq!(arrangement.order.last(), Some(&name(slow)), "{rollouts:?}");
                assert_eq!(poor(&arrangement), [*slow], "{rollouts:?}");
                let why = &arrangement.poor[0].why;
                assert!(why.contains("100.0 MB/s") && why.contains("1.00 GB/s") && why.contains(&arrangement.poor[0].from.0), "{why}");
                assert!(count <= rollouts.len() + 5, "{count}");
            }
        }
    }
}

#[test]
fn member_that_sends_slowly_is_last_and_stays() {
    for slow in ["a", "b", "c"] {
        let mut network = Network::new();
        network.sends.insert(slow, 100);
        let (arrangement, _) = network.arrange(&["a", "b", "c", "d"]);
        assert_eq!(arrangement.order.last(), Some(&name(slow)));
        assert_eq!((arrangement.moved, arrangement.poor), (vec![name(slow)], Vec::new()));
    }
}

#[test]
fn one_slow_pair_is_kept_apart() {
    let mut network = Network::new();
    network.pairs.insert(("b", "c"), 10);
    let (arrangement, _) = network.arrange(&["a", "b", "c", "d"]);
    assert_eq!(order(&arrangement), ["a", "c", "d", "b"]);
    assert_eq!(arrangement.poor, []);
}

#[test]
fn broken_edge_is_named_with_both_members() {
    let mut network = Network::new();
    network.receives.insert("b", 0);
    let (arrangement, _) = network.arrange(&["a", "b", "c"]);
    assert_eq!(order(&arrangement), ["a", "c", "b"]);
    let [poor] = arrangement.poor.as_slice() else { panic!("{arrangement:?}") };
    assert!(poor.broken);
    assert_eq!(poor.why, "the edge from c to b does not carry bytes: no byte");
}

#[test]
fn slow_source_moves_no_rollout_and_is_named() {
    let mut network = Network::new();
    network.sends.insert("source", 100);
    let (arrangement, _) = network.arrange(&["a", "b", "c"]);
    assert_eq!(order(&arrangement), ["a", "b", "c"]);
    assert_eq!((arrangement.moved, arrangement.poor), (Vec::new(), Vec::new()));
    assert_eq!(arrangement.source.unwrap().member, name("source"));
}

#[test]
fn edges_within_a_node_do_not_make_others_slow() {
    let mut network = Network::new();
    network.nodes.extend([("source", "n1"), ("a", "n1"), ("b", "n2"), ("c", "n2"), ("d", "n3"), ("e", "n3")]);
    for (from, to) in [("source", "a"), ("b", "c"), ("d", "e")] {
        network.pairs.insert((from, to), 20 * USUAL);
    }
    let (arrangement, _) = network.arrange(&["a", "b", "c", "d", "e"]);
    assert_eq!(arrangement, Arrangement { order: arrangement.order.clone(), ..Arrangement::default() });
}

#[test]
fn slow_majority_is_what_is_usual() {
    let mut network = Network::new();
    for slow in ["a", "b", "c"] {
        network.receives.insert(slow, 100);
        network.sends.insert(slow, 100);
    }
    let (arrangement, _) = network.arrange(&["a", "b", "c", "d"]);
    assert_eq!(order(&arrangement), ["a", "b", "c", "d"]);
    assert_eq!(arrangement.poor, []);
}

#[test]
fn edge_of_an_earlier_agent_judges_no_member() {
    let mut network = Network::new();
    network.measured.insert((name("a"), name("b")), EdgeOutcome::Unmeasured { cause: "not known".to_owned() });
    let (arrangement, _) = network.arrange(&["a", "b", "c"]);
    assert_eq!(order(&arrangement), ["a", "b", "c"]);
    assert_eq!(arrangement.poor, []);
}

#[test]
fn edge_is_slow_below_a_fourth_of_the_usual_rate() {
    for (rate, slow) in [(USUAL / 4, &[][..]), (USUAL / 4 - 1, &["c"])] {
        let mut network = Network::new();
        network.receives.insert("c", rate);
        let (arrangement, _) = network.arrange(&["a", "b", "c", "d", "e"]);
        assert_eq!(poor(&arrangement), slow, "{rate}");
    }
}

#[test]
fn rates_are_shown_in_the_largest_unit_that_they_reach() {
    for (rate, text) in [
        (999, "0 kB/s"),
        (999_999, "999 kB/s"),
        (1_000_000, "1.0 MB/s"),
        (999_999_999, "999.9 MB/s"),
        (1_000_000_000, "1.00 GB/s"),
        (12_340_000_000, "12.34 GB/s"),
    ] {
        assert_eq!(show_rate(rate), text);
    }
}
