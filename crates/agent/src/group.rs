//! Which group this agent belongs to, and which messages may act on it.
//!
//! Pure: messages in, the new state or a [`Refusal`] out. An epoch goes prepared, committing, committed, over; a message of an older or
//! fenced epoch, for another pod or another life of this one, or in the wrong phase, changes nothing. There is at most one epoch at a
//! time. Never waits, never sends, and never looks at weights or engines.

use std::collections::BTreeSet;
use std::sync::Arc;

use weightsync_core::protocol::{
    CommitRequest, CommunicatorPlan, Digest, EngineGroups, EpochId, FenceRequest, HeldVersion, Incarnation, MemberAddress, MemberName,
    PrepareRequest, Refusal, RefusalCode, ReleaseRequest, Returned, Role, RosterMember,
};
use weightsync_core::weights::DigestAlgorithm;

/// Who this agent is, for life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Me {
    pub incarnation: Incarnation,
    pub role: Role,
    /// Port of the engine next to it; none for a source.
    pub port: Option<u16>,
}

/// A group whose every member is known and reachable.
pub struct Epoch {
    pub prepared: Arc<PrepareRequest>,
    pub commit: CommitRequest,
}

impl Epoch {
    pub fn id(&self) -> &EpochId {
        &self.prepared.id
    }

    pub fn me(&self) -> &MemberName {
        &self.prepared.member
    }

    pub fn address(&self, member: &MemberName) -> Option<&MemberAddress> {
        self.commit.addresses.iter().find(|address| &address.member == member)
    }

    /// All rollouts in the order in which bytes travel; those that the chain forgot come last, by rank.
    pub fn rollouts(&self) -> Vec<MemberName> {
        let roster = &self.prepared.roster;
        let is_rollout = |name: &&MemberName| roster.member(name).is_some_and(|member| member.role == Role::Rollout);
        let mut names: Vec<MemberName> = roster.chain.iter().filter(is_rollout).cloned().collect();
        for member in &roster.members {
            if member.role == Role::Rollout && !names.contains(&member.name) {
                names.push(member.name.clone());
            }
        }
        names
    }

    /// All members but this agent, in the order in which bytes travel, sources last.
    pub fn others(&self) -> Vec<MemberName> {
        let members = &self.prepared.roster.members;
        let sources = members.iter().filter(|member| member.role == Role::Source).map(|member| member.name.clone());
        self.rollouts().into_iter().chain(sources).filter(|name| name != self.me()).collect()
    }

    /// Who proves on commit that the data path works: the first source, or the feeder of a group without one.
    pub fn prober(&self) -> Option<&MemberName> {
        let source = self.prepared.roster.members.iter().find(|member| member.role == Role::Source).map(|member| &member.name);
        source.or(self.commit.feeder.as_ref())
    }

    pub fn has_source(&self) -> bool {
        self.prepared.roster.members.iter().any(|member| member.role == Role::Source)
    }

    /// Whether this agent feeds members that lack the current version.
    pub fn feeds(&self) -> bool {
        self.commit.feeder.as_ref() == Some(self.me())
    }

    /// The version that every rollout should hold.
    pub fn current(&self) -> Option<&HeldVersion> {
        self.commit.current.as_ref()
    }

    /// Set when the group went back to that version, or is held at it.
    pub fn returned(&self) -> Option<Returned> {
        self.commit.returned
    }

    /// Whether a member of the group that serves that version is to be taken back from it.
    pub fn left(&self, version: u64) -> bool {
        self.commit.returned.is_some_and(|returned| returned.left(version))
    }

    /// By what the tensors of a version are digested that is published in this epoch.
    pub fn algorithm(&self) -> DigestAlgorithm {
        if self.gpu_slot_bytes().is_some() || self.engines().is_some() {
            return DigestAlgorithm::Gsum64;
        }
        match self.prepared.policy.digest {
            Digest::Blake3 => DigestAlgorithm::Blake3,
            Digest::Xxh3 => DigestAlgorithm::Xxh3_128,
        }
    }

    pub fn communicator(&self) -> Option<&CommunicatorPlan> {
        self.commit.transport.nccl.as_ref()
    }

    /// Bytes of a slot on GPUs, where payloads travel between GPUs in this epoch.
    pub fn gpu_slot_bytes(&self) -> Option<u64> {
        let reads = self.commit.transport.gdr.filter(|plan| plan.on_gpus).map(|plan| plan.slot_bytes);
        self.communicator().map(|plan| plan.slot_bytes).or(reads)
    }

    /// The groups that the engines of this group join by themselves, where they do.
    pub fn engines(&self) -> Option<&EngineGroups> {
        self.commit.transport.engines.as_ref()
    }

    pub fn has_rank(&self, member: &MemberName) -> bool {
        self.communicator().is_some_and(|plan| plan.ranks_of(member).is_some())
    }

    /// The agent of that pod as leader of updates: a source, or the feeder; none for any other member.
    pub fn leader(&self, pod_uid: &str) -> Option<LedBy> {
        let leads = |member: &&RosterMember| member.role == Role::Source || self.commit.feeder.as_ref() == Some(&member.name);
        let here = |member: &&RosterMember| member.pods.first().is_some_and(|pod| pod.uid == pod_uid);
        let mut found = self.prepared.roster.members.iter().filter(leads).filter(here).map(|member| member.role);
        let first = found.next()?;
        let role = if found.any(|role| role == Role::Source) { Role::Source } else { first };
        Some(LedBy { pod_uid: pod_uid.to_owned(), role })
    }
}

/// Who leads an update, by the certificate that it shows and the roster of the epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedBy {
    pub pod_uid: String,
    pub role: Role,
}

/// Where an agent stands towards its group.
#[derive(Clone, Default)]
pub enum Standing {
    #[default]
    Idle,
    /// Asked to be in a group; others are not known yet.
    Prepared(Arc<PrepareRequest>),
    /// Knows the others; the data path is being proven.
    Committing(Arc<Epoch>),
    /// In a group that works.
    Committed(Arc<Epoch>),
}

impl Standing {
    pub fn id(&self) -> Option<&EpochId> {
        match self {
            Self::Idle => None,
            Self::Prepared(prepared) => Some(&prepared.id),
            Self::Committing(epoch) | Self::Committed(epoch) => Some(epoch.id()),
        }
    }

    pub fn committed(&self) -> Option<&Arc<Epoch>> {
        match self {
            Self::Committed(epoch) => Some(epoch),
            _ => None,
        }
    }
}

/// What a prepare or commit did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Something new; `ended` is the epoch that it replaced.
    Taken { ended: Option<EpochId> },
    /// The same message as before: answer the same, do nothing.
    Again,
}

/// The epoch rules of one agent.
pub struct Group {
    me: Me,
    standing: Standing,
    over: Option<EpochId>,
    released: Option<String>,
    /// UIDs of the pods on the latest roster. It stays when its epoch ends, until the next prepare.
    roster: BTreeSet<String>,
}

impl Group {
    pub fn new(me: Me) -> Self {
        Self { me, standing: Standing::Idle, over: None, released: None, roster: BTreeSet::new() }
    }

    pub fn me(&self) -> &Me {
        &self.me
    }

    pub fn standing(&self) -> &Standing {
        &self.standing
    }

    /// Whether an agent of that pod may speak with this one: its pod is on the latest roster.
    pub fn knows(&self, pod_uid: &str) -> bool {
        self.roster.contains(pod_uid)
    }

    /// Why it was released, until the next group asks for it.
    pub fn released(&self) -> Option<&str> {
        self.released.as_deref()
    }

    /// Leaves what it was in and stands ready for a new group.
    pub fn prepare(&mut self, request: &PrepareRequest) -> Result<Step, Refusal> {
        self.check_receiver(request)?;
        match &self.standing {
            Standing::Prepared(prepared) if prepared.id == request.id => {
                return if **prepared == *request { Ok(Step::Again) } else { Err(differs(&request.id, "prepare")) };
            }
            Standing::Committing(epoch) | Standing::Committed(epoch) if epoch.id() == &request.id => {
                return Err(refusal(
                    RefusalCode::WrongPhase,
                    format!("epoch {} is committed here, it cannot be prepared again", request.id),
                ));
            }
            standing => self.check_newer(&request.id, standing.id())?,
        }
        let ended = self.end();
        self.released = None;
        self.roster = request.roster.members.iter().flat_map(|member| &member.pods).map(|pod| pod.uid.clone()).collect();
        self.standing = Standing::Prepared(Arc::new(request.clone()));
        Ok(Step::Taken { ended })
    }

    /// Learns the others. The epoch counts as committed only after [`Group::confirm`].
    pub fn commit(&mut self, request: &CommitRequest) -> Result<(Step, Arc<Epoch>), Refusal> {
        let prepared = match &self.standing {
            Standing::Prepared(prepared) if prepared.id == request.id => prepared.clone(),
            Standing::Committing(epoch) | Standing::Committed(epoch) if epoch.id() == &request.id => {
                return if epoch.commit == *request { Ok((Step::Again, epoch.clone())) } else { Err(differs(&request.id, "commit")) };
            }
            standing => {
                self.check_newer(&request.id, standing.id())?;
                return Err(refusal(RefusalCode::WrongPhase, format!("epoch {} was never prepared here", request.id)));
            }
        };
        self.check_addresses(&prepared, request)?;
        let epoch = Arc::new(Epoch { prepared, commit: request.clone() });
        self.standing = Standing::Committing(epoch.clone());
        Ok((Step::Taken { ended: None }, epoch))
    }

    /// The data path of the committing epoch works; false when that epoch is over by now.
    pub fn confirm(&mut self, id: &EpochId) -> bool {
        match &self.standing {
            Standing::Committing(epoch) if epoch.id() == id => {
                self.standing = Standing::Committed(epoch.clone());
                true
            }
            Standing::Committed(epoch) => epoch.id() == id,
            _ => false,
        }
    }

    /// The data path of the committing epoch does not work: it may be committed once more.
    pub fn unconfirmed(&mut self, id: &EpochId) {
        if let Standing::Committing(epoch) = &self.standing
            && epoch.id() == id
        {
            self.standing = Standing::Prepared(epoch.prepared.clone());
        }
    }

    /// Ends an epoch and all before it; answers the epoch that ended here, if one did.
    pub fn fence(&mut self, request: &FenceRequest) -> Option<EpochId> {
        self.end_up_to(&request.id)
    }

    /// Leaves for good; answers whether the message was about this group, and the epoch that ended.
    pub fn release(&mut self, request: &ReleaseRequest) -> Result<Option<EpochId>, Refusal> {
        if let Some(id) = self.standing.id()
            && id != &request.id
            && id.supersedes(&request.id)
        {
            return Err(stale(&request.id, id));
        }
        let ended = self.end_up_to(&request.id);
        self.released = Some(request.reason.clone());
        Ok(ended)
    }

    /// Leaves without a message: no object claims this pod any more.
    pub fn unclaimed(&mut self, reason: String) -> Option<EpochId> {
        self.released = Some(reason);
        self.roster.clear();
        self.end()
    }

    /// The committed epoch that a message is about.
    pub fn acting(&self, id: &EpochId) -> Result<Arc<Epoch>, Refusal> {
        match &self.standing {
            Standing::Committed(epoch) if epoch.id() == id => Ok(epoch.clone()),
            Standing::Prepared(prepared) if &prepared.id == id => Err(not_committed(id)),
            Standing::Committing(epoch) if epoch.id() == id => Err(not_committed(id)),
            standing => {
                self.check_newer(id, standing.id())?;
                Err(refusal(RefusalCode::WrongPhase, format!("epoch {id} was never committed here")))
            }
        }
    }

    /// The epoch whose data path may carry bytes; a probe may come while it is being committed.
    pub fn carrying(&self, id: &EpochId, probe: bool) -> Result<Arc<Epoch>, Refusal> {
        match &self.standing {
            Standing::Committing(epoch) if probe && epoch.id() == id => Ok(epoch.clone()),
            _ => self.acting(id),
        }
    }

    fn end_up_to(&mut self, id: &EpochId) -> Option<EpochId> {
        if self.over.as_ref().is_none_or(|over| id.supersedes(over)) {
            self.over = Some(id.clone());
        }
        let ends = self.standing.id().is_some_and(|current| current == id || id.supersedes(current));
        if ends { self.end() } else { None }
    }

    fn end(&mut self) -> Option<EpochId> {
        let ended = std::mem::take(&mut self.standing).id().cloned()?;
        if self.over.as_ref().is_none_or(|over| ended.supersedes(over)) {
            self.over = Some(ended.clone());
        }
        Some(ended)
    }

    fn check_newer(&self, id: &EpochId, current: Option<&EpochId>) -> Result<(), Refusal> {
        match [self.over.as_ref(), current].into_iter().flatten().find(|known| !id.supersedes(known)) {
            Some(known) => Err(stale(id, known)),
            None => Ok(()),
        }
    }

    fn check_receiver(&self, request: &PrepareRequest) -> Result<(), Refusal> {
        let Some(member) = request.roster.member(&request.member) else {
            return Err(refusal(RefusalCode::Invalid, format!("the roster of epoch {} does not name {}", request.id, request.member)));
        };
        let wrong = |what: String| Err(refusal(RefusalCode::WrongIncarnation, what));
        match member.pods.first() {
            Some(pod) if pod.uid == self.me.incarnation.pod_uid => {}
            Some(pod) => {
                return wrong(format!("{} is in pod {}, this agent is in pod {}", member.name, pod.uid, self.me.incarnation.pod_uid));
            }
            None => return wrong(format!("the roster names no pod of {}", member.name)),
        }
        if member.role != self.me.role {
            return wrong(format!("{} is to be a {:?}, this agent is a {:?}", member.name, member.role, self.me.role));
        }
        if member.port.is_some() && member.port != self.me.port {
            return wrong(format!("{} has its engine on port {:?}, this agent serves port {:?}", member.name, member.port, self.me.port));
        }
        Ok(())
    }

    fn check_addresses(&self, prepared: &PrepareRequest, request: &CommitRequest) -> Result<(), Refusal> {
        let invalid = |what: String| Err(refusal(RefusalCode::Invalid, what));
        for member in &prepared.roster.members {
            let mut found = request.addresses.iter().filter(|address| address.member == member.name);
            match (found.next(), found.next()) {
                (Some(address), None) if member.name == prepared.member && address.incarnation != self.me.incarnation => {
                    return Err(refusal(
                        RefusalCode::WrongIncarnation,
                        format!(
                            "epoch {} was prepared by instance {} of {}, this is instance {}",
                            request.id, address.incarnation.instance, member.name, self.me.incarnation.instance
                        ),
                    ));
                }
                (Some(address), None) => {
                    let head = member.pods.first();
                    let own = |at: &str| head.and_then(|head| head.has_listener(at));
                    if let Some(foreign) = [&address.control, &address.data].into_iter().find(|at| own(at) == Some(false)) {
                        return invalid(format!("{foreign} is not an address of the pod of {}: it is not dialled", member.name));
                    }
                }
                (None, _) => return invalid(format!("epoch {} has no address of {}", request.id, member.name)),
                (Some(_), Some(_)) => return invalid(format!("epoch {} has two addresses of {}", request.id, member.name)),
            }
        }
        match &request.feeder {
            Some(feeder) if prepared.roster.member(feeder).is_none() => {
                invalid(format!("the feeder {feeder} of epoch {} is not in its roster", request.id))
            }
            _ if request.secret.is_empty() => invalid(format!("epoch {} has no secret", request.id)),
            _ => Ok(()),
        }
    }
}

pub fn refusal(code: RefusalCode, message: impl Into<String>) -> Refusal {
    Refusal { code, message: message.into() }
}

fn stale(id: &EpochId, known: &EpochId) -> Refusal {
    refusal(RefusalCode::StaleEpoch, format!("epoch {id} is over, {known} came after it"))
}

fn not_committed(id: &EpochId) -> Refusal {
    refusal(RefusalCode::WrongPhase, format!("epoch {id} is prepared but not committed here"))
}

fn differs(id: &EpochId, what: &str) -> Refusal {
    refusal(RefusalCode::Invalid, format!("a second {what} of epoch {id} says something else than the first"))
}
