//! Sorts replicas as their pool requires, and refuses those that the order cannot place.
//!
//! Each refusal concerns one replica, by name: a pod that is briefly missing must not end the group of the others.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::replicas::{PlacedUnit, Unit};
use super::{LeftOut, LeftOutCode, Order, PodFacts};
use crate::protocol::{MemberName, Role};

/// Sort key of a pod; a pod without a place has none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Key {
    Number(u64),
    Text(String),
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Number(one), Self::Number(two)) => one.cmp(two),
            (Self::Text(one), Self::Text(two)) => one.cmp(two),
            (Self::Number(_), Self::Text(_)) => Ordering::Less,
            (Self::Text(_), Self::Number(_)) => Ordering::Greater,
        }
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Key of a pod by its index, or that it has none.
pub(super) fn by_index(pod: &PodFacts) -> Result<Key, String> {
    match pod.index {
        Some(index) => Ok(Key::Number(u64::from(index))),
        None => Err(format!("pod {} has no index", pod.name)),
    }
}

/// Key of a pod by the value of a label, or that it lacks the label.
pub(super) fn by_label(label: &str, pod: &PodFacts) -> Result<Key, String> {
    match pod.labels.get(label) {
        Some(value) => Ok(value.parse().map_or_else(|_| Key::Text(value.clone()), Key::Number)),
        None => Err(format!("pod {} lacks the label {label} that the order goes by", pod.name)),
    }
}

/// Names that an explicit order lists more than once.
pub(super) fn duplicates(order: &Order) -> Vec<&str> {
    let Order::Explicit(names) = order else { return Vec::new() };
    let mut count: BTreeMap<&str, u32> = BTreeMap::new();
    for name in names {
        *count.entry(name).or_default() += 1;
    }
    count.into_iter().filter(|(_, count)| *count > 1).map(|(name, _)| name).collect()
}

/// Sorts the units of a pool. Adds units without a place to `left_out`, and listed names without a pod.
pub(super) fn sort(pool: &str, order: &Order, units: Vec<Unit<'_>>, present: &[&PodFacts], left_out: &mut Vec<LeftOut>) -> Vec<PlacedUnit> {
    let mut placed: Vec<(Key, PlacedUnit)> = Vec::new();
    let indexed = units.iter().all(|unit| unit.head.index.is_some());
    for unit in units {
        match place(pool, order, indexed, unit.head) {
            Ok(key) => placed.push((key, unit.into())),
            Err((code, message)) => left_out.push(unit.left_out(code, message)),
        }
    }
    if let Order::Explicit(names) = order {
        for name in names.iter().filter(|name| present.iter().all(|pod| pod.name != **name)) {
            left_out.push(LeftOut {
                who: MemberName(format!("{pool}/{name}")),
                role: Role::Rollout,
                pods: Vec::new(),
                code: LeftOutCode::UnknownName,
                message: format!("order.names lists {name}, but pool {pool} selects no pod of that name"),
            });
        }
    }
    placed.sort_by(|(one_key, one), (two_key, two)| (one_key, &one.name, one.port).cmp(&(two_key, &two.name, two.port)));
    placed.into_iter().map(|(_, unit)| unit).collect()
}

/// Key of a replica by its head. `indexed`: every head has an index.
fn place(pool: &str, order: &Order, indexed: bool, head: &PodFacts) -> Result<Key, (LeftOutCode, String)> {
    let missing = |message| (LeftOutCode::OrderKeyMissing, message);
    let names = match order {
        Order::Auto if indexed => return by_index(head).map_err(missing),
        Order::Auto => return Ok(Key::Text(head.name.clone())),
        Order::Label(label) => return by_label(label, head).map_err(missing),
        Order::Explicit(names) => names,
    };
    if !head.stable_name {
        let message = format!(
            "pod {} of pool {pool} gets another name each time it is made, so an explicit order cannot name it: \
             use a StatefulSet or LeaderWorkerSet, or another order",
            head.name
        );
        return Err((LeftOutCode::UnstableName, message));
    }
    if let Some((_, position)) = names.iter().zip(0..).find(|(name, _)| **name == head.name) {
        return Ok(Key::Number(position));
    }
    let message = format!("pool {pool} selects pod {}, but order.names does not list it", head.name);
    Err((LeftOutCode::NotListed, message))
}
