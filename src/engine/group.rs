//! Groups that an engine joins by itself: what its server says about that, and the calls by which it joins, receives and leaves.
//!
//! The third way into an engine beside a directory and this agent's GPU memory, under the same rules: the engine is marked before a weight is
//! touched, and it runs again only after every bucket was taken and the engine confirmed its last step. The agent moves no byte: the
//! source's GPU worker broadcasts, the engine's own workers receive. An engine that does not answer is never waited for beyond a deadline;
//! whether it is stuck for good is judged by the one token that [`super::Engine::health`] and the end of an install ask for.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};

use super::device::{DeviceBucket, DeviceInstall, DeviceJob, Released};
use super::feed::{Feed, no_form};
use super::http::{EngineHttp, Until};
use super::{EngineError, InstallError};
use crate::protocol::{GroupFacts, GroupPlace};
use crate::torch::{TorchError, dtype_name};
use crate::weights::{Layout, WireBucket};

/// A group to be joined.
#[derive(Clone)]
pub struct GroupJoin {
    /// Its name: of one epoch only.
    pub name: String,
    /// Where.
    pub place: GroupPlace,
    /// First rank of this engine.
    pub offset: u32,
    /// Ranks in all.
    pub world: u32,
}

/// Times of a join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupJoined {
    /// Leaving what it was in before.
    pub cleared: Duration,
    /// The engine's own call.
    pub joined: Duration,
}

/// One engine server as a member of groups. All calls end within the time they are given, and one that changes the engine waits for the one
/// before it.
#[async_trait]
pub trait EngineGroup: Send + Sync {
    /// Asks the server whether and how it can join. What it cannot do is said in [`GroupFacts::why_not`].
    async fn facts(&self, deadline: Duration) -> Result<GroupFacts, EngineError>;

    /// Leaves the group it was in, then joins this one. `Ok` is the engine's own word: for a store it means that its ranks said hello there,
    /// not that a communicator exists.
    async fn join(&self, join: &GroupJoin, deadline: Duration) -> Result<GroupJoined, EngineError>;

    /// Leaves the group that it was in, if any. Rank 0 must have aborted its communicator: leaving is a rendezvous otherwise.
    async fn leave(&self, deadline: Duration) -> Result<(), EngineError>;

    /// Begins an install from the group that it joined last. Nothing is changed before [`DeviceInstall::open`]; places of buckets are empty.
    async fn begin(&self, job: &DeviceJob) -> Result<Box<dyn DeviceInstall>, InstallError>;
}

/// The group calls of one kind of server: paths, bodies and which reply means success. The order is the adapter's.
#[async_trait]
pub(super) trait GroupServer: Send + Sync {
    /// See [`EngineGroup::facts`].
    async fn facts(&self, until: Until) -> Result<GroupFacts, EngineError>;

    /// Leaves the group of that name; an engine that is in none is no error. Without a name: whatever it is in, where that can be said.
    async fn leave(&self, name: Option<&str>, until: Until) -> Result<(), EngineError>;

    /// Joins.
    async fn join(&self, join: &GroupJoin, until: Until) -> Result<(), EngineError>;

    /// Whether it must be paused while it receives; else requests that run are ended before and after as the policy says.
    fn pauses(&self) -> bool {
        true
    }

    /// Opens what an update needs. One that was left open (by a trainer that died) is closed first, and its engine counts as touched.
    async fn open(&self, name: &str, until: Until) -> Result<Box<dyn GroupFeed>, EngineError>;
}

/// One update of one kind of server.
#[async_trait]
pub(super) trait GroupFeed: Send {
    /// Whether somebody else's update was found open and closed: the engine may hold a mixture before anything was sent.
    fn found_open(&self) -> bool;

    /// Has the engine enter the broadcast of these tensors; returns when it says that it took them.
    async fn receive(&mut self, tensors: &Tensors, until: Until) -> Result<(), EngineError>;

    /// The engine's last step.
    async fn close(&mut self, until: Until) -> Result<(), EngineError>;

    /// Closes what is open, so that the next update finds nothing in its way.
    async fn fail(&mut self, until: Until);
}

/// The tensors of one broadcast in torch's words.
pub(super) struct Tensors {
    pub(super) names: Vec<String>,
    /// `bfloat16` and the like.
    pub(super) dtypes: Vec<&'static str>,
    pub(super) shapes: Vec<Vec<u64>>,
}

impl Tensors {
    fn of(layout: &Layout, wire: &WireBucket) -> Result<Self, EngineError> {
        let dtype = dtype_name(wire.dtype).ok_or_else(|| no_form(&TorchError::NoDtype(wire.dtype)))?;
        let entries = wire.tensors.iter().filter_map(|at| layout.entries.get(*at));
        let (names, shapes): (Vec<_>, Vec<_>) = entries.map(|entry| (entry.tensor.name.clone(), entry.tensor.shape.clone())).unzip();
        Ok(Self { dtypes: vec![dtype; names.len()], names, shapes })
    }
}

/// Feeds one engine from its group, bucket by bucket of the layout.
pub(super) struct FromGroup {
    layout: Arc<Layout>,
    feed: Box<dyn GroupFeed>,
    touched: bool,
}

impl FromGroup {
    /// Everything that cannot be sent is refused here, before anything is.
    pub(super) async fn open(server: &dyn GroupServer, name: &str, layout: Arc<Layout>, until: Until) -> Result<Self, EngineError> {
        for bucket in layout.buckets() {
            for wire in layout.wire(&bucket).map_err(|error| unsendable(&error))? {
                Tensors::of(&layout, &wire)?;
            }
        }
        let feed = server.open(name, until).await?;
        let touched = feed.found_open();
        Ok(Self { layout, feed, touched })
    }
}

#[async_trait]
impl Feed for FromGroup {
    async fn bucket(&mut self, bucket: &DeviceBucket, until: Until) -> Result<Released, EngineError> {
        let wire = self.layout.wire(&bucket.bucket).map_err(|error| unsendable(&error))?;
        for wire in wire {
            let tensors = Tensors::of(&self.layout, &wire)?;
            self.touched = true;
            self.feed.receive(&tensors, until).await?;
        }
        Ok(Released::Now)
    }

    fn touched(&self) -> bool {
        self.touched
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        self.feed.close(until).await
    }

    async fn fail(&mut self, _: &str, until: Until) {
        self.feed.fail(until).await;
    }
}

fn unsendable(error: &crate::weights::WireError) -> EngineError {
    EngineError::Unsupported { what: error.to_string(), next_step: "publish from a trainer whose agent has a GPU worker".into() }
}

/// Refuses a kind of engine that joins no groups.
pub(crate) fn no_groups(kind: &str) -> EngineError {
    EngineError::Unsupported {
        what: format!("{kind} joins no group by itself that this agent knows of"),
        next_step: "set spec.delivery to Agent".into(),
    }
}

/// POST that must answer 200 with `field` being exactly `value`.
pub(super) async fn post_ok(
    http: &EngineHttp,
    path: &str,
    body: &Value,
    (field, value): (&str, Value),
    until: Until,
) -> Result<(), EngineError> {
    http.post(path, Some(body), until).await?.json()?.must(field, &value).map(drop)
}

/// Joins a group through its store, as SGLang 0.5.23 and LMDeploy 0.18 do with the same words.
pub(super) async fn join_by_store(http: &EngineHttp, join: &GroupJoin, until: Until) -> Result<(), EngineError> {
    let GroupPlace::Store { address, port } = &join.place else {
        return Err(EngineError::Unsupported {
            what: "this engine joins a group through a store, and was given the communicator's id".into(),
            next_step: "this is a fault of the source's agent: report it".into(),
        });
    };
    let body = json!({
        "master_address": address,
        "master_port": port,
        "rank_offset": join.offset,
        "world_size": join.world,
        "group_name": join.name,
        "backend": "nccl",
    });
    post_ok(http, "/init_weights_update_group", &body, ("success", Value::Bool(true)), until).await
}

/// Leaves the group of that name, if there is one.
pub(super) async fn leave_by_name(http: &EngineHttp, name: Option<&str>, until: Until) -> Result<(), EngineError> {
    let Some(name) = name else { return Ok(()) };
    let reply = http.post("/destroy_weights_update_group", Some(&json!({ "group_name": name })), until).await?;
    // 400: it knows no such group.
    if matches!(reply.status(), 200 | 400) { Ok(()) } else { Err(reply.into_status()) }
}
