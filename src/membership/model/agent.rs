//! An abstract agent: the rules of epochs and updates that every real agent keeps, and nothing else.
//!
//! It fences what is older, holds one epoch, and counts a version only when all of it arrived in one attempt of the epoch it is in.
//! Time, network and death are the world's.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::names::{member, slot_of};
use crate::protocol::*;

/// How long a leader waits for a silent member, and a member for a silent leader.
pub(super) const SILENCE: u64 = 3_000;
/// How long an engine takes to switch.
pub(super) const INSTALL: u64 = 20;

/// What agents say to each other.
#[derive(Debug, Clone)]
pub(super) enum PeerMessage {
    Begin { id: UpdateId, feeding: bool },
    Data { id: UpdateId },
    Activate { id: UpdateId },
    Reply { id: UpdateId, step: InstallStep },
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
    pub last_sent: Option<MemberState>,
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
            last_sent: None,
        }
    }

    pub(super) fn role(&self) -> Role {
        if self.slot == 0 { Role::Source } else { Role::Rollout }
    }

    fn installing(&self) -> bool {
        self.incoming.as_ref().is_some_and(|incoming| incoming.installing)
    }

    pub(super) fn state(&self) -> MemberState {
        let phase = if self.incoming.is_some() || self.leading.is_some() {
            MemberPhase::Updating
        } else if self.dirty {
            MemberPhase::Dirty
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
        });
        MemberState {
            member: self.prepared.as_ref().map(|request| request.member.clone()),
            incarnation: self.life.clone(),
            role: self.role(),
            phase,
            epoch: self.epoch.clone(),
            roster_digest: self.digest.clone().filter(|_| self.epoch.is_some()),
            retained: self.retained.clone(),
            installed: self.installed.clone(),
            engine,
            // A paused engine fails its probes.
            healthy: self.slot == 0 || self.healthy && !self.installing(),
            paused_until: None,
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
            return Err(refuse(RefusalCode::Internal, "told to refuse"));
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
        Ok(PrepareResponse { incarnation: self.life.clone(), data_address: self.life.instance.clone(), state: self.state() })
    }

    /// Takes a commit; the world has played a leader's probe before.
    pub(super) fn commit(&mut self, request: &Rc<CommitRequest>, wants: &mut Wants) -> Result<(), Refusal> {
        if self.refusals > 0 {
            self.refusals -= 1;
            return Err(refuse(RefusalCode::Internal, "told to refuse"));
        }
        if self.epoch.as_ref() != Some(&request.id) {
            return Err(refuse(RefusalCode::StaleEpoch, "another epoch is prepared"));
        }
        if self.commit.is_none() {
            self.commit = Some(Rc::clone(request));
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

    /// The trainer hands a version over.
    pub(super) fn publish(&mut self, version: Version, wants: &mut Wants) {
        if self.installed.as_ref().is_some_and(|held| held.version >= version) || self.pending == Some(version) {
            return;
        }
        self.pending = Some(version);
        self.retained = Some(super::names::held(version));
        self.lead(wants);
    }

    /// Begins what there is to lead in the committed epoch.
    fn lead(&mut self, wants: &mut Wants) {
        let (Some(commit), Some(prepared)) = (&self.commit, &self.prepared) else { return };
        if self.leading.is_some() {
            return;
        }
        let me = member(self.slot);
        let rollouts = prepared.roster.members.iter().filter(|other| other.role == Role::Rollout && other.name != me);
        let rollouts: Vec<usize> = rollouts.map(|other| slot_of(&other.name)).collect();
        let enough = rollouts.len() >= prepared.policy.min_ready as usize;
        let feeding = commit.feeder.as_ref() == Some(&me);
        let version = match (self.pending, &commit.current) {
            (Some(version), _) if enough => version,
            (_, Some(current)) if feeding && self.retained.as_ref() == Some(current) => current.version,
            _ => return,
        };
        let feeding = self.pending != Some(version);
        self.attempts += 1;
        let id = UpdateId { epoch: commit.id.clone(), version, attempt: self.attempts };
        for peer in &rollouts {
            wants.peers.push((*peer, PeerMessage::Begin { id: id.clone(), feeding }));
        }
        let steps = rollouts.into_iter().map(|peer| (peer, None)).collect();
        self.leading = Some(Leading { id, feeding, phase: UpdatePhase::Begin, steps });
        self.show_progress(wants);
        self.advance(wants);
    }

    fn show_progress(&self, wants: &mut Wants) {
        if let Some(leading) = &self.leading {
            wants.events.push(AgentEvent::Update { update: view(leading) });
            wants.reminders.push((SILENCE, Reminder::StepOver(leading.id.clone(), leading.phase)));
        }
    }

    /// Goes to the next step of an update when every member answered the present one.
    fn advance(&mut self, wants: &mut Wants) {
        let Some(leading) = &mut self.leading else { return };
        let open = |step: &Option<InstallStep>| match leading.phase {
            UpdatePhase::Begin => step.is_none(),
            UpdatePhase::Transfer => *step == Some(InstallStep::Receiving),
            _ => matches!(step, Some(InstallStep::Delivered | InstallStep::Installing)),
        };
        if leading.steps.values().any(open) {
            return;
        }
        let id = leading.id.clone();
        match leading.phase {
            UpdatePhase::Begin => {
                leading.phase = UpdatePhase::Transfer;
                for (peer, _) in leading.steps.iter().filter(|(_, step)| **step == Some(InstallStep::Receiving)) {
                    wants.peers.push((*peer, PeerMessage::Data { id: id.clone() }));
                }
            }
            UpdatePhase::Transfer => {
                leading.phase = UpdatePhase::Activate;
                for (peer, step) in leading.steps.iter_mut().filter(|(_, step)| **step == Some(InstallStep::Delivered)) {
                    *step = Some(InstallStep::Installing);
                    wants.peers.push((*peer, PeerMessage::Activate { id: id.clone() }));
                }
            }
            _ => {
                self.finish(wants);
                return;
            }
        }
        self.show_progress(wants);
        self.advance(wants);
    }

    fn finish(&mut self, wants: &mut Wants) {
        let Some(mut leading) = self.leading.take() else { return };
        let min_ready = self.prepared.as_ref().map_or(1, |prepared| prepared.policy.min_ready as usize);
        let installed = leading.steps.values().filter(|step| **step == Some(InstallStep::Installed)).count();
        let enough = if leading.feeding { installed == leading.steps.len() } else { installed >= min_ready };
        leading.phase = if enough { UpdatePhase::Done } else { UpdatePhase::Failed };
        if enough && self.slot == 0 && !leading.feeding {
            self.installed = Some(super::names::held(leading.id.version));
            self.pending = None;
        }
        wants.events.push(AgentEvent::Update { update: view(&leading) });
    }

    /// A peer's process is gone.
    pub(super) fn peer_gone(&mut self, peer: usize, wants: &mut Wants) {
        if let Some(epoch) = &self.epoch {
            let (id, cause) = (epoch.clone(), "connection closed".to_owned());
            wants.events.push(AgentEvent::PeerLost { id, peer: member(peer), cause });
        }
        if let Some(leading) = &mut self.leading
            && let Some(step) = leading.steps.get_mut(&peer)
            && *step != Some(InstallStep::Installed)
        {
            *step = Some(InstallStep::Failed);
            self.advance(wants);
        }
    }

    pub(super) fn peer(&mut self, from: usize, message: PeerMessage, wants: &mut Wants) {
        match message {
            PeerMessage::Begin { id, feeding } => {
                let step = self.begin(from, &id, feeding, wants);
                wants.peers.push((from, PeerMessage::Reply { id, step }));
            }
            PeerMessage::Data { id } => {
                if let Some(incoming) = self.incoming.as_mut().filter(|incoming| incoming.id == id) {
                    incoming.delivered = true;
                    incoming.heard += 1;
                    wants.reminders.push((SILENCE, Reminder::Quiet(id.clone(), incoming.heard)));
                    self.retained = Some(super::names::held(id.version));
                    wants.peers.push((from, PeerMessage::Reply { id, step: InstallStep::Delivered }));
                }
            }
            PeerMessage::Activate { id } => {
                if let Some(incoming) = self.incoming.as_mut().filter(|incoming| incoming.id == id && incoming.delivered) {
                    incoming.installing = true;
                    wants.reminders.push((INSTALL, Reminder::Installed(id, self.start)));
                }
            }
            PeerMessage::Reply { id, step } => {
                if let Some(leading) = self.leading.as_mut().filter(|leading| leading.id == id)
                    && let Some(known) = leading.steps.get_mut(&from)
                    && known.is_none_or(|known| known < step)
                {
                    *known = Some(step);
                    self.advance(wants);
                }
            }
        }
    }

    fn begin(&mut self, from: usize, id: &UpdateId, feeding: bool, wants: &mut Wants) -> InstallStep {
        if self.commit.is_none() || self.epoch.as_ref() != Some(&id.epoch) || !self.healthy {
            return InstallStep::Refused;
        }
        if self.refusals > 0 {
            self.refusals -= 1;
            return InstallStep::Refused;
        }
        let installed = self.installed.as_ref().map_or(0, |held| held.version);
        if !self.dirty && installed >= id.version {
            return if installed == id.version { InstallStep::Installed } else { InstallStep::Refused };
        }
        if self.installing() || self.incoming.as_ref().is_some_and(|incoming| incoming.id != *id && feeding) {
            return InstallStep::Refused;
        }
        let delivered = self.retained.as_ref() == Some(&super::names::held(id.version));
        self.incoming = Some(Incoming { id: id.clone(), leader: from, delivered, installing: false, heard: 0 });
        wants.reminders.push((SILENCE, Reminder::Quiet(id.clone(), 0)));
        if delivered { InstallStep::Delivered } else { InstallStep::Receiving }
    }

    pub(super) fn remind(&mut self, reminder: Reminder, wants: &mut Wants) {
        match reminder {
            Reminder::Installed(id, start) => {
                let Some(incoming) = self.incoming.take_if(|incoming| incoming.id == id && incoming.installing) else { return };
                let well = self.bad_installs == 0 && start == self.start && self.healthy;
                self.bad_installs = self.bad_installs.saturating_sub(1);
                self.dirty = !well;
                self.installed = well.then(|| super::names::held(id.version));
                let step = if well { InstallStep::Installed } else { InstallStep::Failed };
                wants.peers.push((incoming.leader, PeerMessage::Reply { id, step }));
            }
            Reminder::StepOver(id, phase) => {
                if let Some(leading) = self.leading.as_mut().filter(|leading| leading.id == id && leading.phase == phase) {
                    let epoch = leading.id.epoch.clone();
                    for (peer, step) in leading.steps.iter_mut().filter(|(_, step)| step.is_none_or(|step| step < InstallStep::Installed)) {
                        if *step != Some(InstallStep::Refused) {
                            let (id, cause) = (epoch.clone(), "it says nothing".to_owned());
                            wants.events.push(AgentEvent::PeerLost { id, peer: member(*peer), cause });
                        }
                        *step = Some(step.filter(|step| *step == InstallStep::Refused).unwrap_or(InstallStep::Failed));
                    }
                    self.advance(wants);
                }
            }
            Reminder::Quiet(id, heard) => {
                let quiet = |incoming: &mut Incoming| incoming.id == id && incoming.heard == heard && !incoming.installing;
                self.incoming.take_if(quiet);
            }
        }
    }
}

fn view(leading: &Leading) -> UpdateView {
    let progress = leading
        .steps
        .iter()
        .filter_map(|(slot, step)| Some(MemberProgress { member: member(*slot), bytes: 0, step: (*step)?, reason: None }));
    UpdateView {
        id: leading.id.epoch.clone(),
        version: leading.id.version,
        attempt: leading.id.attempt,
        phase: leading.phase,
        total_bytes: 1,
        members: progress.collect(),
        phases_ms: Vec::new(),
        failure: None,
        feeding: leading.feeding,
    }
}
