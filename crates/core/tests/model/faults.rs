//! The faults, each injected into a world at one moment.

use weightsync_core::membership::{GroupStage, Observation};
use weightsync_core::protocol::MemberName;

use super::event::{Change, Event};
use super::names::slot_of;
use super::world::{LATENCY, World};

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// Stopped (SIGSTOP), permanently or for some ms.
    Silent(usize, Option<u64>),
    /// Killed; a new pod of the same name comes after some ms, or never.
    Killed(usize, Option<u64>),
    /// A new pod of the same name exists at once, before the end of the old one is detected.
    Restarted(usize),
    /// The node is lost with the pod: no connection is closed. A new pod of the same name exists at once.
    Replaced(usize),
    /// The agent's process ends, and another one starts in the same pod.
    AgentRestarted(usize),
    /// The engine starts again and holds nothing.
    EngineRestarted(usize),
    /// The engine does not respond for some ms.
    Unhealthy(usize, u64),
    /// The pod is deleted in good order and returns.
    Terminated(usize),
    /// Everything that it sends is delayed by some ms, for some ms.
    Slow(usize, u64, u64),
    /// Refuses the next requests.
    Refuses(usize, u32),
    /// The next installs fail in the middle.
    BadInstall(usize, u32),
    /// Other agents cannot reach it for some ms.
    CutOff(usize, u64),
    /// For some ms it makes false claims: it is a source, holds a version that no source announced, refuses another, and is in an epoch
    /// that no controller wrote.
    Lies(usize, u64),
    /// The message of this step does not arrive.
    Lost,
    /// The message of this step is delayed.
    Late(u64),
    /// The message of this step arrives twice, the second time delayed.
    Doubled(u64),
    /// The message of this step is held back until it can do most harm: while the next epoch is being formed.
    HeldBack,
    /// The message of this step arrives, and once more while the next epoch is being formed.
    Again,
    /// The controller restarts.
    ControllerRestarted,
    /// The API server is unavailable for some ms.
    ApiDown(u64),
    /// Another controller writes the next epoch.
    Rival,
}

impl Fault {
    /// One of each kind.
    pub(super) fn basic(rollouts: usize) -> Vec<Self> {
        let mut faults = vec![Self::Lost, Self::Late(7_000), Self::Doubled(50), Self::Again, Self::ControllerRestarted];
        for slot in 0..=rollouts {
            faults.extend([
                Self::Silent(slot, None),
                Self::Killed(slot, Some(3_000)),
                Self::Restarted(slot),
                Self::Slow(slot, 1_500, 10_000),
                Self::Refuses(slot, 1),
            ]);
        }
        faults
    }

    /// All other faults.
    pub(super) fn more(rollouts: usize) -> Vec<Self> {
        let mut faults = vec![Self::Late(400), Self::Doubled(9_000), Self::HeldBack, Self::ApiDown(5_000), Self::Rival];
        for slot in 0..=rollouts {
            faults.extend([
                Self::Silent(slot, Some(8_000)),
                Self::Killed(slot, None),
                Self::Replaced(slot),
                Self::AgentRestarted(slot),
                Self::Slow(slot, 7_000, 10_000),
                Self::Refuses(slot, 3),
                Self::Terminated(slot),
                Self::CutOff(slot, 8_000),
            ]);
            if slot != 0 {
                faults.extend([
                    Self::EngineRestarted(slot),
                    Self::Unhealthy(slot, 12_000),
                    Self::BadInstall(slot, 1),
                    Self::BadInstall(slot, 3),
                    Self::Lies(slot, 8_000),
                ]);
            }
        }
        faults
    }

    /// The same fault, adapted to a world with so many rollouts; a source has no engine that could fail.
    pub(super) fn within(self, rollouts: usize) -> Self {
        let any = |slot: usize| slot % (rollouts + 1);
        let rollout = |slot: usize| 1 + slot % rollouts;
        match self {
            Self::Silent(slot, ms) => Self::Silent(any(slot), ms),
            Self::Killed(slot, ms) => Self::Killed(any(slot), ms),
            Self::Restarted(slot) => Self::Restarted(any(slot)),
            Self::Replaced(slot) => Self::Replaced(any(slot)),
            Self::AgentRestarted(slot) => Self::AgentRestarted(any(slot)),
            Self::EngineRestarted(slot) => Self::EngineRestarted(rollout(slot)),
            Self::Unhealthy(slot, ms) => Self::Unhealthy(rollout(slot), ms),
            Self::Terminated(slot) => Self::Terminated(any(slot)),
            Self::Slow(slot, by, ms) => Self::Slow(any(slot), by, ms),
            Self::Refuses(slot, times) => Self::Refuses(any(slot), times),
            Self::BadInstall(slot, times) => Self::BadInstall(rollout(slot), times),
            Self::CutOff(slot, ms) => Self::CutOff(any(slot), ms),
            Self::Lies(slot, ms) => Self::Lies(rollout(slot), ms),
            other => other,
        }
    }

    /// Whether the step's own message determines the effect.
    pub(super) fn is_about_the_message(self) -> bool {
        matches!(self, Self::Lost | Self::Late(_) | Self::Doubled(_) | Self::HeldBack | Self::Again)
    }
}

/// The members that a message is from or to.
fn parties(event: &Event) -> Vec<usize> {
    match event {
        Event::Observe { observation, stream_of, .. } => {
            let named = |name: &MemberName| vec![slot_of(name)];
            match &**observation {
                Observation::Prepared { member, .. }
                | Observation::PrepareFailed { member, .. }
                | Observation::Committed { member, .. }
                | Observation::CommitFailed { member, .. } => named(member),
                Observation::Announced(announcement) => vec![announcement.pod.trim_start_matches("pod-").parse().unwrap()],
                _ => stream_of.iter().copied().collect(),
            }
        }
        Event::Prepare { slot, .. } | Event::Commit { slot, .. } | Event::End { slot, .. } => vec![*slot],
        Event::Peer { from, slot, .. } => vec![*from, *slot],
        _ => Vec::new(),
    }
}

/// Whether the network carries it; the other events happen inside a process.
pub(super) fn is_message(event: &Event) -> bool {
    matches!(
        event,
        Event::Observe { .. }
            | Event::Plan { .. }
            | Event::Persist { .. }
            | Event::Prepare { .. }
            | Event::Commit { .. }
            | Event::End { .. }
            | Event::Peer { .. }
    )
}

impl World {
    /// Injects the fault. Then the event of this step happens, if it is still possible. Returns the end of the fault.
    pub(super) fn inject(&mut self, fault: Fault, event: Event) -> u64 {
        let now = self.now;
        if fault.is_about_the_message() {
            return self.disturb(fault, event);
        }
        let until = self.strike(fault);
        self.deliver(event);
        until.max(now)
    }

    /// Injects a fault that needs no message.
    pub(super) fn strike(&mut self, fault: Fault) -> u64 {
        let now = self.now;
        match fault {
            Fault::Silent(slot, until) => {
                self.guilty(slot);
                self.slots[slot].frozen = self.slots[slot].agent.is_some();
                let Some(ms) = until else { return now };
                self.post(ms, Event::Cluster { slot, change: Change::Thaw });
                now + ms
            }
            Fault::Killed(slot, back) => {
                self.guilty(slot);
                self.kill(slot);
                self.slots[slot].exists = false;
                self.plan();
                let Some(ms) = back else { return now };
                self.post(ms, Event::Cluster { slot, change: Change::NewPod });
                now + ms
            }
            Fault::Restarted(slot) => {
                self.guilty(slot);
                self.kill(slot);
                self.new_pod(slot);
                now
            }
            Fault::Replaced(slot) => {
                self.guilty(slot);
                self.slots[slot].agent = None;
                self.new_pod(slot);
                now
            }
            Fault::AgentRestarted(slot) => {
                self.guilty(slot);
                self.kill(slot);
                self.new_agent(slot, 100);
                now
            }
            Fault::EngineRestarted(slot) => {
                self.guilty(slot);
                self.slots[slot].engine_start += 1;
                self.with_agent(slot, |agent, _| {
                    agent.start += 1;
                    agent.installed = None;
                    agent.dirty = false;
                });
                now
            }
            Fault::Unhealthy(slot, ms) => {
                self.guilty(slot);
                self.with_agent(slot, |agent, _| agent.healthy = false);
                self.post(ms, Event::Cluster { slot, change: Change::Healthy });
                now + ms
            }
            Fault::Terminated(slot) => {
                self.guilty(slot);
                self.slots[slot].terminating = true;
                self.plan();
                self.post(2_000, Event::Cluster { slot, change: Change::Gone });
                self.post(3_000, Event::Cluster { slot, change: Change::NewPod });
                now + 3_000
            }
            Fault::Slow(slot, by, ms) => {
                self.guilty(slot);
                self.slots[slot].slow = (by, now + ms);
                now + ms
            }
            Fault::Refuses(slot, times) => {
                self.guilty(slot);
                self.with_agent(slot, |agent, _| agent.refusals = times);
                now
            }
            Fault::BadInstall(slot, times) => {
                self.guilty(slot);
                self.with_agent(slot, |agent, _| agent.bad_installs = times);
                now
            }
            Fault::CutOff(slot, ms) => {
                // If two members cannot reach each other, either may be at fault.
                (0..self.slots.len()).for_each(|slot| self.guilty(slot));
                self.slots[slot].unreachable_until = now + ms;
                now + ms
            }
            Fault::Lies(slot, ms) => {
                self.guilty(slot);
                self.speak(slot, true);
                self.post(ms, Event::Cluster { slot, change: Change::Honest });
                now + ms
            }
            Fault::ControllerRestarted => {
                self.restart_controller();
                now
            }
            Fault::ApiDown(ms) => {
                self.api_down = true;
                self.post(ms, Event::Cluster { slot: 0, change: Change::ApiBack });
                now + ms
            }
            Fault::Rival => {
                self.rival = true;
                now
            }
            Fault::Lost | Fault::Late(_) | Fault::Doubled(_) | Fault::HeldBack | Fault::Again => now,
        }
    }

    fn guilty(&mut self, slot: usize) {
        self.slots[slot].guilty = true;
    }

    /// The message is lost, delayed or doubled. If a line of an event stream is lost, the stream broke, and is reopened.
    fn disturb(&mut self, fault: Fault, event: Event) -> u64 {
        for slot in parties(&event) {
            self.guilty(slot);
        }
        let stream = match &event {
            Event::Observe { stream_of, .. } => *stream_of,
            _ => None,
        };
        match (fault, stream) {
            (Fault::Lost, Some(slot)) => {
                self.open_stream(slot);
                self.now
            }
            (Fault::Lost, None) => {
                // A plan is read repeatedly: only a single read is lost.
                if matches!(&event, Event::Plan { .. }) {
                    self.plan();
                }
                self.now
            }
            (Fault::Late(ms), _) => {
                if let Some(slot) = stream {
                    // Comes after the lines in flight, which are delayed too.
                    self.slots[slot].stream_floor = self.now + ms + LATENCY;
                    self.delay_stream(slot, ms);
                }
                self.post(ms, event);
                self.now + ms
            }
            (Fault::Doubled(ms), _) => {
                // A line of a stream cannot arrive again after the lines that follow it.
                let ms = if stream.is_some() { 0 } else { ms };
                if stream.is_some() {
                    self.deliver(event.clone());
                } else {
                    self.post(ms, event.clone());
                }
                self.deliver(event);
                self.now + ms
            }
            // A stream keeps its order, and a plan is always read in its present state.
            (Fault::HeldBack | Fault::Again, _) if stream.is_some() || matches!(event, Event::Plan { .. }) => {
                self.deliver(event);
                self.now
            }
            (Fault::HeldBack, _) => {
                self.held = Some((self.stored_epoch, event));
                self.now
            }
            (Fault::Again, _) => {
                self.held = Some((self.stored_epoch, event.clone()));
                self.deliver(event);
                self.now
            }
            _ => self.now,
        }
    }

    /// A held message arrives while the next epoch is being formed, in the phase that it concerns.
    pub(super) fn let_go_at_worst(&mut self) {
        let Some((epoch, event)) = &self.held else { return };
        let view = self.membership.latest();
        let later = view.id.as_ref().is_some_and(|id| id.epoch > *epoch);
        let commit = |observation: &Observation| matches!(observation, Observation::Committed { .. } | Observation::CommitFailed { .. });
        let phase = match event {
            Event::Commit { .. } => GroupStage::Committing,
            Event::Observe { observation, .. } if commit(observation) => GroupStage::Committing,
            _ => GroupStage::Preparing,
        };
        if later
            && view.stage == phase
            && let Some((_, event)) = self.held.take()
        {
            self.post(0, event);
        }
    }

    /// Lines after a delayed one are delayed too.
    fn delay_stream(&mut self, of: usize, ms: u64) {
        let floor = self.now + ms;
        let later = |event: &Event| matches!(event, Event::Observe { stream_of: Some(slot), .. } if *slot == of);
        let keys: Vec<(u64, u64)> = self.queue.iter().filter(|((at, _), event)| *at < floor && later(event)).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(event) = self.queue.remove(&key) {
                self.queue.insert((floor + LATENCY, key.1), event);
            }
        }
    }

    /// The fault and its message, for the report of a failed test.
    pub(super) fn describe(fault: Fault, event: &Event) -> String {
        let what = match event {
            Event::Observe { observation, .. } => super::trace::line(observation),
            Event::Plan { .. } => "the plan".to_owned(),
            Event::Persist { epoch, .. } => format!("the write of epoch {epoch}"),
            Event::Prepare { slot, request, .. } => format!("the prepare of epoch {} to {slot}", request.id.epoch),
            Event::Commit { slot, request, .. } => format!("the commit of epoch {} to {slot}", request.id.epoch),
            Event::End { slot, id, .. } => format!("the fence of epoch {} to {slot}", id.epoch),
            Event::Peer { from, slot, message, .. } => format!("{from} to {slot}: {message:?}"),
            Event::Remind { slot, reminder, .. } => format!("at {slot}: {reminder:?}"),
            Event::Announce { slot, .. } => format!("the announcement of {slot}"),
            Event::Cluster { slot, change } => format!("{change:?} of {slot}"),
        };
        format!("{fault:?} at {what}")
    }
}
