//! The order of rollouts in a chain by the rates of its edges, and the edges that must be measured for that.
//!
//! A chain is as fast as its slowest edge, because members keep only a few pieces. So a member with a slow edge goes to the end, where
//! another edge may lead to it. If that one is slow too, the member is reported. Whether it leaves the group is decided elsewhere. Pure: it
//! measures nothing.
//!
//! An edge is slow if it carries less than a quarter of the usual rate. The usual rate is the upper median, over all members, of the
//! fastest edge that each has. The edges of the planned chain count, and the one that closes it to a ring. If nodes differ, only edges
//! between nodes count.

use std::collections::BTreeMap;

use crate::protocol::{Arrangement, EdgeOutcome, MemberName, PoorMember};

/// An edge that carries less than one part in so many of the usual rate is slow.
pub const SLOW_PART: u64 = 4;

/// The known edges.
pub trait Edges {
    /// The measurement from one member to another; `None` if there is none.
    fn outcome(&self, from: &MemberName, to: &MemberName) -> Option<&EdgeOutcome>;

    /// Whether the two run on one node.
    fn on_one_node(&self, from: &MemberName, to: &MemberName) -> bool;
}

/// The next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// This edge must be measured first: sender and receiver.
    Measure(MemberName, MemberName),
    /// The order.
    Arranged(Arrangement),
}

/// Orders the rollouts of a chain that the source feeds. Requests the edges of the planned order, then as few others as it needs.
pub fn arrange(source: &MemberName, rollouts: &[MemberName], edges: &impl Edges) -> Next {
    match arranged(source, rollouts, edges) {
        Ok(arrangement) => Next::Arranged(arrangement),
        Err((from, to)) => Next::Measure(from, to),
    }
}

/// A rate in bytes a second, as text.
pub fn show_rate(rate: u64) -> String {
    match rate {
        rate if rate >= 1_000_000_000 => format!("{}.{:02} GB/s", rate / 1_000_000_000, rate / 10_000_000 % 100),
        rate if rate >= 1_000_000 => format!("{}.{} MB/s", rate / 1_000_000, rate / 100_000 % 10),
        rate => format!("{} kB/s", rate / 1_000),
    }
}

/// An edge without a measurement.
type Unknown = (MemberName, MemberName);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Broken,
    Slow(u64),
    Good,
}

struct Judge<'a, E> {
    edges: &'a E,
    /// `None`: there is nothing to compare with.
    usual: Option<u64>,
}

impl<E: Edges> Judge<'_, E> {
    fn verdict(&self, from: &MemberName, to: &MemberName) -> Result<Verdict, Unknown> {
        Ok(match self.edges.outcome(from, to) {
            None => return Err((from.clone(), to.clone())),
            Some(EdgeOutcome::Broken { .. }) => Verdict::Broken,
            Some(EdgeOutcome::Unmeasured { .. }) => Verdict::Good,
            Some(EdgeOutcome::Verified(figures)) => match self.usual {
                Some(usual) if figures.rate().saturating_mul(SLOW_PART) < usual => Verdict::Slow(figures.rate()),
                _ => Verdict::Good,
            },
        })
    }

    fn is_good(&self, from: &MemberName, to: &MemberName) -> Result<bool, Unknown> {
        Ok(self.verdict(from, to)? == Verdict::Good)
    }
}

fn arranged(source: &MemberName, rollouts: &[MemberName], edges: &impl Edges) -> Result<Arrangement, Unknown> {
    let judge = Judge { edges, usual: usual(source, rollouts, edges)? };
    let mut order: Vec<&MemberName> = Vec::new();
    let mut aside: Vec<&MemberName> = Vec::new();
    for member in rollouts {
        let before = order.last().copied().unwrap_or(source);
        if judge.is_good(before, member)? {
            order.push(member);
            continue;
        }
        // Either end may be at fault. The sender is, if this member is fast when the sender's predecessor feeds it.
        let earlier = order.len().checked_sub(2).and_then(|at| order.get(at).copied()).unwrap_or(source);
        if before != source && judge.is_good(earlier, member)? {
            aside.extend(order.pop());
            order.push(member);
        } else {
            aside.push(member);
        }
    }
    if order.is_empty() {
        // All edges of the source are slow: the source is at fault, and no order helps.
        let Some(first) = rollouts.first() else { return Ok(Arrangement::default()) };
        let source = Some(poor_member((judge.verdict(source, first)?, source, first), source, &judge));
        return Ok(Arrangement { order: rollouts.to_vec(), source, ..Arrangement::default() });
    }
    let (mut moved, mut poor) = (Vec::new(), Vec::new());
    for member in aside {
        let before = order.last().copied().unwrap_or(source);
        match judge.verdict(before, member)? {
            Verdict::Good => {
                order.push(member);
                moved.push(member.clone());
            }
            verdict => poor.push((verdict, before, member)),
        }
    }
    // The slowest of several goes last: a member that takes no bytes must not come before any other.
    poor.sort_by_key(|(verdict, ..)| std::cmp::Reverse(*verdict));
    let mut order: Vec<MemberName> = order.into_iter().cloned().collect();
    order.extend(poor.iter().map(|(_, _, member)| (*member).clone()));
    let poor = poor.into_iter().map(|edge| poor_member(edge, edge.2, &judge)).collect();
    Ok(Arrangement { order, moved, poor, source: None })
}

/// The member at fault for an edge.
fn poor_member(
    (verdict, from, to): (Verdict, &MemberName, &MemberName),
    at_fault: &MemberName,
    judge: &Judge<'_, impl Edges>,
) -> PoorMember {
    let broken = verdict == Verdict::Broken;
    PoorMember { member: at_fault.clone(), from: from.clone(), broken, why: why(judge, from, to, verdict) }
}

fn why(judge: &Judge<'_, impl Edges>, from: &MemberName, to: &MemberName, verdict: Verdict) -> String {
    match (verdict, judge.edges.outcome(from, to)) {
        (Verdict::Slow(rate), _) => {
            let usual = judge.usual.map(show_rate).unwrap_or_default();
            format!("the edge from {from} to {to} carries {}, others carry {usual}", show_rate(rate))
        }
        (_, Some(EdgeOutcome::Broken { cause })) => format!("the edge from {from} to {to} does not carry bytes: {cause}"),
        _ => String::new(),
    }
}

/// The usual rate; `None` with fewer than two rollouts to compare, or without measurements.
fn usual(source: &MemberName, rollouts: &[MemberName], edges: &impl Edges) -> Result<Option<u64>, Unknown> {
    let Some(last) = rollouts.last().filter(|_| rollouts.len() > 1) else {
        if let Some(only) = rollouts.first() {
            known(edges, source, only)?;
        }
        return Ok(None);
    };
    let planned = std::iter::once(source).chain(rollouts).zip(rollouts);
    // The ring is closed. Otherwise, with two members, one would be judged by a single sender, which may be the slow one.
    let looked_at: Vec<(&MemberName, &MemberName)> = planned.chain([(source, last)]).collect();
    let mut all: BTreeMap<&MemberName, u64> = BTreeMap::new();
    let mut between_nodes: BTreeMap<&MemberName, u64> = BTreeMap::new();
    for (from, to) in looked_at {
        let EdgeOutcome::Verified(figures) = known(edges, from, to)? else { continue };
        let rate = figures.rate();
        for end in [from, to] {
            all.entry(end).and_modify(|best| *best = rate.max(*best)).or_insert(rate);
            if !edges.on_one_node(from, to) {
                between_nodes.entry(end).and_modify(|best| *best = rate.max(*best)).or_insert(rate);
            }
        }
    }
    let best = if between_nodes.is_empty() { all } else { between_nodes };
    let mut rates: Vec<u64> = best.into_values().collect();
    rates.sort_unstable();
    Ok(rates.get(rates.len() / 2).copied())
}

fn known<'a>(edges: &'a impl Edges, from: &MemberName, to: &MemberName) -> Result<&'a EdgeOutcome, Unknown> {
    edges.outcome(from, to).ok_or_else(|| (from.clone(), to.clone()))
}

#[cfg(test)]
mod tests;
