//! The known agents, their last reported state, and the incarnation that represents each member.
//!
//! Decides which agents are live, silent or lost, and that a newer incarnation of an endpoint permanently replaces the older one. It never
//! decides membership.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::plan::Candidate;
use crate::protocol::{Announcement, EpochId, Incarnation, MemberPhase, MemberState, Reason, Role};

/// Incarnations of one pod that are remembered: ended and replaced ones. The caller bounds the number of live ones.
const LIVES: usize = 64;

/// State of the connection to an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Link {
    Live,
    /// Silent since this time.
    Silent(u64),
    /// It closed and could not be opened again.
    Lost(String),
}

/// One incarnation of an agent.
#[derive(Debug, Clone)]
pub(super) struct Agent {
    pub role: Role,
    pub port: Option<u16>,
    pub control: String,
    /// Why it is never called: its build is incompatible, or its address is not its pod's.
    pub unusable: Option<(Reason, String)>,
    pub state: Option<MemberState>,
    /// The false claim in its last state, which was removed.
    pub refused_claim: Option<String>,
    /// How often its engine restarted, by its reports.
    engine_restarts: Option<u32>,
    pub last_seen: u64,
    pub link: Link,
    /// Since when it has been in the same update.
    pub updating_since: Option<u64>,
    /// When a fence or release was last sent outside the forming of a group.
    pub notified_at: Option<u64>,
    /// Position in the order of first announcements.
    order: u64,
}

impl Agent {
    /// Whether it is reachable and its state is known.
    pub(super) fn is_present(&self) -> bool {
        self.link == Link::Live && self.state.is_some()
    }

    pub(super) fn epoch(&self) -> Option<&EpochId> {
        self.state.as_ref().and_then(|state| state.epoch.as_ref())
    }

    pub(super) fn phase(&self) -> Option<MemberPhase> {
        self.state.as_ref().map(|state| state.phase)
    }
}

/// All agents of one object.
#[derive(Debug, Clone, Default)]
pub(super) struct Agents {
    all: BTreeMap<Incarnation, Agent>,
    /// Incarnations that a newer one replaced: their late messages are ignored.
    replaced: BTreeMap<String, VecDeque<Incarnation>>,
    announced: u64,
}

impl Agents {
    pub(super) fn get(&self, incarnation: &Incarnation) -> Option<&Agent> {
        self.all.get(incarnation)
    }

    pub(super) fn get_mut(&mut self, incarnation: &Incarnation) -> Option<&mut Agent> {
        self.all.get_mut(incarnation)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Incarnation, &Agent)> {
        self.all.iter()
    }

    pub(super) fn announce(&mut self, now: u64, announcement: Announcement) {
        let incompatible = announcement.speaks.lacks_ours(&announcement.program).map(|why| (Reason::Unsupported, why));
        let control = announcement.control_address.clone();
        let Some(agent) = self.enter(now, announcement) else { return };
        (agent.control, agent.unusable) = (control, incompatible);
        if agent.link != Link::Live {
            // Its state before the loss of the connection may be outdated: it counts again with its next snapshot.
            agent.link = Link::Live;
            agent.state = None;
            agent.last_seen = now;
        }
    }

    /// An agent announces itself at an address that is not its pod's. An earlier correct announcement stays valid.
    pub(super) fn refuse(&mut self, now: u64, announcement: Announcement, why: String) {
        if self.all.get(&announcement.incarnation).is_some_and(|agent| agent.unusable.is_none()) {
            return;
        }
        let Some(agent) = self.enter(now, announcement) else { return };
        // Not connected, so it is evicted before others.
        (agent.link, agent.unusable) = (Link::Lost(why.clone()), Some((Reason::PodMismatch, why)));
    }

    /// The entry of an incarnation, created if missing; `None` for a replaced one.
    fn enter(&mut self, now: u64, announcement: Announcement) -> Option<&mut Agent> {
        if self.is_replaced(&announcement.incarnation) {
            return None;
        }
        self.make_room(&announcement.incarnation);
        self.announced += 1;
        let order = self.announced;
        Some(self.all.entry(announcement.incarnation).or_insert_with(|| Agent {
            role: announcement.role,
            port: announcement.engine_port,
            control: String::new(),
            unusable: None,
            state: None,
            refused_claim: None,
            engine_restarts: None,
            last_seen: now,
            link: Link::Live,
            updating_since: None,
            notified_at: None,
            order,
        }))
    }

    fn is_replaced(&self, life: &Incarnation) -> bool {
        self.replaced.get(&life.pod_uid).is_some_and(|lives| lives.contains(life))
    }

    /// A pod may announce any number of incarnations: of the lost ones, the oldest is forgotten.
    fn make_room(&mut self, life: &Incarnation) {
        let of_pod = |other: &&Incarnation| other.pod_uid == life.pod_uid;
        if self.all.contains_key(life) || self.all.keys().filter(of_pod).count() < LIVES {
            return;
        }
        let lost = self.all.iter().filter(|(other, agent)| of_pod(other) && (agent.link != Link::Live || agent.unusable.is_some()));
        if let Some(oldest) = lost.min_by_key(|(_, agent)| agent.order).map(|(other, _)| other.clone()) {
            self.all.remove(&oldest);
        }
    }

    /// Takes a full state of an agent. Ignored from an incarnation that was not announced (since its connection was lost) or was replaced.
    /// Returns whether its engine restarted since its last state.
    pub(super) fn state(&mut self, now: u64, state: MemberState) -> bool {
        let incarnation = state.incarnation.clone();
        let Some(agent) = self.all.get_mut(&incarnation).filter(|agent| !matches!(agent.link, Link::Lost(_))) else { return false };
        let restarted = agent.engine_restarts.replace(state.engine_restarts).is_some_and(|before| state.engine_restarts > before);
        let updating = state.phase == MemberPhase::Updating;
        let same_update = agent.state.as_ref().is_some_and(|before| {
            before.phase == MemberPhase::Updating
                && before.epoch == state.epoch
                && before.installed == state.installed
                && before.retained == state.retained
        });
        if !updating {
            agent.updating_since = None;
        } else if !same_update || agent.updating_since.is_none() {
            agent.updating_since = Some(now);
        }
        agent.state = Some(state);
        agent.last_seen = now;
        agent.link = Link::Live;
        let (role, port, order) = (agent.role, agent.port, agent.order);
        let replaced = self.all.iter().filter(|(other, agent)| {
            **other != incarnation
                && other.pod_uid == incarnation.pod_uid
                && agent.role == role
                && agent.port == port
                && agent.order < order
        });
        let replaced: Vec<Incarnation> = replaced.map(|(other, _)| other.clone()).collect();
        for other in replaced {
            self.all.remove(&other);
            let of_pod = self.replaced.entry(other.pod_uid.clone()).or_default();
            of_pod.push_back(other);
            if of_pod.len() > LIVES {
                of_pod.pop_front();
            }
        }
        restarted
    }

    pub(super) fn alive(&mut self, now: u64, incarnation: &Incarnation) {
        if let Some(agent) = self.all.get_mut(incarnation)
            && !matches!(agent.link, Link::Lost(_))
        {
            agent.last_seen = now;
            agent.link = Link::Live;
        }
    }

    pub(super) fn lost(&mut self, incarnation: &Incarnation, cause: String) {
        if let Some(agent) = self.all.get_mut(incarnation) {
            agent.link = Link::Lost(cause);
        }
    }

    /// Marks agents without a message for `limit` ms as silent; returns when the next one would be.
    pub(super) fn find_silent(&mut self, now: u64, limit: u64) -> Option<u64> {
        let mut next = None;
        for agent in self.all.values_mut().filter(|agent| agent.link == Link::Live) {
            let at = agent.last_seen.saturating_add(limit);
            if now >= at {
                agent.link = Link::Silent(agent.last_seen);
            } else {
                next = Some(next.map_or(at, |next: u64| next.min(at)));
            }
        }
        next
    }

    /// Moves all silence limits by the time without a step.
    pub(super) fn forgive(&mut self, ms: u64) {
        for agent in self.all.values_mut() {
            agent.last_seen = agent.last_seen.saturating_add(ms);
            agent.updating_since = agent.updating_since.map(|since| since.saturating_add(ms));
        }
    }

    /// An update makes progress: its members are not stuck.
    pub(super) fn update_began(&mut self, now: u64, incarnation: &Incarnation) {
        if let Some(agent) = self.all.get_mut(incarnation)
            && agent.updating_since.is_some()
        {
            agent.updating_since = Some(now);
        }
    }

    /// The incarnation that represents a candidate: the newest reachable one of its endpoint, else the newest.
    pub(super) fn of(&self, candidate: &Candidate) -> Option<(&Incarnation, &Agent)> {
        let head = candidate.pods.first()?;
        self.all
            .iter()
            .filter(|(incarnation, agent)| {
                incarnation.pod_uid == head.uid
                    && agent.role == candidate.role
                    && (agent.role == Role::Source || agent.port == candidate.port)
            })
            .max_by_key(|(_, agent)| (agent.is_present(), agent.order))
    }

    /// Forgets lost incarnations that represent no member any more.
    pub(super) fn prune(&mut self, pods: &BTreeSet<&str>) {
        self.all.retain(|incarnation, agent| !matches!(agent.link, Link::Lost(_)) || pods.contains(incarnation.pod_uid.as_str()));
        self.replaced.retain(|pod_uid, _| pods.contains(pod_uid.as_str()));
    }
}
