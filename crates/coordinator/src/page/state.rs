//! The JSON of the web page. Bounded in objects, members, attempts and events; counts include the rest.

use serde::Serialize;

use super::{Attempt, RecentEvent};
use weightsync_core::membership::MembershipView;
use weightsync_core::protocol::{Received, Role, TransportChoice};

/// Objects that are shown.
const OBJECTS: usize = 200;
/// Members of one object that are shown.
const MEMBERS: usize = 64;

/// One object as the page shows it.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct PageObject {
    pub namespace: String,
    pub name: String,
    pub suspended: bool,
    pub conditions: Vec<PageCondition>,
    pub view: MembershipView,
    /// The last updates, the latest first.
    pub updates: Vec<Attempt>,
    /// The last events, the latest first.
    pub events: Vec<RecentEvent>,
}

/// A condition of an object.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct PageCondition {
    pub r#type: String,
    pub status: String,
    pub reason: String,
    pub message: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct State {
    /// Version of the program.
    program: &'static str,
    pod: String,
    /// Whether it leads; a controller that does not lead shows no objects.
    leads: bool,
    /// Objects in all.
    total: usize,
    objects: Vec<Object>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Object {
    namespace: String,
    name: String,
    suspended: bool,
    epoch: u64,
    world_size: u32,
    version: Option<u64>,
    transport: Option<String>,
    transport_reason: Option<String>,
    ready: u32,
    min_ready: u32,
    total: u32,
    conditions: Vec<PageCondition>,
    members: Vec<Member>,
    updates: Vec<Attempt>,
    events: Vec<RecentEvent>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Member {
    name: String,
    /// Whether it makes versions.
    source: bool,
    /// The node of its first pod, if known.
    node: Option<String>,
    state: &'static str,
    rank_offset: Option<u32>,
    size: u32,
    version: Option<u64>,
    /// Bytes a second of the last version that it received, and the member that sent it.
    rate: Option<u64>,
    from: Option<String>,
    /// How those bytes travelled.
    by: Option<&'static str>,
    reason: &'static str,
    message: String,
}

impl State {
    /// The state of a server with these objects; none before it leads.
    pub(super) fn of(server: &str, seen: Option<Vec<PageObject>>) -> Self {
        let leads = seen.is_some();
        let seen = seen.unwrap_or_default();
        Self {
            program: env!("CARGO_PKG_VERSION"),
            pod: server.to_owned(),
            leads,
            total: seen.len(),
            objects: seen.into_iter().take(OBJECTS).map(object).collect(),
        }
    }
}

fn object(seen: PageObject) -> Object {
    let view = seen.view;
    Object {
        namespace: seen.namespace,
        name: seen.name,
        suspended: seen.suspended,
        epoch: view.epoch,
        world_size: view.world_size,
        version: view.version.map(|held| held.version),
        transport: view.transport.as_ref().map(|transport| TransportChoice::name(transport).to_owned()),
        transport_reason: view.transport.map(|transport| transport.reason),
        ready: view.ready,
        min_ready: view.min_ready,
        total: view.total,
        conditions: seen.conditions,
        members: view
            .members
            .into_iter()
            .take(MEMBERS)
            .map(|member| Member {
                name: member.name.to_string(),
                source: member.role == Role::Source,
                node: member.pods.first().and_then(|pod| pod.node.clone()),
                state: member.standing.as_str(),
                rank_offset: member.rank_offset,
                size: member.size,
                version: member.installed.map(|held| held.version),
                rate: member.received.as_ref().map(Received::rate),
                by: member.received.as_ref().map(|received| received.by.as_str()),
                from: member.received.map(|received| received.from.0),
                reason: member.reason.as_str(),
                message: member.message,
            })
            .collect(),
        updates: seen.updates,
        events: seen.events,
    }
}
