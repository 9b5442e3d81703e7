//! The task of one object: processes announcements, agents' events, outcomes of calls, desired changes and time, one after another, and
//! acts on membership's decisions. It never blocks on an agent, and only it owns its state.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::attachment::{Attachment, FromAgent, Heard, Listener};
use super::calls::{Calls, Target};
use super::clock::Clock;
use super::common_change::Common;
use super::directory::{Arrival, Directory};
use super::ports::{CoordinatorEvent, EpochStore, EventSink};
use super::statements::Statements;
use super::timing::Timing;
use weightsync_core::membership::{Decision, LeftOut, Membership, MembershipConfig, MembershipView, Observation, Restored};
use weightsync_core::plan::Candidate;
use weightsync_core::protocol::{AgentEvent, Announcement, AssignmentChanged, EpochId, Incarnation};
use weightsync_net::https::AgentClient;

/// Most announcements in the queue. An agent whose announcement does not fit sends it again a second later.
const ANNOUNCEMENTS: usize = 256;
/// Most lines of all agents in the queue; a full queue slows the readers down, not this task.
const LINES: usize = 1024;
/// Most incarnations of one endpoint with a connection: the one that ends, and its successor. A pod that invents more cannot exhaust
/// memory.
const LIVES_OF_AN_ENDPOINT: usize = 2;

/// The planner's desired state of the object. Only the latest counts.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct Wanted {
    pub config: MembershipConfig,
    /// The candidates, and the members that the plan left out; `None` before the first plan.
    pub members: Option<(Vec<Candidate>, Vec<LeftOut>)>,
    pub suspend: bool,
    pub delete: bool,
}

/// The parts that a coordinator works with.
#[derive(Clone)]
#[allow(missing_docs)]
pub struct Context {
    pub client: AgentClient,
    /// The source of announcements. The coordinator adds its object; the owner of the object claims its pods and removes it.
    pub directory: Directory,
    pub store: Arc<dyn EpochStore>,
    pub events: Arc<dyn EventSink>,
    pub timing: Timing,
}

/// How a coordinator ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// It was cancelled; the group continues.
    Cancelled,
    /// Another leader decides.
    SteppedDown(String),
}

/// A running coordinator. Dropping it stops it; the group continues.
pub struct CoordinatorHandle {
    /// The view for status.
    pub view: watch::Receiver<MembershipView>,
    wanted: watch::Sender<Wanted>,
    stepped_down: Arc<OnceLock<String>>,
    task: AbortOnDropHandle<Ended>,
}

impl CoordinatorHandle {
    /// Replaces the desired state.
    pub fn want(&self, wanted: Wanted) {
        self.wanted.send_if_modified(|now| {
            let differs = *now != wanted;
            *now = wanted;
            differs
        });
    }

    /// Changes a part of the desired state.
    pub fn change(&self, change: impl FnOnce(&mut Wanted)) {
        let mut wanted = self.wanted.borrow().clone();
        change(&mut wanted);
        self.want(wanted);
    }

    /// Whether it still runs.
    pub fn is_running(&self) -> bool {
        !self.task.is_finished()
    }

    /// Why it stopped deciding, as text; `None` while it runs, and after a cancellation.
    pub fn stepped_down(&self) -> Option<&str> {
        self.stepped_down.get().map(String::as_str)
    }

    /// Waits until it ended.
    pub async fn ended(self) -> Ended {
        self.task.await.unwrap_or_else(|error| Ended::SteppedDown(format!("the coordinator failed: {error}")))
    }
}

/// The coordinator of one object.
pub struct Coordinator {
    membership: Membership,
    term: u64,
    wanted: watch::Receiver<Wanted>,
    applied: Wanted,
    announcements: mpsc::Receiver<Arrival>,
    lines: mpsc::Receiver<FromAgent>,
    line_sender: mpsc::Sender<FromAgent>,
    agents: HashMap<Incarnation, Agent>,
    statements: Statements,
    calls: Calls,
    context: Context,
    view: watch::Sender<MembershipView>,
    secret: Option<(EpochId, String)>,
    attached: u64,
    clock: Clock,
    stepped_down: Arc<OnceLock<String>>,
    cancel: CancellationToken,
}

struct Agent {
    address: String,
    attachment: Option<Attachment>,
    /// Whether the agent reported its state.
    reported: bool,
}

impl Coordinator {
    /// Starts the task of one object.
    pub fn start(wanted: Wanted, restored: Restored, context: Context, cancel: CancellationToken) -> CoordinatorHandle {
        let term = restored.term;
        let membership = Membership::new(wanted.config.clone(), restored);
        let (announcement_sender, announcements) = mpsc::channel(ANNOUNCEMENTS);
        context.directory.add(&wanted.config.weightsync, wanted.config.created, announcement_sender);
        let (line_sender, lines) = mpsc::channel(LINES);
        let view = watch::Sender::new(membership.view());
        // Membership has only the policies of `wanted` so far.
        let statements = Statements::new(&wanted.config.weightsync);
        let applied = Wanted { config: wanted.config.clone(), members: None, suspend: false, delete: false };
        let wanted_sender = watch::Sender::new(wanted);
        let mut wanted = wanted_sender.subscribe();
        wanted.mark_changed();
        let stepped_down = Arc::<OnceLock<String>>::default();
        let mut coordinator = Self {
            membership,
            term,
            wanted,
            applied,
            announcements,
            lines,
            line_sender,
            agents: HashMap::new(),
            statements,
            calls: Calls::new(context.client.clone()),
            context,
            view: view.clone(),
            secret: None,
            attached: 0,
            clock: Clock::new(),
            stepped_down: stepped_down.clone(),
            cancel,
        };
        coordinator.publish();
        CoordinatorHandle {
            view: view.subscribe(),
            wanted: wanted_sender,
            stepped_down,
            task: AbortOnDropHandle::new(tokio::spawn(coordinator.run())),
        }
    }

    async fn run(mut self) -> Ended {
        loop {
            let wakeup = self.membership.next_wakeup().map(|at| self.clock.instant(at));
            let observations = tokio::select! {
                () = self.cancel.cancelled() => return Ended::Cancelled,
                changed = self.wanted.changed() => match changed {
                    Ok(()) => self.wishes(),
                    Err(_) => return Ended::Cancelled,
                },
                Some(arrival) = self.announcements.recv() => self.arrived(arrival),
                Some(line) = self.lines.recv() => self.heard(line),
                outcome = self.calls.next() => outcome.into_iter().collect(),
                () = at(wakeup) => vec![Observation::Tick],
            };
            let mut changed = false;
            for observation in self.others_came_back().into_iter().chain(observations) {
                // A thousand agents send a heartbeat each second: none of them must cause a new view of a thousand members.
                changed |= !matches!(observation, Observation::Alive { .. } | Observation::ComingBack { .. });
                let decisions = self.membership.step(self.clock.now(), observation);
                changed |= !decisions.is_empty();
                for decision in decisions {
                    if let Some(ended) = self.carry_out(decision) {
                        self.publish();
                        return ended;
                    }
                }
            }
            if changed {
                self.publish();
            }
        }
    }

    /// Comes before all other decisions: no member's wait ends while agents still reconnect to this controller.
    fn others_came_back(&self) -> Option<Observation> {
        let arrival = self.context.directory.last_arrival().filter(|_| self.membership.waits_for_earlier_group())?;
        Some(Observation::ComingBack { at: self.clock.at(arrival) })
    }

    fn publish(&mut self) {
        let view = self.membership.view();
        // Readiness follows once enough replicas have gone back: until then, the others continue to serve.
        let returned = view.returned.filter(|_| view.wanted == view.version);
        let current = view.wanted.as_ref().or(view.version.as_ref());
        let hindrance = view.hindrance.as_ref();
        let common = Common { current, returned, newest: view.newest, suspended: self.wanted.borrow().suspend, hindrance };
        let common_change = self.context.directory.set_common(&self.applied.config.weightsync, common);
        // An agent without a stream announces itself anyway.
        let listening = self.agents.iter().filter(|(_, agent)| agent.attachment.is_some()).map(|(incarnation, _)| incarnation);
        let reported = common_change.concerns(&view, listening).into_iter().map(|agent| self.target(agent)).collect();
        self.calls.tell(reported, &AssignmentChanged, self.context.timing.tell);
        self.view.send_if_modified(|shown| {
            let differs = *shown != view;
            *shown = view;
            differs
        });
    }

    /// Changes of the desired state. Policies come first, because candidates are judged by them.
    fn wishes(&mut self) -> Vec<Observation> {
        let wanted = self.wanted.borrow_and_update().clone();
        let mut observations = Vec::new();
        if wanted.config != self.applied.config {
            observations.push(Observation::Configure(Box::new(wanted.config.clone())));
        }
        if wanted.suspend != self.applied.suspend {
            observations.push(Observation::Suspend(wanted.suspend));
        }
        if wanted.members != self.applied.members
            && let Some((candidates, left_out)) = wanted.members.clone()
        {
            self.forget_gone(&candidates);
            observations.push(Observation::Candidates { candidates, left_out });
        }
        if wanted.delete && !self.applied.delete {
            observations.push(Observation::Delete);
        }
        self.applied = wanted;
        observations
    }

    /// Keeps the addresses of lost agents, to fence them, only while their pods take part.
    fn forget_gone(&mut self, candidates: &[Candidate]) {
        let pods: HashSet<&str> = candidates.iter().flat_map(|candidate| &candidate.pods).map(|pod| pod.uid.as_str()).collect();
        self.agents.retain(|incarnation, agent| agent.attachment.is_some() || pods.contains(incarnation.pod_uid.as_str()));
    }

    fn arrived(&mut self, arrival: Arrival) -> Vec<Observation> {
        match arrival {
            Arrival::Accepted(announcement) => self.announced(announcement),
            Arrival::Refused(announcement, problem) => {
                tracing::warn!(pod = %announcement.pod, %problem, "not connecting to an agent");
                vec![Observation::AddressRefused { announcement, why: problem.to_string() }]
            }
        }
    }

    fn announced(&mut self, announcement: Announcement) -> Vec<Observation> {
        if announcement.speaks.lacks_ours(&announcement.program).is_some() {
            // None of its messages could be read.
            return vec![Observation::Announced(announcement)];
        }
        let from = announcement.incarnation.clone();
        let known = self.agents.get(&from).and_then(|agent| agent.attachment.as_ref());
        // Thousands of agents request their assignment: a new connection for each request would cost a second handshake.
        if known.is_some_and(|attachment| announcement.attached || attachment.is_fresh()) {
            return Vec::new();
        }
        let of_pod = self.agents.keys().filter(|other| other.pod_uid == from.pod_uid && **other != from).count();
        let most = self.most_lives(&from.pod_uid);
        if of_pod >= most {
            // Remove the addresses of ended incarnations; keep those of live ones.
            self.agents.retain(|other, agent| other.pod_uid != from.pod_uid || agent.attachment.is_some());
            if self.agents.keys().filter(|other| other.pod_uid == from.pod_uid && **other != from).count() >= most {
                tracing::warn!(pod = %announcement.pod, "{most} agents of the pod are listened to; not listening to another");
                return Vec::new();
            }
        }
        self.attached += 1;
        let listener = Listener {
            client: self.context.client.clone(),
            agent: from.clone(),
            address: announcement.control_address.clone(),
            number: self.attached,
            timing: self.context.timing,
            silence: Duration::from_millis(self.applied.config.agent_silence_ms),
            out: self.line_sender.clone(),
        };
        tracing::debug!(pod = %announcement.pod, address = %announcement.control_address, "listening to an agent");
        let attachment = Some(Attachment::start(listener, self.cancel.child_token()));
        let reported = self.agents.remove(&from).is_some_and(|agent| agent.reported);
        if !reported {
            self.context.directory.arrived();
        }
        self.agents.insert(from, Agent { address: announcement.control_address.clone(), attachment, reported });
        vec![Observation::Announced(announcement)]
    }

    /// How many agents of a pod may have a stream at once: as many as its pool has engines in the pod.
    fn most_lives(&self, pod_uid: &str) -> usize {
        let engines = self.context.directory.claim_of(pod_uid).map_or(0, |claimed| claimed.assignment.engines.len());
        LIVES_OF_AN_ENDPOINT.saturating_mul(engines.max(1))
    }

    fn heard(&mut self, line: FromAgent) -> Vec<Observation> {
        let FromAgent { from, number, heard } = line;
        let Some(agent) = self.agents.get_mut(&from) else { return Vec::new() };
        let present = agent.attachment.as_ref().is_some_and(|attachment| attachment.number == number);
        let event = match heard {
            Heard::Lost(cause) if present => {
                agent.attachment = None;
                return vec![Observation::AgentLost { from, cause }];
            }
            // From a replaced attachment: it shows nothing about the agent.
            Heard::Lost(_) => return Vec::new(),
            Heard::Event(event) => event,
        };
        if !std::mem::replace(&mut agent.reported, true) {
            self.context.directory.arrived();
        }
        vec![match *event {
            AgentEvent::Snapshot { mut state } => {
                let presented = std::mem::take(&mut state.statements);
                let proven = self.statements.check(presented, self.context.client.identity());
                return proven.into_iter().map(Observation::Proven).chain([Observation::State(state)]).collect();
            }
            AgentEvent::Heartbeat => Observation::Alive { from },
            AgentEvent::Update { update } => Observation::Update { from, update: Box::new(update) },
            AgentEvent::PeerLost { id, peer, cause } => Observation::PeerLost { from, id, peer, cause },
        }]
    }

    fn carry_out(&mut self, decision: Decision) -> Option<Ended> {
        tracing::debug!(?decision, "carrying out");
        match decision {
            Decision::PersistEpoch { epoch } => {
                let config = &self.applied.config;
                let id = EpochId { weightsync: config.weightsync.clone(), created: config.created, term: self.term, epoch };
                self.calls.persist(self.context.store.clone(), id, self.context.timing.persist);
            }
            Decision::Prepare { to, request } => self.calls.prepare(self.target(to), request),
            Decision::Commit { to, member, mut request } => {
                request.secret = self.secret_of(&request.id);
                self.calls.commit(self.target(to), member, request);
            }
            Decision::Fence { to, request } => {
                let targets = to.into_iter().map(|to| self.target(to)).collect();
                self.calls.tell(targets, &request, self.context.timing.tell);
            }
            Decision::Release { to, request } => {
                let targets = to.into_iter().map(|to| self.target(to)).collect();
                self.calls.tell(targets, &request, self.context.timing.tell);
            }
            Decision::Event { reason, message, member, warning } => {
                self.context.events.publish(CoordinatorEvent { reason, message, member, warning });
            }
            Decision::StepDown { message } => {
                self.stepped_down.get_or_init(|| message.clone());
                return Some(Ended::SteppedDown(message));
            }
        }
        None
    }

    fn target(&self, agent: Incarnation) -> Target {
        let address = self.agents.get(&agent).map(|known| known.address.clone());
        Target { agent, address }
    }

    /// One secret for each epoch, made when its first commit is sent.
    fn secret_of(&mut self, id: &EpochId) -> String {
        match &self.secret {
            Some((of, secret)) if of == id => secret.clone(),
            _ => {
                let secret = STANDARD.encode(rand::random::<[u8; 32]>());
                self.secret = Some((id.clone(), secret.clone()));
                secret
            }
        }
    }
}

async fn at(wakeup: Option<Instant>) {
    match wakeup {
        Some(wakeup) => sleep_until(wakeup).await,
        None => std::future::pending().await,
    }
}
