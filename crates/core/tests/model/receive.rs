//! An abstract agent as the receiver of an update: it accepts it, keeps it, and passes it to its engine.

use weightsync_core::protocol::*;

use super::agent::{Agent, Incoming, PeerMessage, Reminder, SILENCE, Wants};

impl Agent {
    pub(super) fn peer(&mut self, from: usize, message: PeerMessage, wants: &mut Wants) {
        match message {
            PeerMessage::Begin { id, feeding } => {
                let step = self.begin(from, &id, feeding, wants);
                wants.peers.push((from, PeerMessage::Reply { id, step, canary: false }));
            }
            PeerMessage::Data { id } => {
                if let Some(incoming) = self.incoming.as_mut().filter(|incoming| incoming.id == id) {
                    incoming.delivered = true;
                    incoming.heard += 1;
                    wants.reminders.push((SILENCE, Reminder::Quiet(id.clone(), incoming.heard)));
                    self.put(super::names::held(id.version));
                    wants.peers.push((from, PeerMessage::Reply { id, step: InstallStep::Delivered, canary: false }));
                }
            }
            PeerMessage::Activate { id } => {
                if let Some(incoming) = self.incoming.as_mut().filter(|incoming| incoming.id == id && incoming.delivered) {
                    incoming.installing = true;
                    wants.reminders.push((self.install_time(), Reminder::Installed(id, self.start)));
                }
            }
            PeerMessage::Reply { id, step, canary } => {
                if let Some(leading) = self.leading.as_mut().filter(|leading| leading.id == id)
                    && let Some(known) = leading.steps.get_mut(&from)
                    && known.is_none_or(|known| known < step)
                {
                    *known = Some(step);
                    if canary {
                        leading.refused.insert(from);
                    }
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
        if self.deaf {
            return InstallStep::Refused;
        }
        let installed = self.installed.as_ref().map_or(0, |held| held.version);
        // A version that the group abandoned is not kept.
        let leaves = feeding && self.left(installed);
        if !self.dirty && !leaves && installed >= id.version {
            return if installed == id.version { InstallStep::Installed } else { InstallStep::Refused };
        }
        if self.installing() || self.incoming.as_ref().is_some_and(|incoming| incoming.id != *id && feeding) {
            return InstallStep::Refused;
        }
        let delivered = self.keeps(&super::names::held(id.version));
        self.incoming = Some(Incoming { id: id.clone(), leader: from, delivered, installing: false, heard: 0 });
        wants.reminders.push((SILENCE, Reminder::Quiet(id.clone(), 0)));
        if delivered { InstallStep::Delivered } else { InstallStep::Receiving }
    }

    pub(super) fn remind(&mut self, reminder: Reminder, wants: &mut Wants) {
        match reminder {
            Reminder::Installed(id, start) => {
                let Some(incoming) = self.incoming.take_if(|incoming| incoming.id == id && incoming.installing) else { return };
                let held = super::names::held(id.version);
                let loaded = self.bad_installs == 0 && start == self.start && self.healthy;
                // The canary is the last step.
                let canary = loaded && self.asks_canary() && self.sour.contains(&id.version);
                let well = loaded && !canary;
                self.bad_installs = self.bad_installs.saturating_sub(1);
                self.dirty = !well;
                self.installed = well.then(|| held.clone());
                match (well, canary) {
                    (true, _) => self.took(&held),
                    (_, true) => self.refuse_version(held),
                    _ => {}
                }
                let step = if well { InstallStep::Installed } else { InstallStep::Failed };
                if incoming.leader == self.slot {
                    // It went back by itself, and now feeds the others.
                    self.lead(wants);
                    return;
                }
                wants.peers.push((incoming.leader, PeerMessage::Reply { id, step, canary }));
            }
            Reminder::StepOver(id, phase) => self.step_over(&id, phase, wants),
            Reminder::Quiet(id, heard) => {
                let quiet = |incoming: &mut Incoming| incoming.id == id && incoming.heard == heard && !incoming.installing;
                self.incoming.take_if(quiet);
            }
        }
    }
}
