//! Which object claims which pod, and which coordinator receives its announcements. The planner (controller or `weightsync local`) writes
//! it; the enrolment server reads it. It answers "not known yet" until it was filled once, so that a restarted controller rejects no agent.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::addresses::{AddressProblem, Addresses};
use super::common_change::{Common, CommonChange};
use weightsync_core::protocol::{Announcement, Assignment, HeldVersion, Hindrance, MOST_ENGINES, Rejection, Returned, Role, Version};

/// The claim of an object on a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claimed {
    pub weightsync: String,
    pub assignment: Assignment,
}

/// Claims of all objects. Clones share them.
#[derive(Clone, Default)]
pub struct Directory(Arc<Shared>);

#[derive(Default)]
struct Shared {
    inner: Mutex<Inner>,
    /// Time of the latest first report of an agent, of any object.
    arrival: watch::Sender<Option<Instant>>,
}

#[derive(Default)]
struct Inner {
    settled: bool,
    objects: BTreeMap<String, Object>,
    /// By the UID of the object that cannot be reconciled.
    holds: BTreeMap<String, Hold>,
}

impl Inner {
    fn settled(&self) -> Result<(), Rejection> {
        let message = "this controller does not lead, or has not reconciled all objects yet";
        if self.settled { Ok(()) } else { Err(Rejection { message: message.into(), retryable: true }) }
    }
}

struct Object {
    created: u64,
    claims: HashMap<String, Assignment>,
    addresses: Addresses,
    current: Option<HeldVersion>,
    returned: Option<Returned>,
    newest: Option<Version>,
    suspended: bool,
    hindrance: Option<Hindrance>,
    registered: watch::Sender<Registered>,
    announcements: mpsc::Sender<Arrival>,
}

/// Ports of the engines that registered with the agents of an object, by the UID of their pod. A pod whose agent did not report since this
/// process started is absent.
pub type Registered = HashMap<String, Vec<u16>>;

/// An announcement as its object's coordinator gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// The coordinator may connect to its address.
    Accepted(Announcement),
    /// Its address is not the pod's: it must not be used.
    Refused(Announcement, AddressProblem),
}

/// Pods whose agents keep their state, because their object cannot be reconciled now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Held {
    /// All pods of a namespace: the selectors of its objects cannot be read.
    Namespace(String),
    /// The pods of these UIDs.
    Pods(HashSet<String>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Hold {
    held: Held,
    why: String,
}

impl Directory {
    /// Records the first report of an agent, of any object.
    pub(super) fn arrived(&self) {
        self.0.arrival.send_replace(Some(Instant::now()));
    }

    /// Time of the latest first report. While it changes, agents are still reconnecting to this controller.
    pub(super) fn last_arrival(&self) -> Option<Instant> {
        *self.0.arrival.borrow()
    }

    /// Makes an object known; `created` is its creation time in ms since 1970.
    pub(super) fn add(&self, weightsync: &str, created: u64, announcements: mpsc::Sender<Arrival>) {
        let mut inner = self.0.inner.lock();
        let kept = inner.objects.remove(weightsync).map(|object| (object.claims, object.addresses, object.registered));
        let (claims, addresses, registered) = kept.unwrap_or_default();
        inner.holds.remove(weightsync);
        let (current, returned, newest, hindrance) = (None, None, None, None);
        let object =
            Object { created, claims, addresses, current, returned, newest, suspended: false, hindrance, registered, announcements };
        inner.objects.insert(weightsync.to_owned(), object);
    }

    /// Records that an object cannot be reconciled, for the reason `why`. Agents of pods that it may claim must retry, and keep their
    /// state. Ends with [`remove`](Self::remove), or once a coordinator runs for the object.
    pub fn hold(&self, weightsync: &str, held: Held, why: String) {
        self.0.inner.lock().holds.insert(weightsync.to_owned(), Hold { held, why });
    }

    /// Ends the holds of all objects that are not among these.
    pub fn hold_only(&self, there: &HashSet<String>) {
        self.0.inner.lock().holds.retain(|weightsync, _| there.contains(weightsync));
    }

    /// UID of the object that claims a pod; the older object if two claim it. `None` before all objects were reconciled once.
    pub fn claimant(&self, pod_uid: &str) -> Option<String> {
        self.claim_of(pod_uid).ok().map(|claimed| claimed.weightsync)
    }

    /// Replaces the part that all assignments of the object share. Returns what changed.
    pub(super) fn set_common(&self, weightsync: &str, common: Common<'_>) -> CommonChange {
        let mut inner = self.0.inner.lock();
        let Some(object) = inner.objects.get_mut(weightsync) else { return CommonChange::Nothing };
        let Object { current, returned, newest, suspended, hindrance, .. } = object;
        let before = Common {
            current: current.as_ref(),
            returned: *returned,
            newest: *newest,
            suspended: *suspended,
            hindrance: hindrance.as_ref(),
        };
        let common_change = CommonChange::between(before, common);
        (*current, *returned, *newest, *suspended) = (common.current.cloned(), common.returned, common.newest, common.suspended);
        *hindrance = common.hindrance.cloned();
        common_change
    }

    /// Replaces all claims of an object: for each pod's UID its assignment, and the addresses at which its agent may be reached. This fills
    /// in `current`, `returned`, `newest`, `suspended` and `hindrance`. Has no effect for an unknown object.
    pub fn claim(&self, weightsync: &str, claims: HashMap<String, Assignment>, addresses: Addresses) {
        if let Some(object) = self.0.inner.lock().objects.get_mut(weightsync) {
            (object.claims, object.addresses) = (claims, addresses);
            object.registered.send_if_modified(|registered| {
                registered.retain(|pod_uid, _| object.claims.contains_key(pod_uid));
                false
            });
        }
    }

    /// Records the engines that are registered with the agent of a pod. Fails if the object does not let engines of that pod register.
    pub(super) fn register(&self, weightsync: &str, pod_uid: &str, mut ports: Vec<u16>) -> Result<(), Rejection> {
        let refused = |message: String| Err(Rejection { message, retryable: true });
        if ports.len() > MOST_ENGINES {
            return refused(format!("{} engines are registered; at most {MOST_ENGINES} may be", ports.len()));
        }
        ports.sort_unstable();
        ports.dedup();
        let inner = self.0.inner.lock();
        let Some(object) = inner.objects.get(weightsync) else { return refused("the object's coordinator does not run yet".into()) };
        if !object.claims.get(pod_uid).is_some_and(|assignment| assignment.registered) {
            return refused(format!("the WeightSync does not let engines of the pod with UID {pod_uid} register (engine.discovery)"));
        }
        object.registered.send_if_modified(|registered| registered.insert(pod_uid.to_owned(), ports.clone()).as_ref() != Some(&ports));
        Ok(())
    }

    /// The engines that registered with the agents of an object, as they change; `None` for an unknown object.
    pub fn registered(&self, weightsync: &str) -> Option<watch::Receiver<Registered>> {
        self.0.inner.lock().objects.get(weightsync).map(|object| object.registered.subscribe())
    }

    /// Removes an object. Its agents learn that no object claims them, and stop.
    pub fn remove(&self, weightsync: &str) {
        let mut inner = self.0.inner.lock();
        inner.objects.remove(weightsync);
        inner.holds.remove(weightsync);
    }

    /// From now on a missing claim is final: all objects were reconciled once.
    pub fn settle(&self) {
        self.0.inner.lock().settled = true;
    }

    /// Removes all entries and answers "not known yet" again: the lease was lost.
    pub fn unsettle(&self) {
        *self.0.inner.lock() = Inner::default();
    }

    /// The response before all objects were reconciled once.
    pub(super) fn settled(&self) -> Result<(), Rejection> {
        self.0.inner.lock().settled()
    }

    /// The claim on the pod with that UID; the older object's if two claim it.
    pub(crate) fn claim_of(&self, pod_uid: &str) -> Result<Claimed, Rejection> {
        let inner = self.0.inner.lock();
        inner.settled()?;
        let claims = inner.objects.iter().filter_map(|(uid, object)| {
            let assignment = object.claims.get(pod_uid)?;
            Some((object, uid, assignment))
        });
        match claims.min_by_key(|(object, uid, _)| (object.created, *uid)) {
            Some((object, uid, assignment)) => {
                let Object { current, returned, newest, suspended, hindrance, .. } = object;
                let assignment = Assignment {
                    current: current.clone(),
                    returned: *returned,
                    newest: *newest,
                    suspended: *suspended,
                    hindrance: hindrance.clone().filter(|_| assignment.role == Role::Source),
                    ..assignment.clone()
                };
                Ok(Claimed { weightsync: uid.clone(), assignment })
            }
            None => Err(Rejection { message: format!("no WeightSync claims the pod with UID {pod_uid}"), retryable: false }),
        }
    }

    /// Rejects a pod that no object claims, for an agent that has an object. The agent may retry while an object that may claim the pod
    /// cannot be reconciled.
    pub(super) fn unclaimed(&self, namespace: &str, pod_uid: &str, rejection: Rejection) -> Rejection {
        let inner = self.0.inner.lock();
        let holds = |hold: &&Hold| match &hold.held {
            Held::Namespace(held) => held == namespace,
            Held::Pods(pods) => pods.contains(pod_uid),
        };
        match inner.holds.values().find(holds) {
            Some(hold) => Rejection { message: format!("{}: the agent keeps what it holds", hold.why), retryable: true },
            None => rejection,
        }
    }

    /// Passes an announcement to its object's coordinator, with the problem of its address, if any; the agent receives that problem too.
    /// `from` is the caller's address, if it is known.
    pub(super) fn announce(&self, weightsync: &str, from: Option<IpAddr>, announcement: Announcement) -> Result<(), Rejection> {
        let found = self.0.inner.lock().objects.get(weightsync).map(|object| {
            let checked = object.addresses.check(&announcement.incarnation.pod_uid, from, &announcement.control_address);
            (object.announcements.clone(), checked)
        });
        let later = |message: &str| Rejection { message: message.into(), retryable: true };
        let (announcements, checked) = found.ok_or_else(|| later("the object's coordinator does not run yet"))?;
        let (arrival, answer) = match checked {
            Ok(()) => (Arrival::Accepted(announcement), Ok(())),
            Err(problem) if problem.passes() => return Err(problem.into()),
            Err(problem) => (Arrival::Refused(announcement, problem.clone()), Err(problem.into())),
        };
        announcements.try_send(arrival).map_err(|_| later("the object's coordinator is busy"))?;
        answer
    }
}
