//! One coordinator for each object, while the object exists. Decides when a coordinator starts, restarts, and ends; membership decides what
//! it does.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::{Client, Resource, ResourceExt};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::calls::Calls;
use super::decide::{Decided, target_container};
use super::epoch_store::KubeEpochStore;
use super::events::{Events, ObjectEvents};
use super::hold::HOLD;
use super::metrics::ControllerMetrics;
use super::object::{Object, Unreadable};
use super::pods::Pods;
use super::readiness::{Verdict, is_gated};
use super::stores::Scope;
use super::traces::{Traces, Trail};
use super::triggers::Triggers;
use crate::api::{WeightSync, WeightSyncStatus};
use crate::controller::lease::Leadership;
use weightsync_coordinator::page::{Attempt, History, RecentEvent, RecentEvents, record};
use weightsync_coordinator::{
    Addresses, Context, Coordinator, CoordinatorEvent, CoordinatorHandle, Directory, EventSink, Held, ProvenPod, Registered, Timing, Wanted,
};
use weightsync_core::membership::{Membership, MembershipView, Restored};
use weightsync_core::protocol::{HeldVersion, Reason};
use weightsync_net::backoff::Backoff;
use weightsync_net::https::AgentClient;

/// A change of the view is reported at most this often, so that progress of an update does not write status ten times a second.
const THROTTLE: Duration = Duration::from_millis(250);
/// Related changes arrive within this time: the leader and each member report an update's end.
const GATHER: Duration = Duration::from_millis(50);
/// How long agents of a deleted object are asked to release; after that they detect the deletion by themselves.
const RELEASE: Duration = Duration::from_secs(5);

pub(super) struct World {
    pub(super) client: Client,
    pub(super) calls: Calls,
    pub(super) agents: AgentClient,
    pub(super) directory: Directory,
    pub(super) events: Events,
    pub(super) leadership: Leadership,
    pub(super) metrics: ControllerMetrics,
    pub(super) traces: Traces,
    pub(super) cancel: CancellationToken,
}

pub(super) struct Objects {
    world: World,
    entries: Mutex<HashMap<String, Entry>>,
    releases: TaskTracker,
}

struct Entry {
    object: Arc<WeightSync>,
    triggers: Triggers,
    handle: CoordinatorHandle,
    seen_epoch: Arc<AtomicU64>,
    /// The status as it was last written, to write only changes.
    written: Option<Written>,
    /// Since when a change of it waits for further ones.
    held_since: Option<Instant>,
    history: Arc<Mutex<History>>,
    recent: RecentEvents,
    restarts: Backoff,
    restart_at: Option<Instant>,
    /// Why an earlier coordinator of it stopped deciding, until a group was formed since.
    stepped_down: Option<String>,
    _forward: AbortOnDropHandle<()>,
    _record: AbortOnDropHandle<()>,
}

/// State that outlives a coordinator of an object.
struct Kept {
    restarts: Backoff,
    history: Arc<Mutex<History>>,
    recent: RecentEvents,
    stepped_down: Option<String>,
}

/// A status as this controller wrote it.
#[derive(Clone)]
pub(super) struct Written {
    pub(super) status: WeightSyncStatus,
    /// The object's resourceVersion after that write.
    pub(super) at: Option<String>,
}

impl Written {
    /// Whether a cached object is older than this write.
    pub(super) fn is_newer_than(&self, cached: &WeightSync) -> bool {
        let number = |version: Option<&String>| version.and_then(|version| version.parse::<u64>().ok());
        // Versions of one resource grow; if they are not numbers, the write counts.
        match (number(self.at.as_ref()), number(cached.metadata.resource_version.as_ref())) {
            (Some(written), Some(cached)) => cached < written,
            _ => true,
        }
    }
}

/// One object as metrics and the web page show it.
pub(super) struct Seen {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) suspended: bool,
    /// As this controller last wrote it; else as it was read.
    pub(super) status: Option<WeightSyncStatus>,
    pub(super) view: MembershipView,
    /// The last updates, the latest first.
    pub(super) history: Vec<Attempt>,
    /// The last events, the latest first.
    pub(super) events: Vec<RecentEvent>,
}

pub(super) fn reference(object: &WeightSync) -> ObjectReference {
    object.object_ref(&())
}

impl Objects {
    pub(super) fn new(world: World) -> Self {
        Self { world, entries: Mutex::default(), releases: TaskTracker::new() }
    }

    pub(super) fn events_of(&self, object: &WeightSync) -> ObjectEvents {
        let known = object.uid().and_then(|uid| self.entries.lock().get(&uid).map(|entry| entry.recent.clone()));
        self.world.events.of(reference(object), known.unwrap_or_default())
    }

    /// Passes the decision to the object's coordinator, which it starts if necessary; returns the state of the group.
    pub(super) fn follow(&self, object: &Arc<WeightSync>, decided: &Decided, term: u64, scope: &Scope) -> MembershipView {
        let uid = object.uid().unwrap_or_default();
        let invalid = matches!(decided.refused, Some((Reason::InvalidSpec, _)));
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.get_mut(&uid)
            && entry.handle.is_running()
        {
            entry.object = object.clone();
            if entry.handle.view.borrow().committed {
                entry.stepped_down = None;
                entry.restarts.succeeded();
            }
            // An invalid edit does not dissolve a working group.
            if !invalid {
                self.world.directory.claim(&uid, decided.claims.clone(), Addresses::Known(decided.addresses.clone()));
                entry.handle.want(wanted(decided));
            }
            return entry.handle.view.borrow().clone();
        }
        let earlier = entries.remove(&uid);
        let history = earlier.as_ref().map(|entry| entry.history.clone()).unwrap_or_default();
        let recent = earlier.as_ref().map(|entry| entry.recent.clone()).unwrap_or_default();
        let restored = restored(object, term, earlier.as_ref());
        let idle = |restored| Membership::new(decided.config.clone(), restored).view();
        if let Some((Reason::InvalidSpec, message)) = &decided.refused {
            let pods = decided.selected.clone();
            self.hold_agents(object.meta(), Held::Pods(pods), message);
            return idle(restored);
        }
        if earlier.is_none() && decided.refused.is_some() {
            return idle(restored);
        }
        let stepped_down = earlier.as_ref().and_then(|entry| entry.handle.stepped_down().map(str::to_owned));
        let mut restarts =
            earlier.as_ref().map_or_else(|| Backoff::new(Duration::from_secs(1), Duration::from_secs(60)), |entry| entry.restarts.clone());
        if let Some(mut entry) = earlier {
            entry.stepped_down = stepped_down.clone().or(entry.stepped_down);
            // If another controller leads, this process ends soon. Otherwise start again, but not in a tight loop.
            let at = *entry.restart_at.get_or_insert_with(|| Instant::now() + restarts.failed());
            entry.restarts = restarts.clone();
            if Instant::now() < at {
                let view = entry.handle.view.borrow().clone();
                entries.insert(uid, entry);
                return view;
            }
        }
        let entry = self.start(object, decided, restored, Kept { restarts, history, recent, stepped_down }, scope);
        self.world.directory.claim(&uid, decided.claims.clone(), Addresses::Known(decided.addresses.clone()));
        let view = entry.handle.view.borrow().clone();
        entries.insert(uid, entry);
        view
    }

    fn start(&self, object: &Arc<WeightSync>, decided: &Decided, restored: Restored, kept: Kept, scope: &Scope) -> Entry {
        let Kept { restarts, history, recent, stepped_down } = kept;
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        tracing::info!(namespace, name, epoch = restored.epoch, term = restored.term, "following a WeightSync");
        let world = &self.world;
        let store = KubeEpochStore::new(world.client.clone(), world.calls, world.leadership.clone(), &namespace, &name);
        let seen_epoch = store.seen.clone();
        seen_epoch.fetch_max(restored.epoch, Ordering::SeqCst);
        let context = Context {
            client: world.agents.clone(),
            directory: world.directory.clone(),
            store: Arc::new(store),
            events: Arc::new(self.world.events.of(reference(object), recent.clone())),
            timing: Timing::default(),
        };
        let handle = Coordinator::start(wanted(decided), restored, context, world.cancel.child_token());
        let trigger = (scope.triggers.clone(), ObjectRef::<Object>::new(&name).within(&namespace));
        let mut view = handle.view.clone();
        let mut registered = object.uid().and_then(|uid| world.directory.registered(&uid));
        let forward = async move {
            loop {
                tokio::select! {
                    changed = view.changed() => if changed.is_err() {
                        break;
                    },
                    () = changed(&mut registered) => {}
                }
                sleep(GATHER).await;
                view.mark_unchanged();
                trigger.0.push(trigger.1.clone());
                sleep(THROTTLE).await;
            }
            trigger.0.push(trigger.1);
        };
        let (metrics, traces, mut trail) = (world.metrics.clone(), world.traces.clone(), Trail::default());
        let record = record(handle.view.clone(), history.clone(), move |noted| {
            if noted.ended {
                metrics.count_update(noted.update, noted.view.transport.as_ref());
            }
            if traces.are_wanted() {
                trail.note(noted.update, noted.at).into_iter().for_each(|trace| traces.put(trace));
            }
        });
        Entry {
            object: object.clone(),
            triggers: scope.triggers.clone(),
            handle,
            seen_epoch,
            written: None,
            held_since: None,
            history,
            recent,
            restarts,
            restart_at: None,
            stepped_down,
            _forward: AbortOnDropHandle::new(tokio::spawn(forward)),
            _record: AbortOnDropHandle::new(tokio::spawn(record)),
        }
    }

    /// The engines that registered with agents of the object.
    pub(super) fn registered(&self, object: &WeightSync) -> Registered {
        let registered = object.uid().and_then(|uid| self.world.directory.registered(&uid));
        registered.map(|registered| registered.borrow().clone()).unwrap_or_default()
    }

    /// Holds the agents of an object without a coordinator: its spec cannot be parsed, or is invalid.
    fn hold_agents(&self, object: &ObjectMeta, held: Held, why: &str) {
        let (namespace, name) = (object.namespace.as_deref().unwrap_or_default(), object.name.as_deref().unwrap_or_default());
        let why = format!("WeightSync {namespace}/{name} cannot be reconciled: {why}");
        self.world.directory.hold(object.uid.as_deref().unwrap_or_default(), held, why);
    }

    /// Holds the agents of an object that cannot be parsed, unless a coordinator still runs with its last valid spec.
    pub(super) fn hold_unreadable(&self, object: &Unreadable) {
        if !self.runs(object.metadata.uid.as_deref().unwrap_or_default()) {
            let namespace = object.metadata.namespace.clone().unwrap_or_default();
            self.hold_agents(&object.metadata, Held::Namespace(namespace), &object.error);
        }
    }

    /// Whether the object has a coordinator.
    pub(super) fn runs(&self, uid: &str) -> bool {
        self.entries.lock().get(uid).is_some_and(|entry| entry.handle.is_running())
    }

    /// Why its coordinator stopped deciding, while no group was formed since.
    pub(super) fn stepped_down(&self, uid: &str) -> Option<String> {
        let entries = self.entries.lock();
        let entry = entries.get(uid).filter(|entry| !entry.handle.view.borrow().committed || !entry.handle.is_running())?;
        entry.handle.stepped_down().map(str::to_owned).or_else(|| entry.stepped_down.clone())
    }

    /// Whether the object may decide about a pod: no older object claims it.
    pub(super) fn claims(&self, uid: &str, pod: &Pod) -> bool {
        pod.uid().and_then(|pod| self.world.directory.claimant(&pod)).as_deref() == Some(uid)
    }

    /// Reports by an Event that a pod's single-use token was used with two keys.
    pub(super) fn token_stolen(&self, pod: &ProvenPod) {
        tracing::warn!(namespace = pod.namespace, pod = pod.pod, pod_uid = pod.pod_uid, "a single-use token was used with two keys");
        let Some(uid) = self.world.directory.claimant(&pod.pod_uid) else { return };
        let object = self.entries.lock().get(&uid).map(|entry| entry.object.clone());
        let Some(object) = object else { return };
        let message = format!(
            "the single-use token of an agent in pod {} was used with two keys: both are refused, and the pod gets a new agent; check who may \
             read pods there, and what runs in it",
            pod.pod
        );
        self.events_of(&object).publish(CoordinatorEvent { reason: Reason::ClaimRefused, message, member: None, warning: true });
    }

    /// How long until a coordinator that stepped down starts again.
    pub(super) fn restart_in(&self, uid: &str) -> Option<Duration> {
        let entries = self.entries.lock();
        let entry = entries.get(uid)?;
        let at = entry.restart_at.filter(|_| !entry.handle.is_running())?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    pub(super) fn written(&self, uid: &str) -> Option<Written> {
        self.entries.lock().get(uid).and_then(|entry| entry.written.clone())
    }

    /// How much longer a change of the object's status may wait; `None` if it waited long enough.
    pub(super) fn hold(&self, uid: &str) -> Option<Duration> {
        let mut entries = self.entries.lock();
        let since = *entries.get_mut(uid)?.held_since.get_or_insert_with(Instant::now);
        HOLD.checked_sub(since.elapsed()).filter(|left| !left.is_zero())
    }

    /// Nothing of the object's status waits any more.
    pub(super) fn hold_no_more(&self, uid: &str) {
        if let Some(entry) = self.entries.lock().get_mut(uid) {
            entry.held_since = None;
        }
    }

    pub(super) fn set_written(&self, uid: &str, written: Written) {
        if let Some(entry) = self.entries.lock().get_mut(uid) {
            entry.written = Some(written);
            entry.held_since = None;
        }
    }

    /// All objects with a coordinator, by namespace and name.
    pub(super) fn seen(&self) -> Vec<Seen> {
        let seen = |entry: &Entry| Seen {
            namespace: entry.object.namespace().unwrap_or_default(),
            name: entry.object.name_any(),
            suspended: entry.object.spec.suspend,
            status: entry.written.as_ref().map(|written| written.status.clone()).or_else(|| entry.object.status.clone()),
            view: entry.handle.view.borrow().clone(),
            history: entry.history.lock().latest(),
            events: entry.recent.latest(),
        };
        let mut all: Vec<Seen> = self.entries.lock().values().map(seen).collect();
        all.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        all
    }

    /// Ends the coordinators of objects that are gone, also of those whose deletion no watch reported.
    ///
    /// `there` holds the UIDs of all objects in the watch caches.
    pub(super) fn sweep(self: &Arc<Self>, there: &HashSet<String>, scopes: &[Scope]) {
        let gone: Vec<Entry> = {
            let mut entries = self.entries.lock();
            let uids: Vec<String> = entries.keys().filter(|uid| !there.contains(*uid)).cloned().collect();
            uids.iter().filter_map(|uid| entries.remove(uid)).collect()
        };
        self.world.directory.hold_only(there);
        for entry in gone {
            let pods = scopes.iter().flat_map(|scope| scope.pods_in(&entry.object.namespace().unwrap_or_default())).collect();
            let objects = self.clone();
            self.releases.spawn(async move { objects.release(entry, pods).await });
        }
    }

    /// Leaves every pod of a deleted object serving. Nothing waits for this: an unreachable agent is informed at its next announcement.
    async fn release(&self, entry: Entry, pods: Vec<Arc<Pod>>) {
        let object = entry.object.clone();
        let (namespace, uid) = (object.namespace().unwrap_or_default(), object.uid().unwrap_or_default());
        tracing::info!(namespace, name = object.name_any(), "the WeightSync is gone; releasing its pods");
        entry.handle.change(|wanted| wanted.delete = true);
        let mut view = entry.handle.view.clone();
        let released = timeout(RELEASE, view.wait_for(|view| view.released)).await.is_ok_and(|seen| seen.is_ok());
        if !released {
            tracing::info!(
                namespace,
                name = object.name_any(),
                "not all agents confirmed; the others are informed at their next announcement"
            );
        }
        self.world.directory.remove(&uid);
        let writes = Pods::new(self.world.client.clone(), self.world.calls, &namespace);
        let verdict = Verdict::serve(Reason::Suspended, "the WeightSync was deleted: the pod serves its current weights");
        let others = |pod: &Pod| pod.uid().and_then(|pod| self.world.directory.claimant(&pod)).is_some();
        for pod in pods.iter().filter(|pod| is_gated(pod) && target_container(&object, pod).is_some() && !others(pod)) {
            if let Err(error) = writes.set_readiness(pod, &verdict).await {
                tracing::warn!(%error, "a pod of a deleted WeightSync may stay unready");
            }
        }
        // An object of the same name may be waiting.
        entry.triggers.push(ObjectRef::<Object>::new(&object.name_any()).within(&namespace));
    }

    /// Waits until deleted objects were released, at most as long as that may take.
    pub(super) async fn drained(&self) {
        self.releases.close();
        if timeout(RELEASE, self.releases.wait()).await.is_err() {
            tracing::info!("some deleted objects were not released in time");
        }
    }
}

/// Waits for a change of the registered engines; for ever if no more can come.
async fn changed(registered: &mut Option<watch::Receiver<Registered>>) {
    let change = match registered {
        Some(registered) => registered.changed().await.is_ok(),
        None => false,
    };
    if !change {
        *registered = None;
        std::future::pending::<()>().await;
    }
}

fn wanted(decided: &Decided) -> Wanted {
    Wanted { config: decided.config.clone(), members: Some(decided.members.clone()), suspend: decided.suspend, delete: false }
}

/// State from before: from status, or from an earlier coordinator of this process.
fn restored(object: &WeightSync, term: u64, earlier: Option<&Entry>) -> Restored {
    let unsigned = |number: Option<i64>| number.and_then(|number| u64::try_from(number).ok());
    let status = object.status.as_ref();
    let version = status.and_then(|status| {
        let version = unsigned(status.version)?;
        Some(HeldVersion { version, manifest: status.manifest.clone().unwrap_or_default() })
    });
    let seen = earlier.map_or(0, |entry| entry.seen_epoch.load(Ordering::SeqCst).max(entry.handle.view.borrow().epoch));
    let earlier_version = earlier.and_then(|entry| entry.handle.view.borrow().version.clone());
    let highest = unsigned(status.and_then(|status| status.rolled_back_from)).unwrap_or(0);
    let left = earlier.and_then(|entry| entry.handle.view.borrow().returned).map_or(0, |returned| returned.from);
    let epoch = unsigned(status.and_then(|status| status.epoch)).unwrap_or(0).max(seen);
    let of_status = status.into_iter().flat_map(|status| &status.refused).filter_map(|number| unsigned(Some(*number)));
    let of_view = earlier.map(|entry| entry.handle.view.borrow().refused.clone()).unwrap_or_default();
    let mut refused: Vec<u64> = of_status.chain(of_view).collect();
    refused.sort_unstable();
    refused.dedup();
    Restored { term, epoch, version: earlier_version.or(version), highest: highest.max(left), refused }
}
