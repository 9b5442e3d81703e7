//! A world: one controller with the real membership, abstract agents, a network, an API server, and a clock that jumps from one event to
//! the next. A world is deterministic: only faults make worlds differ.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use weightsync_core::membership::{Decision, Membership, MembershipConfig, MembershipView, Observation, Restored};
use weightsync_core::plan::{Candidate, LeftOut, LeftOutCode};
use weightsync_core::protocol::*;

use super::acts::Act;
use super::agent::{Agent, Reminder, Wants};
use super::event::{Event, Slot};
use super::law::Law;
use super::names::{config, member, size};

/// Time of one message through the network, in ms.
pub(super) const LATENCY: u64 = 2;
const HEARTBEAT: u64 = 1_000;

#[derive(Clone)]
pub(super) struct World {
    pub now: u64,
    sequence: u64,
    pub queue: BTreeMap<(u64, u64), Event>,
    next_beat: u64,
    /// Shared with copies of this world, until either takes a step.
    pub membership: Rc<Membership>,
    pub reign: u32,
    /// The policies of the object.
    pub rules: MembershipConfig,
    /// Actions that remain, without the faults.
    pub acts: VecDeque<Act>,
    pub stored_epoch: u64,
    /// The controller that wrote it.
    pub stored_by: u32,
    pub stored_version: Option<HeldVersion>,
    /// The highest version that counted, if the group went back from it.
    stored_highest: Version,
    stored_refused: Vec<Version>,
    pub api_down: bool,
    pub slots: Vec<Slot>,
    lives: u32,
    /// Versions for which a controller saw a statement.
    proven: BTreeSet<(u32, Version)>,
    /// The version that the trainer wants to publish.
    pub wanted: Version,
    pub law: Law,
    /// Events that were played.
    pub steps: u64,
    /// Whether another controller took over.
    pub rival: bool,
    pub trace: Option<Vec<String>>,
    /// A message that is held until it can do most harm, and the epoch before which it is not released.
    pub held: Option<(u64, Event)>,
}

impl World {
    /// A source and rollouts before their first announcements.
    pub(super) fn new(rollouts: usize, min_ready: u32) -> Self {
        Self::with_rules(rollouts, config(min_ready))
    }

    pub(super) fn with_rules(rollouts: usize, rules: MembershipConfig) -> Self {
        let slot = Slot {
            generation: 0,
            exists: false,
            terminating: false,
            agent: None,
            frozen: false,
            backlog: Vec::new(),
            attached: None,
            stream_floor: 0,
            slow: (0, 0),
            unreachable_until: 0,
            guilty: false,
            sour: Vec::new(),
            deaf: false,
            engine_start: 0,
            lies: false,
        };
        let mut world = Self {
            now: 0,
            sequence: 0,
            queue: BTreeMap::new(),
            next_beat: HEARTBEAT,
            membership: Rc::new(Membership::new(rules.clone(), Restored::default())),
            reign: 1,
            rules,
            acts: VecDeque::new(),
            stored_epoch: 0,
            stored_by: 1,
            stored_version: None,
            stored_highest: 0,
            stored_refused: Vec::new(),
            api_down: false,
            slots: vec![slot; rollouts + 1],
            lives: 0,
            proven: BTreeSet::new(),
            wanted: 1,
            law: Law::default(),
            steps: 0,
            rival: false,
            trace: None,
            held: None,
        };
        for slot in 0..=rollouts {
            world.new_pod(slot);
        }
        world
    }

    pub(super) fn post(&mut self, delay: u64, event: Event) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), event);
    }

    /// Present extra delay of a message from that slot.
    fn slowness(&self, slot: usize) -> u64 {
        let (by, until) = self.slots[slot].slow;
        if self.now < until { by } else { 0 }
    }

    fn observe_later(&mut self, delay: u64, observation: Observation) {
        let event = Event::Observe { reign: self.reign, observation: Rc::new(observation), stream_of: None };
        self.post(delay, event);
    }

    /// Sends over an agent's event stream, which keeps the order.
    pub(super) fn stream(&mut self, slot: usize, observation: Observation) {
        let Some(reign) = self.slots[slot].attached.filter(|reign| *reign == self.reign) else { return };
        let at = (self.now + LATENCY + self.slowness(slot)).max(self.slots[slot].stream_floor);
        self.slots[slot].stream_floor = at;
        let event = Event::Observe { reign, observation: Rc::new(observation), stream_of: Some(slot) };
        self.post(at - self.now, event);
    }

    /// The first lines of an event stream: the agent's full state.
    pub(super) fn open_stream(&mut self, slot: usize) {
        let Some(agent) = &self.slots[slot].agent else { return };
        let (from, state, update) = (agent.life.clone(), agent.state(), agent.last_update.clone());
        self.stream(slot, Observation::State(Box::new(self.said(slot, state))));
        if let Some(update) = update.map(Box::new) {
            self.stream(slot, Observation::Update { from, update });
        }
    }

    pub(super) fn pod(&self, slot: usize) -> PodRef {
        PodRef { name: format!("pod-{slot}"), uid: format!("uid-{slot}-{}", self.slots[slot].generation), node: None, ips: Vec::new() }
    }

    /// Another pod under the same name.
    pub(super) fn new_pod(&mut self, slot: usize) {
        self.slots[slot].generation += 1;
        self.slots[slot].exists = true;
        self.slots[slot].terminating = false;
        self.slots[slot].frozen = false;
        self.slots[slot].backlog.clear();
        self.slots[slot].engine_start += 1;
        self.new_agent(slot, 20 + 7 * slot as u64);
        self.plan();
    }

    /// Another process of the agent in the same pod.
    pub(super) fn new_agent(&mut self, slot: usize, delay: u64) {
        self.lives += 1;
        let life = Incarnation { pod_uid: self.pod(slot).uid, instance: format!("life-{}", self.lives) };
        let start = self.slots[slot].engine_start;
        let mut agent = Agent::new(slot, life.clone(), start);
        (agent.sour, agent.deaf) = (self.slots[slot].sour.clone(), self.slots[slot].deaf);
        self.slots[slot].agent = Some(agent);
        self.slots[slot].attached = None;
        self.slots[slot].stream_floor = 0;
        self.post(delay, Event::Announce { slot, life });
    }

    /// The process ends; all connected peers see it at once.
    pub(super) fn kill(&mut self, slot: usize) {
        let Some(agent) = self.slots[slot].agent.take() else { return };
        self.slots[slot].frozen = false;
        self.slots[slot].backlog.clear();
        if self.slots[slot].attached == Some(self.reign) {
            let cause = "connection closed".to_owned();
            self.observe_later(LATENCY, Observation::AgentLost { from: agent.life.clone(), cause });
        }
        self.slots[slot].attached = None;
        self.plan();
        for other in 0..self.slots.len() {
            let same = |peer: &Agent| peer.commit.is_some() && peer.epoch == agent.epoch;
            if self.slots[other].agent.as_ref().is_some_and(same) && !self.slots[other].frozen {
                self.with_agent(other, |peer, wants| peer.peer_gone(slot, wants));
            }
        }
    }

    /// Changes the plan.
    pub(super) fn plan(&mut self) {
        let reign = self.reign;
        self.post(LATENCY, Event::Plan { reign });
    }

    /// The present plan.
    pub(super) fn read_plan(&self) -> Observation {
        let (mut candidates, mut left_out) = (Vec::new(), Vec::new());
        for slot in 0..self.slots.len() {
            if !self.slots[slot].exists {
                continue;
            }
            let role = if slot == 0 { Role::Source } else { Role::Rollout };
            let pods = vec![self.pod(slot)];
            // In one slot the pod's readiness follows the engine's, as with a probe of the engine.
            let unready = slot == 1 && self.slots[slot].agent.as_ref().is_some_and(Agent::paused);
            if self.slots[slot].terminating || unready {
                let code = if unready { LeftOutCode::NotReady } else { LeftOutCode::Terminating };
                left_out.push(LeftOut { who: member(slot), role, pods, code, message: format!("{code:?}") });
            } else {
                let port = (slot != 0).then_some(8000);
                candidates.push(Candidate { name: member(slot), role, size: size(slot), pods, port });
            }
        }
        Observation::Candidates { candidates, left_out }
    }

    /// Changes an agent and sends the messages that it requests.
    pub(super) fn with_agent<R>(&mut self, slot: usize, act: impl FnOnce(&mut Agent, &mut Wants) -> R) -> Option<R> {
        let mut wants = Wants::default();
        let agent = self.slots[slot].agent.as_mut()?;
        let paused_before = agent.paused();
        let result = act(agent, &mut wants);
        self.law.note_agent(slot, agent);
        let state = agent.state();
        let changed = agent.last_sent.as_ref() != Some(&state);
        agent.last_sent = Some(state.clone());
        let (life, commit) = (agent.life.clone(), agent.commit.clone());
        let paused = agent.paused();
        let delay = LATENCY + self.slowness(slot);
        for (to, message) in wants.peers {
            let addresses = commit.iter().flat_map(|commit| &commit.addresses);
            let life = addresses.filter(|address| address.member == member(to)).map(|address| address.incarnation.clone()).next();
            self.post(delay, Event::Peer { from: slot, slot: to, life, message });
        }
        for event in wants.events {
            let from = life.clone();
            if let (AgentEvent::Update { update }, Some(agent)) = (&event, &mut self.slots[slot].agent) {
                agent.last_update = Some(update.clone());
            }
            let observation = match event {
                AgentEvent::Update { update } => Observation::Update { from, update: Box::new(update) },
                AgentEvent::PeerLost { id, peer, cause } => Observation::PeerLost { from, id, peer, cause },
                _ => continue,
            };
            self.stream(slot, observation);
        }
        for (after, reminder) in wants.reminders {
            let after = if matches!(reminder, Reminder::Installed(..)) { after + self.slowness(slot) } else { after };
            self.post(after, Event::Remind { slot, life: life.clone(), reminder });
        }
        if changed {
            self.stream(slot, Observation::State(Box::new(self.said(slot, state))));
        }
        if slot == 1 && paused != paused_before {
            self.plan();
        }
        Some(result)
    }

    /// Another controller process, with the object's status.
    pub(super) fn restart_controller(&mut self) {
        self.reign += 1;
        let restored = Restored {
            term: u64::from(self.reign),
            epoch: self.stored_epoch,
            version: self.stored_version.clone(),
            highest: self.stored_highest,
            refused: self.stored_refused.clone(),
        };
        self.membership = Rc::new(Membership::new(self.rules.clone(), restored));
        for slot in 0..self.slots.len() {
            self.slots[slot].attached = None;
            self.slots[slot].stream_floor = 0;
            if let Some(agent) = &self.slots[slot].agent {
                let life = agent.life.clone();
                self.post(150 + 130 * slot as u64, Event::Announce { slot, life });
            }
        }
        self.law.controller_restarted(self.now);
        self.plan();
    }

    /// The object's rules change, which requires a new epoch.
    pub(super) fn change_rules(&mut self) {
        self.rules.policy.retain_bytes += 1;
        self.configure();
    }

    /// The controller reads the object.
    pub(super) fn configure(&mut self) {
        self.tell(Observation::Configure(Box::new(self.rules.clone())));
    }

    /// Plays the next event; `None` if it was only time or a heartbeat.
    pub(super) fn play_one(&mut self) -> Option<Event> {
        let event_at = self.queue.first_key_value().map(|((at, _), _)| *at);
        let wake_at = self.membership.next_wakeup().map(|at| at.max(self.now));
        let next = [event_at, wake_at, Some(self.next_beat)].into_iter().flatten().min().unwrap_or(self.next_beat);
        self.now = next;
        if event_at == Some(next) {
            return self.queue.pop_first().map(|(_, event)| event);
        }
        if wake_at == Some(next) {
            self.tell(Observation::Tick);
        } else {
            self.beat();
        }
        None
    }

    /// The part of status that the next controller reads.
    pub(super) fn store(&mut self, view: &MembershipView) {
        self.stored_version.clone_from(&view.version);
        let went_back = view.returned.filter(|returned| view.wanted == view.version && Some(returned.from) > version_of(view));
        self.stored_highest = went_back.map_or(0, |returned| returned.from);
        self.stored_refused.clone_from(&view.refused);
    }

    /// Heartbeats of all agents; the trainer checks its version.
    fn beat(&mut self) {
        self.next_beat = self.now + HEARTBEAT;
        for slot in 0..self.slots.len() {
            let here = &self.slots[slot];
            let speaks = here.attached == Some(self.reign) && !here.frozen && here.stream_floor <= self.now;
            if let Some(from) = here.agent.as_ref().filter(|_| speaks).map(|agent| agent.life.clone()) {
                self.tell(Observation::Alive { from });
            }
        }
        self.check();
        let wanted = self.wanted;
        if !self.slots[0].frozen {
            self.with_agent(0, |source, wants| source.publish(wanted, wants));
        }
    }

    /// An agent's report about itself, true or false.
    fn said(&self, slot: usize, state: MemberState) -> MemberState {
        if !self.slots[slot].lies {
            return state;
        }
        let invented = |version| HeldVersion { version, manifest: super::names::INVENTED.to_owned() };
        let epoch = EpochId { weightsync: "ws".to_owned(), created: 1, term: 0, epoch: (1 << 63) - 2 };
        MemberState {
            role: Role::Source,
            epoch: Some(epoch),
            retained: Some(invented(99)),
            earlier: vec![invented(1)],
            installed: Some(invented(99)),
            refused: vec![RefusedVersion { held: invented(98), measured: "nothing".to_owned() }],
            ..state
        }
    }

    /// An agent begins or stops to lie.
    pub(super) fn speak(&mut self, slot: usize, lies: bool) {
        self.slots[slot].lies = lies;
        self.open_stream(slot);
    }

    /// The coordinator checks the statements that come with a state: there is one for every version that the source published.
    fn prove(&mut self, observation: &Observation) {
        let Observation::State(state) = observation else { return };
        let refused = state.refused.iter().map(|refused| &refused.held);
        let claimed = state.keeps().chain(&state.installed).chain(refused);
        let announced: Vec<HeldVersion> = claimed.filter(|claim| **claim == super::names::held(claim.version)).cloned().collect();
        for HeldVersion { version, manifest } in announced {
            if self.proven.insert((self.reign, version)) {
                self.tell(Observation::Proven(Announced { version, epoch: 1, manifest }));
            }
        }
    }

    /// The controller takes a step.
    pub(super) fn tell(&mut self, observation: Observation) {
        self.prove(&observation);
        self.steps += 1;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>6} {}", self.now, super::trace::line(&observation)));
        }
        let heartbeat = matches!(observation, Observation::Alive { .. });
        self.law.note_observation(&observation);
        let decisions = Rc::make_mut(&mut self.membership).step(self.now, observation);
        if let Some(trace) = &mut self.trace {
            trace.extend(decisions.iter().map(|decision| format!("{:>6}    -> {decision:?}", self.now)));
        }
        let quiet = heartbeat && decisions.is_empty();
        for decision in decisions {
            self.carry_out(decision);
        }
        if !quiet {
            self.check();
        }
        self.let_go_at_worst();
    }

    fn carry_out(&mut self, decision: Decision) {
        self.law_on_decision(&decision);
        let reign = self.reign;
        match decision {
            Decision::PersistEpoch { epoch } => self.post(LATENCY, Event::Persist { reign, epoch }),
            Decision::Prepare { to, request } => {
                let slot = super::names::slot_of(&request.member);
                let delay = LATENCY + self.slowness(slot);
                self.post(delay, Event::Prepare { slot, life: to, reign, request: Rc::from(request) });
            }
            Decision::Commit { to, member, request } => {
                let slot = super::names::slot_of(&member);
                let delay = LATENCY + self.slowness(slot);
                self.post(delay, Event::Commit { slot, life: to, reign, request: Rc::from(request) });
            }
            Decision::Fence { to, request: FenceRequest { id, .. } } | Decision::Release { to, request: ReleaseRequest { id, .. } } => {
                for life in to {
                    let slot = (0..self.slots.len()).find(|slot| life.pod_uid.starts_with(&format!("uid-{slot}-"))).unwrap();
                    self.post(LATENCY + self.slowness(slot), Event::End { slot, life, id: id.clone() });
                }
            }
            Decision::Event { .. } => {}
            Decision::StepDown { .. } => self.law.stepped_down = true,
        }
    }
}

/// The number of the current version.
pub(super) fn version_of(view: &MembershipView) -> Option<Version> {
    view.version.as_ref().map(|held| held.version)
}
