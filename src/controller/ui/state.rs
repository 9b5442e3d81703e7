//! The JSON of the web page. Bounded in objects, members and attempts; counts include the rest.

use serde::Serialize;

use crate::api::{ConditionType, MAX_MEMBERS};
use crate::controller::census::word;
use crate::controller::history::Attempt;
use crate::controller::objects::Seen;
use weightsync_core::protocol::{Received, TransportChoice};

/// Objects that are shown.
const OBJECTS: usize = 200;

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
    conditions: Vec<Condition>,
    members: Vec<Member>,
    updates: Vec<Attempt>,
}

#[derive(Debug, Serialize)]
struct Condition {
    r#type: String,
    status: String,
    reason: String,
    message: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Member {
    name: String,
    state: &'static str,
    rank_offset: Option<u32>,
    size: u32,
    version: Option<u64>,
    /// Bytes a second of the last version that it received, and the member that sent it.
    rate: Option<u64>,
    from: Option<String>,
    reason: &'static str,
    message: String,
}

impl State {
    /// The state of a controller in `pod` with these objects; none before it leads.
    pub(super) fn of(pod: &str, seen: Option<Vec<Seen>>) -> Self {
        let leads = seen.is_some();
        let seen = seen.unwrap_or_default();
        Self {
            program: env!("CARGO_PKG_VERSION"),
            pod: pod.to_owned(),
            leads,
            total: seen.len(),
            objects: seen.into_iter().take(OBJECTS).map(object).collect(),
        }
    }
}

fn object(seen: Seen) -> Object {
    let conditions = seen.status.map(|status| status.conditions).unwrap_or_default();
    let shown = |kind: &ConditionType| {
        let condition = conditions.iter().find(|condition| condition.type_ == kind.as_str())?;
        Some(Condition {
            r#type: condition.type_.clone(),
            status: condition.status.clone(),
            reason: condition.reason.clone(),
            message: condition.message.clone(),
        })
    };
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
        conditions: ConditionType::ALL.iter().filter_map(shown).collect(),
        members: view
            .members
            .into_iter()
            .take(MAX_MEMBERS)
            .map(|member| Member {
                name: member.name.to_string(),
                state: word(member.standing),
                rank_offset: member.rank_offset,
                size: member.size,
                version: member.installed.map(|held| held.version),
                rate: member.received.as_ref().map(Received::rate),
                from: member.received.map(|received| received.from.0),
                reason: member.reason.as_str(),
                message: member.message,
            })
            .collect(),
        updates: seen.history,
    }
}
