//! What all parts of an agent share: its group, its facts, and who wants to hear of them.
//!
//! Carries out what [`Group`] decides (ends epochs, wakes waiters), puts the facts of the parts together into one [`MemberState`], and
//! lets data streams in or not. It decides nothing about weights.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::edge::ProbeStore;
use super::events::Events;
use super::group::{Epoch, Group, Me, Standing, Step, refusal};
use super::locks::lock;
use super::statements::Statements;
use weightsync_core::protocol::{
    BucketHeader, CommitRequest, DataHello, EngineFacts, EpochId, FenceRequest, HeldVersion, Hindrance, LONGEST_MEASUREMENT, MemberFabric,
    MemberName, MemberPhase, MemberState, MixedWindow, PreflightReport, PrepareRequest, ProvenBy, Received, Refusal, RefusalCode,
    RefusedVersion, ReleaseRequest, STATEMENTS, UpdateId,
};
use weightsync_net::identity::PeerIdentity;
use weightsync_transport::{Admission, BucketStore, Fault, Wants};

/// Facts that the parts of an agent know and that its [`MemberState`] shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Kept complete and verified.
    pub retained: Option<HeldVersion>,
    /// Kept as well, the last used first.
    pub earlier: Vec<HeldVersion>,
    /// Confirmed by the engine's present start; for a source, the last version that reached `minReady`.
    pub installed: Option<HeldVersion>,
    /// What shows that the engine holds its bytes; none where this agent did not switch it.
    pub proven_by: Option<ProvenBy>,
    /// Versions that the canary refused, the highest last.
    pub refused: Vec<RefusedVersion>,
    pub engine: Option<EngineFacts>,
    /// Starts of the engine that took the place of a known one.
    pub engine_restarts: u32,
    /// Whether the engine passes its probes.
    pub healthy: bool,
    /// Whether the engine's front answers while the engine computes nothing.
    pub wedged: bool,
    /// Until when the engine may be paused by us, in ms since 1970.
    pub paused_until: Option<u64>,
    /// When the engine answered requests while a version was loaded, the oldest first.
    pub mixed: Vec<MixedWindow>,
    pub updating: bool,
    /// Whether the engine may hold a mixture.
    pub dirty: bool,
    /// Whether it is not known what the engine holds.
    pub unproven: bool,
    pub engine_down: bool,
    /// By which way members on this member's GPU get the bytes in an epoch, for a person.
    pub lent: Option<(EpochId, String)>,
    /// What the pre-flight of an epoch found that this agent leads.
    pub preflight: Option<Box<PreflightReport>>,
    /// How the last version came that was received.
    pub received: Option<Received>,
    /// What the memory of others is read with.
    pub fabric: Option<Box<MemberFabric>>,
    pub reason: Option<String>,
}

impl Facts {
    /// The versions that they name, each once.
    fn versions(&self) -> Vec<&HeldVersion> {
        let refused = self.refused.iter().map(|refused| &refused.held);
        let mut named: Vec<&HeldVersion> = Vec::new();
        for held in self.installed.iter().chain(&self.retained).chain(&self.earlier).chain(refused) {
            if !named.contains(&held) {
                named.push(held);
            }
        }
        named
    }
}

/// The shared parts of one agent.
pub struct Core {
    me: Me,
    group: Mutex<Grouped>,
    standing: watch::Sender<Standing>,
    facts: Mutex<Facts>,
    events: Events,
    expected: Mutex<Option<Expected>>,
    current: watch::Sender<Option<HeldVersion>>,
    hindrance: Mutex<Option<Hindrance>>,
    why_over: Mutex<String>,
    statements: Statements,
}

struct Grouped {
    group: Group,
    /// Cancelled when the epoch ends.
    over: CancellationToken,
}

struct Expected {
    update: UpdateId,
    store: Arc<dyn BucketStore>,
    taken: bool,
}

impl Core {
    pub fn new(me: Me, facts: Facts) -> Arc<Self> {
        let group = Group::new(me.clone());
        let statements = Statements::default();
        let events = Events::new(state(&group, &facts, &statements));
        Arc::new(Self {
            me,
            group: Mutex::new(Grouped { group, over: CancellationToken::new() }),
            standing: watch::Sender::default(),
            facts: Mutex::new(facts),
            events,
            expected: Mutex::new(None),
            current: watch::Sender::new(None),
            hindrance: Mutex::default(),
            why_over: Mutex::default(),
            statements,
        })
    }

    pub fn me(&self) -> &Me {
        &self.me
    }

    pub fn events(&self) -> &Events {
        &self.events
    }

    /// What sources signed about versions.
    pub fn statements(&self) -> &Statements {
        &self.statements
    }

    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    /// The committed epoch.
    pub fn epoch(&self) -> Option<Arc<Epoch>> {
        self.standing.borrow().committed().cloned()
    }

    /// The version that every rollout should hold, as far as this agent was informed.
    pub fn current(&self) -> Option<HeldVersion> {
        self.current.borrow().clone()
    }

    pub fn watch_current(&self) -> watch::Receiver<Option<HeldVersion>> {
        self.current.subscribe()
    }

    /// Notes the version that every rollout should hold. A controller that knows none says nothing about what an agent knows.
    pub fn learn_current(&self, current: Option<&HeldVersion>) {
        if let Some(current) = current {
            self.current.send_if_modified(|known| {
                let changed = known.as_ref() != Some(current);
                *known = Some(current.clone());
                changed
            });
        }
    }

    /// The same for a source: it leads updates, so it may know of a later version than the controller when that answered. Going back comes with
    /// an epoch only.
    pub fn learn_later(&self, current: Option<&HeldVersion>) {
        let left = |current: &HeldVersion| self.epoch().is_some_and(|epoch| epoch.left(current.version));
        let later = |current: &HeldVersion| self.current().is_none_or(|known| current.version > known.version);
        self.learn_current(current.filter(|current| later(current) && !left(current)));
    }

    /// Notes why no group can take what is published, as the controller sees it.
    pub fn learn_hindrance(&self, hindrance: Option<Hindrance>) {
        *lock(&self.hindrance) = hindrance;
    }

    /// Why no group can take what is published, by the last word of the controller.
    pub fn hindrance(&self) -> Option<Hindrance> {
        lock(&self.hindrance).clone()
    }

    /// Whether an agent of that pod may speak with this one.
    pub fn knows(&self, pod_uid: &str) -> bool {
        lock(&self.group).group.knows(pod_uid)
    }

    pub fn released(&self) -> Option<String> {
        lock(&self.group).group.released().map(str::to_owned)
    }

    pub fn set_facts(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut lock(&self.facts));
        self.announce();
    }

    pub fn why_over(&self) -> String {
        let why = lock(&self.why_over).clone();
        if why.is_empty() { "there was none".into() } else { why }
    }

    /// Takes a prepare. The epoch before it, if any, is over when this returns.
    pub fn prepare(&self, request: &PrepareRequest) -> Result<Step, Refusal> {
        self.ends_by(|| request.ends_others_because());
        let step = self.regroup(|grouped| grouped.group.prepare(request))?;
        Ok(step)
    }

    /// Takes a commit; the epoch works only after [`Core::confirm`].
    pub fn commit(&self, request: &CommitRequest) -> Result<(Step, Arc<Epoch>), Refusal> {
        self.regroup(|grouped| grouped.group.commit(request))
    }

    /// The data path of the committing epoch works; false when that epoch is over by now.
    pub fn confirm(&self, epoch: &Epoch) -> bool {
        // Before the standing changes: who waits for the epoch finds its version known.
        self.learn_current(epoch.current());
        self.regroup(|grouped| grouped.group.confirm(epoch.id()))
    }

    /// The data path of the committing epoch does not work.
    pub fn unconfirmed(&self, id: &EpochId) {
        self.regroup(|grouped| grouped.group.unconfirmed(id));
    }

    /// Ends an epoch and all before it; true when one ended here.
    pub fn fence(&self, request: &FenceRequest) -> bool {
        self.ends_by(|| request.reason.clone());
        self.regroup(|grouped| grouped.group.fence(request).is_some())
    }

    pub fn release(&self, request: &ReleaseRequest) -> Result<(), Refusal> {
        self.ends_by(|| format!("released: {}", request.reason));
        self.regroup(|grouped| grouped.group.release(request).map(|_| ()))
    }

    /// Leaves the group: no object claims this pod any more.
    pub fn unclaimed(&self, reason: &str) {
        self.ends_by(|| reason.to_owned());
        self.regroup(|grouped| grouped.group.unclaimed(reason.to_owned()));
    }

    /// The committed epoch that a message is about.
    pub fn acting(&self, id: &EpochId) -> Result<Arc<Epoch>, Refusal> {
        lock(&self.group).group.acting(id)
    }

    /// The epoch whose communicator is to be joined: committed, or being committed.
    pub fn joining(&self, id: &EpochId) -> Result<Arc<Epoch>, Refusal> {
        lock(&self.group).group.carrying(id, true)
    }

    /// Cancelled when the present epoch ends; already cancelled when `id` is not the present one.
    pub fn over(&self, id: &EpochId) -> CancellationToken {
        let grouped = lock(&self.group);
        if grouped.group.standing().id() == Some(id) {
            return grouped.over.clone();
        }
        let over = CancellationToken::new();
        over.cancel();
        over
    }

    /// Lets the data stream of an attempt in, once.
    pub fn expect(&self, update: UpdateId, store: Arc<dyn BucketStore>) {
        *lock(&self.expected) = Some(Expected { update, store, taken: false });
    }

    pub fn expect_no_more(&self, update: &UpdateId) {
        let mut expected = lock(&self.expected);
        if expected.as_ref().is_some_and(|expected| &expected.update == update) {
            *expected = None;
        }
    }

    /// Notifies all listeners at once that a peer of an epoch cannot be reached.
    pub fn peer_lost(&self, id: &EpochId, peer: &MemberName, cause: &str) {
        tracing::warn!(epoch = %id, %peer, cause, "lost a peer");
        self.events.peer_lost(id, peer, cause);
    }

    /// Notes why the present epoch is about to end, before anybody sees that it did. A message that ends nothing leaves the word of the one
    /// that did.
    fn ends_by(&self, why: impl FnOnce() -> String) {
        if self.standing.borrow().id().is_some() {
            *lock(&self.why_over) = why();
        }
    }

    fn regroup<T>(&self, change: impl FnOnce(&mut Grouped) -> T) -> T {
        let mut grouped = lock(&self.group);
        let before = grouped.group.standing().id().cloned();
        let outcome = change(&mut grouped);
        let after = grouped.group.standing().clone();
        if before.as_ref() != after.id() {
            std::mem::take(&mut grouped.over).cancel();
        }
        // Under the lock, so that standings are seen in the order in which they came.
        self.standing.send_replace(after);
        self.events.set_state(state(&grouped.group, &lock(&self.facts), &self.statements));
        outcome
    }

    fn announce(&self) {
        let grouped = lock(&self.group);
        self.events.set_state(state(&grouped.group, &lock(&self.facts), &self.statements));
    }
}

impl Admission for Core {
    fn expects(&self, from: IpAddr) -> bool {
        let standing = self.standing.borrow();
        let (Standing::Committing(epoch) | Standing::Committed(epoch)) = &*standing else { return false };
        let has = |address: &str| address.parse::<SocketAddr>().is_ok_and(|address| address.ip().to_canonical() == from);
        epoch.commit.addresses.iter().any(|member| has(&member.data) || has(&member.control))
    }

    fn admit(&self, hello: &DataHello, peer: Option<&PeerIdentity>) -> Result<Arc<dyn BucketStore>, Refusal> {
        let epoch = lock(&self.group).group.carrying(&hello.update.epoch, hello.probe)?;
        if &hello.to != epoch.me() {
            return Err(refusal(RefusalCode::WrongIncarnation, format!("{} was meant, this is {}", hello.to, epoch.me())));
        }
        // Digests are compared in constant time; the time of a comparison of texts would show how many characters agree.
        if blake3::hash(hello.secret.as_bytes()) != blake3::hash(epoch.commit.secret.as_bytes()) {
            return Err(refusal(RefusalCode::Forbidden, "the secret is not that of the epoch"));
        }
        if hello.tls != epoch.prepared.policy.data_tls {
            return Err(refusal(RefusalCode::Forbidden, "the stream and the epoch differ in the use of TLS"));
        }
        if hello.tls {
            check_sender(&epoch, &hello.from, peer)?;
        }
        // Who sends must not choose what this member dials.
        let reported = |(name, address): &(MemberName, String)| epoch.address(name).is_some_and(|known| known.data == *address);
        if let Some((name, address)) = hello.rest.iter().find(|next| !reported(next)) {
            return Err(refusal(RefusalCode::Forbidden, format!("{address} is not where {name} is by epoch {}", epoch.id())));
        }
        if hello.preflight {
            if lock(&self.facts).updating {
                return Err(refusal(RefusalCode::WrongPhase, "an update runs here, and nothing is measured meanwhile"));
            }
            return Ok(Arc::new(ProbeStore::new(LONGEST_MEASUREMENT)));
        }
        if hello.probe {
            return Ok(Arc::new(ProbeStore::new(LONGEST_PROBE)));
        }
        if hello.carried.as_ref().is_some_and(|carried| carried.passing.contains(&hello.to)) {
            return Ok(Arc::new(PassingStore));
        }
        let mut expected = lock(&self.expected);
        match expected.as_mut().filter(|expected| expected.update == hello.update) {
            Some(expected) if !expected.taken => {
                expected.taken = true;
                Ok(expected.store.clone())
            }
            Some(_) => Err(refusal(RefusalCode::WrongPhase, "the stream of this attempt came already")),
            None => Err(refusal(
                RefusalCode::WrongPhase,
                format!("attempt {} of version {} is not open here", hello.update.attempt, hello.update.version),
            )),
        }
    }
}

/// The secret is known to all members of the epoch: who sends is what its certificate says.
fn check_sender(epoch: &Epoch, from: &MemberName, peer: Option<&PeerIdentity>) -> Result<(), Refusal> {
    let Some(pod) = epoch.address(from).map(|address| &address.incarnation.pod_uid) else {
        return Err(refusal(RefusalCode::Forbidden, format!("{from} is no member of epoch {}", epoch.id())));
    };
    match peer {
        Some(PeerIdentity::Agent { weightsync, pod_uid, .. }) if *weightsync == epoch.id().weightsync && pod_uid == pod => Ok(()),
        Some(peer) => {
            Err(refusal(RefusalCode::Forbidden, format!("the stream is {from}'s by its hello and {}'s by its certificate", peer.uri())))
        }
        None => Err(refusal(RefusalCode::Forbidden, format!("the certificate of the stream names no one, and its hello {from}"))),
    }
}

/// Takes part in a stream because the communicator needs every rank, and keeps nothing.
struct PassingStore;

impl BucketStore for PassingStore {
    fn wants(&self) -> Wants {
        Wants::Nothing
    }

    fn write(&self, _offset: u64, _part: &[u8]) -> Result<(), Refusal> {
        Ok(())
    }

    fn complete(&self, _header: &BucketHeader, _digest: u128) -> Result<(), Refusal> {
        Ok(())
    }

    fn end(&self) -> Result<(), Refusal> {
        Ok(())
    }

    fn broken(&self, _fault: Fault<'_>, _cause: &str) {}
}

/// Longest probe in bytes.
const LONGEST_PROBE: u64 = 1024;

fn state(group: &Group, facts: &Facts, statements: &Statements) -> MemberState {
    let standing = group.standing();
    let prepared = match standing {
        Standing::Idle => None,
        Standing::Prepared(prepared) => Some(prepared),
        Standing::Committing(epoch) | Standing::Committed(epoch) => Some(&epoch.prepared),
    };
    let phase = match standing {
        _ if facts.dirty => MemberPhase::Dirty,
        _ if facts.unproven => MemberPhase::Unknown,
        _ if facts.engine_down => MemberPhase::EngineDown,
        _ if facts.updating => MemberPhase::Updating,
        Standing::Committed(_) => MemberPhase::Ready,
        Standing::Prepared(_) | Standing::Committing(_) => MemberPhase::Prepared,
        Standing::Idle => MemberPhase::Idle,
    };
    MemberState {
        member: prepared.map(|prepared| prepared.member.clone()),
        incarnation: group.me().incarnation.clone(),
        role: group.me().role,
        phase,
        epoch: standing.id().cloned(),
        transport: match standing {
            Standing::Committing(epoch) | Standing::Committed(epoch) => {
                let lent = facts.lent.as_ref().filter(|(id, _)| id == epoch.id());
                Some(epoch.commit.transport.clone().noted(lent.map(|(_, how)| how.as_str())))
            }
            Standing::Idle | Standing::Prepared(_) => None,
        },
        roster_digest: prepared.map(|prepared| prepared.roster.digest()),
        retained: facts.retained.clone(),
        earlier: facts.earlier.clone(),
        returned: match standing {
            Standing::Committing(epoch) | Standing::Committed(epoch) => epoch.returned(),
            Standing::Idle | Standing::Prepared(_) => None,
        },
        installed: facts.installed.clone(),
        proven_by: facts.proven_by,
        refused: facts.refused.clone(),
        statements: facts.versions().into_iter().filter_map(|held| statements.about(held)).take(STATEMENTS).collect(),
        engine: facts.engine.clone(),
        engine_restarts: facts.engine_restarts,
        healthy: facts.healthy,
        wedged: facts.wedged,
        paused_until: facts.paused_until,
        mixed: facts.mixed.clone(),
        preflight: facts.preflight.clone().filter(|report| standing.id() == Some(&report.id)),
        received: facts.received.clone(),
        fabric: match standing {
            Standing::Committing(epoch) | Standing::Committed(epoch) if epoch.commit.transport.gdr.is_some() => facts.fabric.clone(),
            _ => None,
        },
        reason: facts.reason.clone().or_else(|| group.released().map(str::to_owned)),
    }
}
