//! Groups that an engine joins by itself: its server's facts about them, and the calls to join, receive and leave.
//!
//! The third route into an engine, in addition to a directory and this agent's GPU memory, under the same rules. The engine is marked
//! before a weight changes. It runs again only after every bucket was received and the engine confirmed its last step. The agent moves no
//! byte: the source's GPU worker broadcasts, and the engine's own workers receive. No wait for a silent engine exceeds a deadline. Whether
//! it is stuck is judged by the one token that [`super::Engine::health`] and the end of an install request.

use std::net::Ipv6Addr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::device::{DeviceBucket, DeviceInstall, DeviceJob, Released};
use super::feed::Feed;
use super::http::{EngineHttp, Until};
use super::{EngineError, InstallError};
use weightsync_core::protocol::{GroupFacts, GroupPlace};
use weightsync_core::weights::{Layout, Section, WireBucket};
use weightsync_torch::{TorchError, dtype_name};

#[derive(Clone)]
#[allow(missing_docs)]
pub struct GroupJoin {
    /// Its name; unique to one epoch.
    pub name: String,
    pub place: GroupPlace,
    /// First rank of this engine.
    pub offset: u32,
    pub world: u32,
}

/// Times of a join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupJoined {
    /// Time to leave its earlier group.
    pub cleared: Duration,
    /// Time of the engine's own call.
    pub joined: Duration,
}

/// One engine server as a member of groups. All calls end within their deadline. A call that changes the engine waits for the previous one.
#[async_trait]
pub trait EngineGroup: Send + Sync {
    /// Checks whether and how the server can join. [`GroupFacts::why_not`] has the obstacle.
    async fn facts(&self, deadline: Duration) -> Result<GroupFacts, EngineError>;

    /// Leaves the group it was in, then joins this one. `Ok` is the engine's own report: for a store it means that its ranks connected
    /// there, not that a communicator exists.
    async fn join(&self, join: &GroupJoin, deadline: Duration) -> Result<GroupJoined, EngineError>;

    /// Leaves its group, if it is in one. Rank 0 must have aborted its communicator: leaving is a rendezvous otherwise.
    async fn leave(&self, deadline: Duration) -> Result<(), EngineError>;

    /// Whether its server queues the request for a bucket after the present one. If so, that request is sent as soon as rank 0 needs it;
    /// see [`begin`](Self::begin).
    fn ahead(&self) -> bool;

    /// Begins an install from the group that it joined last. Nothing changes before [`DeviceInstall::open`]; places of buckets are empty.
    /// `asked` is the highest sequence that rank 0 requested. Rank 0 requests a bucket when the previous one was broadcast, so an engine
    /// that works [`ahead`](Self::ahead) may get it while it still loads that one.
    async fn begin(&self, job: &DeviceJob, asked: watch::Receiver<Option<u32>>) -> Result<Box<dyn DeviceInstall>, InstallError>;
}

/// The group calls of one kind of server: paths, bodies and which reply means success. The adapter decides their order.
#[async_trait]
pub(super) trait GroupServer: Send + Sync {
    async fn facts(&self, until: Until) -> Result<GroupFacts, EngineError>;

    /// Leaves the group with that name; an engine in no group is no error. Without a name: the engine's present group, if it is known.
    async fn leave(&self, name: Option<&str>, until: Until) -> Result<(), EngineError>;

    async fn join(&self, join: &GroupJoin, until: Until) -> Result<(), EngineError>;

    /// Whether it must be paused while it receives. If not, running requests are ended before and after, as the policy requires.
    fn pauses(&self) -> bool {
        true
    }

    /// Whether the server processes requests for buckets in the order of their arrival, so that one may wait in the server.
    fn ahead(&self) -> bool {
        false
    }

    /// Opens the session of an update, with or without a draft model. A session that a dead trainer left open is closed first, and its
    /// engine counts as changed.
    async fn open(&self, name: &str, with_draft: bool, until: Until) -> Result<Box<dyn GroupFeed>, EngineError>;
}

#[async_trait]
pub(super) trait GroupFeed: Send + Sync {
    /// Whether another client's update was found open and was closed: the engine may hold a mixture before anything was sent.
    fn found_open(&self) -> bool;

    /// Makes the engine enter the broadcast of these tensors; ends when it confirms them. `last` marks the last broadcast of the update.
    fn receive(&self, tensors: Tensors, last: bool, until: Until) -> BoxFuture<'static, Result<(), EngineError>>;

    /// Later tensors are for the draft model; the model is complete.
    async fn turn_to_draft(&mut self, _until: Until) -> Result<(), EngineError> {
        Err(EngineError::Unsupported { what: "this engine takes no draft model from a group".into(), next_step: "report this".into() })
    }

    /// The engine's last step, unless it was part of the last request.
    async fn close(&mut self, until: Until) -> Result<(), EngineError>;

    /// Closes the open session, so that it does not block the next update.
    async fn fail(&mut self, until: Until);
}

/// The group calls that feed an engine.
pub(super) struct OfGroup {
    pub(super) server: Arc<dyn GroupServer>,
    pub(super) name: String,
    /// See [`EngineGroup::begin`].
    pub(super) asked: watch::Receiver<Option<u32>>,
}

/// The tensors of one broadcast, with torch's names.
pub(super) struct Tensors {
    pub(super) names: Vec<String>,
    /// Element types, such as `bfloat16`.
    pub(super) dtypes: Vec<&'static str>,
    pub(super) shapes: Vec<Vec<u64>>,
}

impl Tensors {
    fn of(layout: &Layout, wire: &WireBucket) -> Result<Self, EngineError> {
        let dtype = dtype_name(wire.dtype).ok_or_else(|| EngineError::no_form(&TorchError::NoDtype(wire.dtype)))?;
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
    /// The highest sequence that was requested; `None` if the server takes one request at a time.
    asked: Option<watch::Receiver<Option<u32>>>,
    /// Longest wait for one bucket.
    silence: Duration,
    whole: Until,
    /// The bucket after the present one, if it was requested already.
    next: Option<(u32, Entering)>,
    section: Section,
}

/// The request by which an engine enters the broadcasts of one bucket.
type Entering = AbortOnDropHandle<Result<(), EngineError>>;

impl FromGroup {
    /// Refuses everything that cannot be sent, before anything is sent.
    pub(super) async fn open(of: &OfGroup, layout: Arc<Layout>, silence: Duration, until: Until) -> Result<Self, EngineError> {
        for bucket in layout.buckets() {
            for wire in layout.wire(&bucket).map_err(|error| unsendable(&error))? {
                Tensors::of(&layout, &wire)?;
            }
        }
        let feed = of.server.open(&of.name, layout.has_draft(), until).await?;
        let touched = feed.found_open();
        let asked = of.server.ahead().then(|| of.asked.clone());
        Ok(Self { layout, feed, touched, asked, silence, whole: until, next: None, section: Section::Model })
    }

    /// Sends the request to receive a bucket. The engine then continues by itself.
    fn enter(&mut self, sequence: u32, until: Until) -> Result<Entering, EngineError> {
        let none = || EngineError::Unsupported { what: format!("there is no bucket {sequence}"), next_step: "report this".into() };
        let bucket = self.layout.bucket(sequence).ok_or_else(none)?;
        let is_last = sequence.saturating_add(1) == self.layout.bucket_count();
        let wire = self.layout.wire(&bucket).map_err(|error| unsendable(&error))?;
        let count = wire.len();
        let tensors: Vec<Tensors> = wire.iter().map(|wire| Tensors::of(&self.layout, wire)).collect::<Result<_, _>>()?;
        let tensors = tensors.into_iter().zip(1..);
        let calls: Vec<_> = tensors.map(|(tensors, number)| self.feed.receive(tensors, is_last && number == count, until)).collect();
        self.touched = true;
        // None is sent before the response to the previous one.
        Ok(AbortOnDropHandle::new(tokio::spawn(async move {
            for call in calls {
                call.await?;
            }
            Ok(())
        })))
    }
}

#[async_trait]
impl Feed for FromGroup {
    async fn bucket(&mut self, bucket: &DeviceBucket, until: Until) -> Result<Released, EngineError> {
        let sequence = bucket.bucket.sequence;
        let section = self.layout.section(&bucket.bucket);
        if section != self.section {
            self.feed.turn_to_draft(until).await?;
            self.section = section;
        }
        let mut entered = match self.next.take() {
            Some((reported, entering)) if reported == sequence => entering,
            _ => self.enter(sequence, until)?,
        };
        let mut asked = self.asked.clone();
        loop {
            tokio::select! {
                biased;
                received = &mut entered => {
                    received.map_err(|_| EngineError::Cancelled)??;
                    return Ok(Released::Now);
                }
                () = next_is_asked_for(asked.as_mut(), sequence) => {
                    asked = None;
                    let next = sequence.saturating_add(1);
                    if self.layout.bucket(next).is_some() {
                        self.next = Some((next, self.enter(next, self.whole.at_most(self.silence))?));
                    }
                }
            }
        }
    }

    fn touched(&self) -> bool {
        self.touched
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        self.feed.close(until).await
    }

    async fn fail(&mut self, _: &str, until: Until) {
        // The engine is in a broadcast that rank 0 completes. If this failure were reported earlier, rank 0 would abort, and an engine that
        // remains in a broadcast may never leave it.
        if let Some((sequence, entered)) = self.next.take()
            && !matches!(tokio::time::timeout(until.left(), entered).await, Ok(Ok(Ok(()))))
        {
            tracing::warn!(sequence, "the bucket after the failed one failed too");
        }
        self.feed.fail(until).await;
    }
}

/// Waits until the bucket after this one is requested; pending without end if engines do not work ahead.
async fn next_is_asked_for(asked: Option<&mut watch::Receiver<Option<u32>>>, sequence: u32) {
    if let Some(asked) = asked
        && asked.wait_for(|asked| asked.is_some_and(|asked| asked > sequence)).await.is_ok()
    {
        return;
    }
    std::future::pending::<()>().await;
}

fn unsendable(error: &weightsync_core::weights::WireError) -> EngineError {
    EngineError::Unsupported { what: error.to_string(), next_step: "publish from a trainer whose agent has a GPU worker".into() }
}

/// Refuses an engine kind that joins no groups.
pub fn no_groups(kind: &str) -> EngineError {
    EngineError::Unsupported {
        what: format!("{kind} joins no group by itself that this agent knows of"),
        next_step: "set spec.delivery to Agent".into(),
    }
}

/// POST that must return 200 with `field` equal to `value`.
pub(super) async fn post_ok(
    http: &EngineHttp,
    path: &str,
    body: &Value,
    (field, value): (&str, Value),
    until: Until,
) -> Result<(), EngineError> {
    http.post(path, Some(body), until).await?.json()?.must(field, &value).map(drop)
}

/// Joins a group through its store; SGLang 0.5.23 and LMDeploy 0.18 use the same fields.
pub(super) async fn join_by_store(http: &EngineHttp, join: &GroupJoin, until: Until) -> Result<(), EngineError> {
    let GroupPlace::Store { address, port } = &join.place else {
        return Err(EngineError::Unsupported {
            what: "this engine joins a group through a store, and was given the communicator's id".into(),
            next_step: "this is a fault of the source's agent: report it".into(),
        });
    };
    let body = json!({
        "master_address": in_url(address),
        "master_port": port,
        "rank_offset": join.offset,
        "world_size": join.world,
        "group_name": join.name,
        "backend": "nccl",
    });
    post_ok(http, "/init_weights_update_group", &body, ("success", Value::Bool(true)), until).await
}

/// A host as it stands in a URL. LMDeploy writes `tcp://ADDRESS:PORT` without brackets of its own; SGLang takes an address with them.
fn in_url(host: &str) -> String {
    if host.parse::<Ipv6Addr>().is_ok() { format!("[{host}]") } else { host.to_owned() }
}

pub(super) async fn leave_by_name(http: &EngineHttp, name: Option<&str>, until: Until) -> Result<(), EngineError> {
    let Some(name) = name else { return Ok(()) };
    let reply = http.post("/destroy_weights_update_group", Some(&json!({ "group_name": name })), until).await?;
    // 400: it knows no such group.
    if matches!(reply.status(), 200 | 400) { Ok(()) } else { Err(reply.into_status()) }
}
