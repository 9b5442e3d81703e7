//! The effect of an event when it arrives: at the controller, at an agent, at a dead process, at the API server.

use std::rc::Rc;

use weightsync_core::membership::Observation;
use weightsync_core::protocol::*;

use super::agent::SILENCE;
use super::event::{Change, Event};
use super::names::{member, slot_of};
use super::world::{LATENCY, World};

impl World {
    /// Plays an event. A message to a dead process returns as a closed connection.
    pub(super) fn deliver(&mut self, event: Event) {
        self.steps += 1;
        if let Some(slot) = receiver(&event)
            && self.slots[slot].frozen
        {
            self.slots[slot].backlog.push(event);
            return;
        }
        match event {
            Event::Observe { reign, observation, stream_of } => self.arrive(reign, &observation, stream_of),
            Event::Plan { reign } if reign == self.reign => {
                let plan = self.read_plan();
                self.tell(plan);
            }
            Event::Plan { .. } => {}
            Event::Persist { reign, epoch } => self.persist(reign, epoch),
            Event::Prepare { slot, life, reign, request } => {
                let answer = self.at(slot, &life).then(|| self.with_agent(slot, |agent, wants| agent.prepare(&request, wants))).flatten();
                let (id, name) = (request.id.clone(), request.member.clone());
                let observation = match answer {
                    Some(Ok(response)) => Observation::Prepared { id, member: name, response: Box::new(response) },
                    Some(Err(refusal)) => Observation::PrepareFailed { id, member: name, refusal },
                    None => Observation::PrepareFailed { id, member: name, refusal: closed() },
                };
                self.answer(slot, reign, LATENCY, observation);
            }
            Event::Commit { slot, life, reign, request } => self.commit(slot, &life, reign, &request),
            Event::End { slot, life, id } => {
                if self.at(slot, &life) {
                    self.with_agent(slot, |agent, wants| agent.end(&id, wants));
                }
            }
            Event::Peer { from, slot, life, message } => {
                if self.now < self.slots[slot].unreachable_until.max(self.slots[from].unreachable_until) {
                    return;
                }
                let meant = life.is_none_or(|life| self.at(slot, &life)) && self.slots[slot].agent.is_some();
                if meant {
                    self.with_agent(slot, |agent, wants| agent.peer(from, message, wants));
                } else if !self.slots[from].frozen {
                    self.with_agent(from, |agent, wants| agent.peer_gone(slot, wants));
                }
            }
            Event::Remind { slot, life, reminder } => {
                if self.at(slot, &life) {
                    self.with_agent(slot, |agent, wants| agent.remind(reminder, wants));
                }
            }
            Event::Announce { slot, life } => {
                if self.at(slot, &life) && self.slots[slot].attached != Some(self.reign) {
                    let announcement = Announcement {
                        namespace: "default".to_owned(),
                        pod: self.pod(slot).name,
                        incarnation: life.clone(),
                        role: if slot == 0 { Role::Source } else { Role::Rollout },
                        engine_port: (slot != 0).then_some(8000),
                        control_address: life.instance.clone(),
                        program: String::new(),
                        speaks: weightsync_core::protocol::Protocols::OURS,
                        attached: false,
                    };
                    self.answer(slot, self.reign, LATENCY, Observation::Announced(announcement));
                    self.post(1_000, Event::Announce { slot, life });
                }
            }
            Event::Cluster { slot, change } => self.change(slot, change),
        }
    }

    /// Whether that incarnation of an agent runs in the slot.
    fn at(&self, slot: usize, life: &Incarnation) -> bool {
        self.slots[slot].agent.as_ref().is_some_and(|agent| &agent.life == life)
    }

    /// A response to a call of the controller; not part of the event stream.
    fn answer(&mut self, slot: usize, reign: u32, delay: u64, observation: Observation) {
        let (by, until) = self.slots[slot].slow;
        let delay = delay + if self.now < until { by } else { 0 };
        self.post(delay, Event::Observe { reign, observation: Rc::new(observation), stream_of: None });
    }

    fn arrive(&mut self, reign: u32, observation: &Observation, stream_of: Option<usize>) {
        if reign != self.reign {
            return;
        }
        if let (Some(slot), Some(from)) = (stream_of, super::trace::sender(observation))
            && (self.slots[slot].attached != Some(reign) || !self.at(slot, &from))
        {
            // The stream of an ended incarnation was closed with it.
            return;
        }
        if let Observation::AgentLost { from, .. } = observation
            && (0..self.slots.len()).any(|slot| self.at(slot, from) && self.slots[slot].attached == Some(reign))
        {
            // An attempt to connect has no effect if a later one succeeded before it.
            return;
        }
        let announced = match observation {
            Observation::Announced(announcement) => Some(announcement.incarnation.clone()),
            _ => None,
        };
        self.tell(observation.clone());
        let Some(life) = announced else { return };
        // The controller opens the agent's event stream.
        let slot = (0..self.slots.len()).find(|slot| self.at(*slot, &life));
        match slot {
            Some(slot) if !self.slots[slot].frozen => {
                if self.slots[slot].attached != Some(self.reign) {
                    self.slots[slot].attached = Some(self.reign);
                    self.open_stream(slot);
                }
            }
            other => {
                let delay = if other.is_some() { 1_000 } else { LATENCY };
                let lost = Observation::AgentLost { from: life, cause: "cannot be reached".to_owned() };
                self.post(delay, Event::Observe { reign, observation: Rc::new(lost), stream_of: None });
            }
        }
    }

    /// Compare-and-swap at the API server.
    fn persist(&mut self, reign: u32, epoch: u64) {
        let observation = if self.api_down {
            Observation::PersistFailed { epoch, message: "the API server is away".to_owned() }
        } else if self.rival || reign != self.reign {
            Observation::PersistConflict { epoch, message: "written by another".to_owned() }
        } else if self.stored_epoch < epoch || self.stored_epoch == epoch && self.stored_by == reign {
            (self.stored_epoch, self.stored_by) = (epoch, reign);
            Observation::EpochPersisted { epoch }
        } else {
            Observation::PersistConflict { epoch, message: "written by another".to_owned() }
        };
        self.post(LATENCY, Event::Observe { reign, observation: Rc::new(observation), stream_of: None });
    }

    fn commit(&mut self, slot: usize, life: &Incarnation, reign: u32, request: &Rc<CommitRequest>) {
        let (id, name) = (request.id.clone(), member(slot));
        if !self.at(slot, life) {
            self.answer(slot, reign, LATENCY, Observation::CommitFailed { id, member: name, refusal: closed() });
            return;
        }
        // A source proves the chain before it responds.
        let fresh = self.slots[slot].agent.as_ref().is_some_and(|agent| agent.commit.is_none() && agent.epoch.as_ref() == Some(&id));
        if slot == 0 && fresh {
            let peers = request.addresses.iter().filter(|address| address.member != name);
            let bad = peers
                .clone()
                .map(|peer| (slot_of(&peer.member), &peer.incarnation))
                .find(|(peer, life)| !self.at(*peer, life) || self.slots[*peer].frozen || self.is_cut_off(slot) || self.is_cut_off(*peer));
            if let Some((peer, life)) = bad {
                let gone = !self.at(peer, life);
                let delay = if gone { LATENCY } else { SILENCE };
                let cause = if gone { "connection closed" } else { "no answer to the probe" };
                let refusal = Refusal { code: RefusalCode::PeerUnreachable, message: cause.to_owned() };
                let lost = Observation::PeerLost { from: self.life(slot), id: id.clone(), peer: member(peer), cause: cause.to_owned() };
                let answer = Observation::CommitFailed { id, member: name, refusal };
                self.answer(slot, reign, delay, answer);
                self.answer(slot, reign, delay, lost);
                return;
            }
        }
        let answer = self.with_agent(slot, |agent, wants| agent.commit(request, wants));
        let observation = match answer {
            Some(Ok(())) => Observation::Committed { id, member: name, from: life.clone() },
            Some(Err(refusal)) => Observation::CommitFailed { id, member: name, refusal },
            None => Observation::CommitFailed { id, member: name, refusal: closed() },
        };
        self.answer(slot, reign, LATENCY, observation);
    }

    /// Whether other agents cannot reach it.
    fn is_cut_off(&self, slot: usize) -> bool {
        self.now < self.slots[slot].unreachable_until
    }

    fn life(&self, slot: usize) -> Incarnation {
        self.slots[slot].agent.as_ref().map(|agent| agent.life.clone()).unwrap()
    }

    fn change(&mut self, slot: usize, change: Change) {
        match change {
            Change::NewPod => self.new_pod(slot),
            Change::Healthy => {
                self.with_agent(slot, |agent, _| agent.healthy = true);
            }
            Change::Thaw => {
                self.slots[slot].frozen = false;
                let now = self.now;
                self.slots[slot].stream_floor = self.slots[slot].stream_floor.max(now);
                for event in std::mem::take(&mut self.slots[slot].backlog) {
                    self.deliver(event);
                }
            }
            Change::Gone => {
                self.kill(slot);
                self.slots[slot].exists = false;
                self.plan();
            }
            Change::Honest => self.speak(slot, false),
            Change::ApiBack => self.api_down = false,
        }
    }
}

/// The slot whose process must run to receive the event.
fn receiver(event: &Event) -> Option<usize> {
    match event {
        Event::Prepare { slot, .. }
        | Event::Commit { slot, .. }
        | Event::End { slot, .. }
        | Event::Peer { slot, .. }
        | Event::Remind { slot, .. }
        | Event::Announce { slot, .. } => Some(*slot),
        Event::Observe { .. } | Event::Plan { .. } | Event::Persist { .. } | Event::Cluster { .. } => None,
    }
}

fn closed() -> Refusal {
    Refusal { code: RefusalCode::Internal, message: "connection refused".to_owned() }
}
