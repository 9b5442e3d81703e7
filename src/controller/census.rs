//! Metrics of all objects, computed when they are scraped: replicas by state and reason, and one series for each object with its
//! conditions. A deleted object has no series. Makes no decision.

use std::collections::BTreeMap;
use std::fmt::{Debug, Error, Formatter};
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet};

use super::metrics::{EDGES, OBJECT, PLAN_DEPTH, REPLICAS, SLOWEST_EDGE};
use super::objects::{Objects, Seen};
use crate::api::{ConditionType, EdgeStatus};
use weightsync_core::membership::{MemberStanding, MembershipView};
use weightsync_core::protocol::{Role, TransportChoice};
use weightsync_net::metrics::Definition;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct Replica {
    state: &'static str,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Name {
    /// Not `namespace`: the scraper gives each series that of the controller's pod.
    object_namespace: String,
    object: String,
}

impl Name {
    fn of(object: &Seen) -> Self {
        Self { object_namespace: object.namespace.clone(), object: object.name.clone() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Edges {
    #[prometheus(flatten)]
    object: Name,
    verdict: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Object {
    #[prometheus(flatten)]
    name: Name,
    ready: String,
    reason: String,
    degraded: String,
    suspended: String,
    transport: String,
}

pub(super) struct Census(pub(super) Arc<Objects>);

impl Debug for Census {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Census")
    }
}

impl Collector for Census {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let seen = self.0.seen();
        let mut replicas = REPLICAS.encode(&mut encoder)?;
        for (replica, count) in count(seen.iter().map(|object| &object.view)) {
            Definition::gauge_series(&mut replicas, &replica, count)?;
        }
        let depth = seen.iter().map(|object| depth(&object.view)).max().unwrap_or(0);
        PLAN_DEPTH.encode(&mut encoder)?.encode_gauge(&depth)?;
        let mut edges = EDGES.encode(&mut encoder)?;
        for object in &seen {
            for (verdict, count) in verdicts(object) {
                Definition::gauge_series(&mut edges, &Edges { object: Name::of(object), verdict }, count)?;
            }
        }
        let mut slowest = SLOWEST_EDGE.encode(&mut encoder)?;
        for (object, rate) in seen.iter().filter_map(|object| Some((object, slowest_edge(object)?))) {
            Definition::gauge_series(&mut slowest, &Name::of(object), rate)?;
        }
        let mut objects = OBJECT.encode(&mut encoder)?;
        for object in &seen {
            Definition::gauge_series(&mut objects, &describe(object), 1)?;
        }
        Ok(())
    }
}

fn count<'a>(views: impl Iterator<Item = &'a MembershipView>) -> BTreeMap<Replica, i64> {
    let mut counts = BTreeMap::new();
    for member in views.flat_map(|view| &view.members).filter(|member| member.role == Role::Rollout) {
        let replica = Replica { state: member.standing.as_str(), reason: member.reason.as_str() };
        *counts.entry(replica).or_default() += 1;
    }
    counts
}

fn edges(object: &Seen) -> impl Iterator<Item = &EdgeStatus> {
    object.status.iter().filter_map(|status| status.preflight.as_ref()).flat_map(|preflight| &preflight.edges)
}

/// Edges of the last pre-flight by verdict; empty without one.
fn verdicts(object: &Seen) -> BTreeMap<&'static str, i64> {
    let mut counts = BTreeMap::new();
    for edge in edges(object) {
        *counts.entry(edge.verdict.label()).or_default() += 1;
    }
    counts
}

/// Bytes a second of its slowest verified edge.
fn slowest_edge(object: &Seen) -> Option<i64> {
    edges(object).filter_map(|edge| edge.bytes_per_second).min()
}

/// Length of the chain of a committed group, in rollouts.
fn depth(view: &MembershipView) -> i64 {
    let chained = view.committed && view.transport.as_ref().is_none_or(|transport| transport.name() == "tcp");
    let in_group = |standing| !matches!(standing, MemberStanding::Out | MemberStanding::Waiting | MemberStanding::Forming);
    let rollouts = view.members.iter().filter(|member| member.role == Role::Rollout && in_group(member.standing)).count();
    if chained { i64::try_from(rollouts).unwrap_or(i64::MAX) } else { 0 }
}

fn describe(object: &Seen) -> Object {
    let condition = |kind: ConditionType| {
        let conditions = object.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        conditions.iter().find(|condition| condition.type_ == kind.as_str())
    };
    let status = |kind| condition(kind).map_or_else(|| "Unknown".to_owned(), |condition| condition.status.clone());
    Object {
        name: Name::of(object),
        ready: status(ConditionType::Ready),
        reason: condition(ConditionType::Ready).map(|condition| condition.reason.clone()).unwrap_or_default(),
        degraded: status(ConditionType::Degraded),
        suspended: object.suspended.to_string(),
        transport: object.view.transport.as_ref().map_or("none", TransportChoice::name).to_owned(),
    }
}

#[cfg(test)]
mod tests;
