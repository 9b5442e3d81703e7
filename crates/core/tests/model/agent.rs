//! An abstract agent: the rules of epochs and updates that every real agent follows, and nothing else.
//!
//! It fences older epochs, holds one epoch, and counts a version only if all of it arrived in one attempt of its epoch. The world controls
//! time, network and failures.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use weightsync_core::protocol::*;

use super::lead::view;

/// How long a leader waits for a silent member, and a member for a silent leader.
pub(super) const SILENCE: u64 = 3_000;
/// How long an engine takes to switch.
pub(super) const INSTALL: u64 = 20;

/// Messages between agents.
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
    /// The member's step, and whether its canary caused it by a refusal.
    Reply {
        id: UpdateId,
        step: InstallStep,
        canary: bool,
    },
}

/// Timers of an agent.
#[derive(Debug, Clone)]
pub(super) enum Reminder {
    /// The engine has switched.
    Installed(UpdateId, u32),
    /// The time limit of a leader's step.
    StepOver(UpdateId, UpdatePhase),
    /// The time limit of a member without a message of this attempt.
    Quiet(UpdateId, u32),
}

/// The messages and timers that an agent requests.
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
    /// Members whose canary refused the version.
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
    /// Earlier versions that it also keeps, the last used first.
    pub earlier: Vec<HeldVersion>,
    /// Versions that its canary refused since it accepted one as high.
    pub refused: Vec<RefusedVersion>,
    /// For a source: versions that the group refused; their numbers cannot be used again.
    pub gone: BTreeSet<Version>,
    /// The epoch in which it went back by itself.
    pub went_back: Option<EpochId>,
    pub installed: Option<HeldVersion>,
    pub dirty: bool,
    pub healthy: bool,
    /// Number of the engine's start.
    pub start: u32,
    pub incoming: Option<Incoming>,
    pub leading: Option<Leading>,
    /// The version that the trainer wants to publish.
    pub pending: Option<Version>,
    pub attempts: u32,
    /// Number of requests that it will still refuse.
    pub refusals: u32,
    /// Number of installs that will still fail.
    pub bad_installs: u32,
    /// Versions that its canary will refuse.
    pub sour: Vec<Version>,
    /// Whether its engine accepts no version now.
    pub deaf: bool,
    pub last_sent: Option<MemberState>,
    /// The last report about an update that it leads. A new event stream repeats it.
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
        // As a real agent reports it: while it is dirty, it reports nothing else.
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
            model_bytes: None,
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
            proven_by: None,
            refused: self.refused.clone(),
            statements: Vec::new(),
            engine,
            // A paused engine fails its probes. (No agent counts these failures. The coordinator needs that only for a dirty engine, whose
            // state does not show that it is in an update.)
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

    /// Aborts everything in the present epoch.
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

    /// Accepts a commit; the world has played a leader's probe before.
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

    /// Fence or release: the epoch, and any older one, has ended.
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
