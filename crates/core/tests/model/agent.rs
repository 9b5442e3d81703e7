//! An abstract agent: the rules of epochs and updates that every real agent keeps, and nothing else.
//!
//! It fences what is older, holds one epoch, and counts a version only when all of it arrived in one attempt of the epoch it is in.
//! Time, network and death are the world's.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use weightsync_core::protocol::*;

use super::lead::view;

/// How long a leader waits for a silent member, and a member for a silent leader.
pub(super) const SILENCE: u64 = 3_000;
/// How long an engine takes to switch.
pub(super) const INSTALL: u64 = 20;

/// What agents say to each other.
#[derive(Debug, Clone)]
pub(super) enum PeerMessage {
    Begin {
        id: UpdateId,
        feeding: bool,
    },
    Data {
        id: UpdateId,
    },
    Activate {
        id: UpdateId,
    },
    /// Where it stands, and whether that is because its canary refused what its engine answers.
    Reply {
        id: UpdateId,
        step: InstallStep,
        canary: bool,
    },
}

/// What an agent reminds itself of.
#[derive(Debug, Clone)]
pub(super) enum Reminder {
    /// The engine is done switching.
    Installed(UpdateId, u32),
    /// A leader's step has lasted long enough.
    StepOver(UpdateId, UpdatePhase),
    /// A member heard nothing of this attempt.
    Quiet(UpdateId, u32),
}

/// What an agent wants sent.
#[derive(Debug, Default)]
pub(super) struct Wants {
    pub peers: Vec<(usize, PeerMessage)>,
    pub events: Vec<AgentEvent>,
    pub reminders: Vec<(u64, Reminder)>,
}

#[derive(Debug, Clone)]
pub(super) struct Incoming {
    pub id: UpdateId,
    pub leader: usize,
    pub delivered: bool,
    pub installing: bool,
    pub heard: u32,
}

#[derive(Debug, Clone)]
pub(super) struct Leading {
    pub id: UpdateId,
    pub feeding: bool,
    pub phase: UpdatePhase,
    pub steps: BTreeMap<usize, Option<InstallStep>>,
    /// Those whose canary refused the version.
    pub refused: BTreeSet<usize>,
}

#[derive(Clone)]
pub(super) struct Agent {
    pub slot: usize,
    pub life: Incarnation,
    pub fenced: Option<EpochId>,
    pub epoch: Option<EpochId>,
    pub prepared: Option<Rc<PrepareRequest>>,
    digest: Option<String>,
    pub commit: Option<Rc<CommitRequest>>,
    pub retained: Option<HeldVersion>,
    /// Earlier versions that it keeps as well, the last used first.
    pub earlier: Vec<HeldVersion>,
    /// Versions that its canary refused since it took one as high.
    pub refused: Vec<RefusedVersion>,
    /// Of a source: versions that the group refused, whose numbers are gone.
    pub gone: BTreeSet<Version>,
    /// The epoch in which it went back by itself.
    pub went_back: Option<EpochId>,
    pub installed: Option<HeldVersion>,
    pub dirty: bool,
    pub healthy: bool,
    /// Which start of the engine.
    pub start: u32,
    pub incoming: Option<Incoming>,
    pub leading: Option<Leading>,
    /// The version that the trainer wants out.
    pub pending: Option<Version>,
    pub attempts: u32,
    /// Requests that it will still refuse.
    pub refusals: u32,
    /// Installs that will still fail.
    pub bad_installs: u32,
    /// Versions whose answers its canary will refuse.
    pub sour: Vec<Version>,
    /// Whether its engine takes no version now.
    pub deaf: bool,
    pub last_sent: Option<MemberState>,
    /// What it said last of an update that it leads: anyone who listens again hears it.
    pub last_update: Option<UpdateView>,
}

fn refuse(code: RefusalCode, message: &str) -> Refusal {
    Refusal { code, message: message.to_owned() }
}

impl Agent {
    pub(super) fn new(slot: usize, life: Incarnation, start: u32) -> Self {
        Self {
            slot,
            life,
            fenced: None,
            epoch: None,
            prepared: None,
            digest: None,
            commit: None,
            retained: None,
            earlier: Vec::new(),
            refused: Vec::new(),
            gone: BTreeSet::new(),
            went_back: None,
            installed: None,
            dirty: false,
            healthy: true,
            start,
            incoming: None,
            leading: None,
            pending: None,
            attempts: 0,
            refusals: 0,
            bad_installs: 0,
            sour: Vec::new(),
            deaf: false,
            last_sent: None,
            last_update: None,
        }
    }

    pub(super) fn role(&self) -> Role {
        if self.slot == 0 { Role::Source } else { Role::Rollout }
    }

    pub(super) fn installing(&self) -> bool {
        self.incoming.as_ref().is_some_and(|incoming| incoming.installing)
    }

    pub(super) fn state(&self) -> MemberState {
        // As the real one says it: while it is dirty it says nothing else.
        let phase = if self.dirty {
            MemberPhase::Dirty
        } else if self.incoming.is_some() || self.leading.is_some() {
            MemberPhase::Updating
        } else if self.commit.is_some() {
            MemberPhase::Ready
        } else if self.epoch.is_some() {
            MemberPhase::Prepared
        } else {
            MemberPhase::Idle
        };
        let engine = (self.slot != 0).then(|| EngineFacts {
            kind: String::new(),
            server_version: String::new(),
            size: super::names::size(self.slot),
            url: String::new(),
            delivery: String::new(),
            answer_version: String::new(),
            unchecked: None,
            groups: None,
        });
        MemberState {
            member: self.prepared.as_ref().map(|request| request.member.clone()),
            incarnation: self.life.clone(),
            role: self.role(),
            phase,
            epoch: self.epoch.clone(),
            transport: None,
            roster_digest: self.digest.clone().filter(|_| self.epoch.is_some()),
            retained: self.retained.clone(),
            earlier: self.earlier.clone(),
            returned: self.returned(),
            installed: self.installed.clone(),
            refused: self.refused.clone(),
            statements: Vec::new(),
            engine,
            // A paused engine fails its probes. (No agent counts them; the coordinator needs that only of a dirty one, whose state does not say
            // that it is in an update.)
            healthy: self.slot == 0 || self.healthy && (self.dirty || !self.paused()),
            wedged: false,
            engine_restarts: 0,
            paused_until: None,
            received: None,
            fabric: None,
            mixed: Vec::new(),
            preflight: None,
            reason: None,
        }
    }

    fn is_stale(&self, id: &EpochId) -> bool {
        self.fenced.as_ref().is_some_and(|fenced| !id.supersedes(fenced))
            || self.epoch.as_ref().is_some_and(|epoch| epoch != id && !id.supersedes(epoch))
    }

    /// Ends whatever runs in the present epoch.
    fn abort(&mut self, wants: &mut Wants) {
        if self.installing() {
            self.dirty = true;
            self.installed = None;
        }
        self.incoming = None;
        if let Some(mut leading) = self.leading.take() {
            leading.phase = UpdatePhase::Failed;
            wants.events.push(AgentEvent::Update { update: view(&leading) });
        }
    }

    pub(super) fn prepare(&mut self, request: &Rc<PrepareRequest>, wants: &mut Wants) -> Result<PrepareResponse, Refusal> {
        if self.refusals > 0 {
            self.refusals -= 1;
            return Err(refuse(RefusalCode::Internal, "asked to refuse"));
        }
        if self.is_stale(&request.id) {
            return Err(refuse(RefusalCode::StaleEpoch, "older than what is here"));
        }
        let mine = request.roster.member(&request.member).and_then(|member| member.pods.first());
        if mine.is_none_or(|pod| pod.uid != self.life.pod_uid) {
            return Err(refuse(RefusalCode::WrongIncarnation, "another pod is meant"));
        }
        if self.epoch.as_ref() != Some(&request.id) {
            self.abort(wants);
            self.epoch = Some(request.id.clone());
            self.prepared = Some(Rc::clone(request));
            self.digest = Some(request.roster.digest());
            self.commit = None;
        }
        Ok(PrepareResponse {
            incarnation: self.life.clone(),
            data_address: self.life.instance.clone(),
            gpus: GpuReport::default(),
            fabric: FabricReport::default(),
            state: self.state(),
        })
    }

    /// Takes a commit; the world has played a leader's probe before.
    pub(super) fn commit(&mut self, request: &Rc<CommitRequest>, wants: &mut Wants) -> Result<(), Refusal> {
        if self.refusals > 0 {
            self.refusals -= 1;
            return Err(refuse(RefusalCode::Internal, "asked to refuse"));
        }
        if self.epoch.as_ref() != Some(&request.id) {
            return Err(refuse(RefusalCode::StaleEpoch, "another epoch is prepared"));
        }
        if self.commit.is_none() {
            self.commit = Some(Rc::clone(request));
            self.hear_of_versions();
            self.lead(wants);
        }
        Ok(())
    }

    /// Fence or release: the epoch, or any older one, is over.
    pub(super) fn end(&mut self, id: &EpochId, wants: &mut Wants) {
        if self.fenced.as_ref().is_none_or(|fenced| id.supersedes(fenced)) {
            self.fenced = Some(id.clone());
        }
        if self.epoch.as_ref().is_some_and(|epoch| !epoch.supersedes(id)) {
            self.abort(wants);
            self.epoch = None;
            self.commit = None;
        }
    }
}
