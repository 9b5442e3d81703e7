//! A membership without a network: tests give it observations one by one and read its decisions.

use crate::membership::{BackoffConfig, Decision, MemberView, Membership, MembershipConfig, Observation, Restored};
use crate::plan::{Candidate, LeftOut, LeftOutCode};
use crate::protocol::*;

pub(super) fn policy() -> UpdatePolicy {
    UpdatePolicy {
        pause: PausePolicy::Keep,
        kv_cache: KvCachePolicy::Reset,
        min_ready: 1,
        silence_ms: 4_000,
        update_timeout_ms: 61_000,
        retain_bytes: 1 << 30,
        keep: 5,
        max_unavailable: 0,
        max_skew: None,
        bucket_bytes: 0,
        delivery: crate::protocol::Delivery::default(),
        digest: crate::protocol::Digest::Blake3,
        data_tls: false,
        transport: TransportPolicy::default(),
        health: HealthPolicy { period_ms: 1_500, timeout_ms: 800, failure_threshold: 3, success_threshold: 2 },
        canary: None,
    }
}

/// The usual times where they differ from each other: one cannot stand for another.
pub(super) fn config() -> MembershipConfig {
    let usual = MembershipConfig::new("ws", 1, policy());
    let backoff = BackoffConfig { base_ms: 950, ..usual.backoff };
    MembershipConfig { leave_grace_ms: 11_000, resend_ms: 1_050, backoff, ..usual }
}

#[test]
fn no_two_settings_of_the_desk_are_equal() {
    let MembershipConfig { policy, backoff, .. } = config();
    let UpdatePolicy { health, .. } = policy;
    let config = config();
    let all = [
        config.debounce_ms,
        config.prepare_deadline_ms,
        config.commit_deadline_ms,
        config.agent_silence_ms,
        config.adopt_window_ms,
        config.persist_retry_ms,
        config.leave_grace_ms,
        config.feed_grace_ms,
        config.resend_ms,
        config.preflight_rest_ms,
        backoff.base_ms,
        backoff.max_ms,
        backoff.reset_ms,
        policy.silence_ms,
        policy.update_timeout_ms,
        policy.retain_bytes,
        policy.keep.into(),
        policy.min_ready.into(),
        health.period_ms,
        health.timeout_ms,
        health.failure_threshold.into(),
        health.success_threshold.into(),
    ];
    assert_eq!(std::collections::BTreeSet::from(all).len(), all.len(), "{all:?}");
}

pub(super) fn held(version: Version) -> HeldVersion {
    HeldVersion { version, manifest: format!("m{version}") }
}

/// Member number `n`: 0 is the source.
pub(super) fn name(n: u32) -> MemberName {
    MemberName(if n == 0 { "trainer/t".to_owned() } else { format!("actors/r{n}") })
}

pub(super) fn life(n: u32, life: u32) -> Incarnation {
    Incarnation { pod_uid: format!("uid-{n}"), instance: format!("life-{life}") }
}

pub(super) fn candidate(n: u32) -> Candidate {
    Candidate {
        name: name(n),
        role: if n == 0 { Role::Source } else { Role::Rollout },
        size: 1,
        pods: vec![PodRef { name: format!("pod-{n}"), uid: format!("uid-{n}"), node: None, ips: Vec::new() }],
        port: (n != 0).then_some(8000),
    }
}

pub(super) struct Desk {
    pub membership: Membership,
    pub now: u64,
    pub states: Vec<MemberState>,
    pub decisions: Vec<Decision>,
    /// The GPUs that agents report.
    pub gpus: std::collections::BTreeMap<usize, GpuReport>,
    /// The NIXL facts that members report.
    pub fabric: std::collections::BTreeMap<usize, FabricReport>,
    /// The epoch of the statements that members present for their versions. With `None` they present none, and their versions do not count.
    pub stated: Option<u64>,
}

impl Desk {
    /// A source and `rollouts` rollouts that announced themselves; nothing else has happened.
    pub fn new(rollouts: u32) -> Self {
        Self::restored(config(), rollouts, Restored::default())
    }

    /// A source and two rollouts; the second refused the first prepare with `code`.
    pub fn refused_by_second(config: MembershipConfig, refusal: Refusal) -> Self {
        let mut desk = Self::restored(config, 2, Restored::default());
        desk.plan(&[0, 1, 2], Vec::new());
        for n in 0..=2 {
            desk.announce(n);
        }
        let persisted = desk.see(Observation::EpochPersisted { epoch: 1 });
        let id = persisted.iter().find_map(|decision| match decision {
            Decision::Prepare { request, .. } => Some(request.id.clone()),
            _ => None,
        });
        desk.see(Observation::PrepareFailed { id: id.unwrap(), member: name(2), refusal });
        desk.wait(1_000, &[0, 1, 2]);
        desk
    }

    pub fn restored(config: MembershipConfig, rollouts: u32, restored: Restored) -> Self {
        let membership = Membership::new(config, restored);
        let states = (0..=rollouts).map(|n| state(n, 1)).collect();
        Self {
            membership,
            now: 1_000,
            states,
            decisions: Vec::new(),
            gpus: std::collections::BTreeMap::new(),
            fabric: std::collections::BTreeMap::new(),
            stated: Some(1),
        }
    }

    pub fn see(&mut self, observation: Observation) -> Vec<Decision> {
        let mut decisions = Vec::new();
        if let (Observation::State(state), Some(epoch)) = (&observation, self.stated) {
            let refused = state.refused.iter().map(|refused| &refused.held);
            for HeldVersion { version, manifest } in state.keeps().chain(&state.installed).chain(refused).cloned() {
                decisions.extend(self.membership.step(self.now, Observation::Proven(Announced { version, epoch, manifest })));
            }
        }
        decisions.extend(self.membership.step(self.now, observation));
        self.decisions.extend(decisions.iter().cloned());
        decisions
    }

    pub fn plan(&mut self, members: &[u32], left_out: Vec<LeftOut>) -> Vec<Decision> {
        let candidates = members.iter().map(|n| candidate(*n)).collect();
        self.see(Observation::Candidates { candidates, left_out })
    }

    pub fn announce(&mut self, n: u32) -> Vec<Decision> {
        let state = self.states[n as usize].clone();
        self.see(Observation::Announced(self.announcement(n)));
        self.see(Observation::State(Box::new(state)))
    }

    pub fn announcement(&self, n: u32) -> Announcement {
        let state = &self.states[n as usize];
        Announcement {
            namespace: "default".to_owned(),
            pod: format!("pod-{n}"),
            incarnation: state.incarnation.clone(),
            role: state.role,
            engine_port: (n != 0).then_some(8000),
            control_address: format!("10.0.0.{n}:1"),
            program: "1".to_owned(),
            speaks: crate::protocol::Protocols::OURS,
            attached: false,
        }
    }

    /// Changes a member's state and reports it.
    pub fn tell(&mut self, n: u32, change: impl FnOnce(&mut MemberState)) -> Vec<Decision> {
        change(&mut self.states[n as usize]);
        let state = self.states[n as usize].clone();
        self.see(Observation::State(Box::new(state)))
    }

    /// Advances the time, with heartbeats of these members, and with the requested wakeups.
    pub fn wait(&mut self, ms: u64, alive: &[u32]) -> Vec<Decision> {
        let end = self.now + ms;
        let mut decisions = Vec::new();
        while self.now < end {
            let wake = self.membership.next_wakeup().unwrap_or(end).max(self.now + 1);
            self.now = end.min(wake).min(self.now + 500);
            for n in alive {
                let from = self.states[*n as usize].incarnation.clone();
                decisions.extend(self.see(Observation::Alive { from }));
            }
            decisions.extend(self.see(Observation::Tick));
        }
        decisions
    }

    /// Carries out the decisions, as correct agents and an API server would, until no decision is left.
    pub fn obey(&mut self, decisions: Vec<Decision>) {
        let mut todo = std::collections::VecDeque::from(decisions);
        while let Some(decision) = todo.pop_front() {
            let next = match decision {
                Decision::PersistEpoch { epoch } => self.see(Observation::EpochPersisted { epoch }),
                Decision::Prepare { to, request } => self.prepare(&to, &request),
                Decision::Commit { to, member, request } => self.commit(&to, member, &request),
                Decision::Fence { to, request } => self.forget(&to, &request.id),
                Decision::Release { to, request } => self.forget(&to, &request.id),
                Decision::Event { .. } | Decision::StepDown { .. } => Vec::new(),
            };
            todo.extend(next);
        }
    }

    pub fn number(&self, life: &Incarnation) -> usize {
        self.states.iter().position(|state| &state.incarnation == life).unwrap()
    }

    pub fn prepare(&mut self, to: &Incarnation, request: &PrepareRequest) -> Vec<Decision> {
        let n = self.number(to);
        let state = &mut self.states[n];
        state.member = Some(request.member.clone());
        state.epoch = Some(request.id.clone());
        state.roster_digest = Some(request.roster.digest());
        state.phase = MemberPhase::Prepared;
        let gpus = self.gpus.get(&n).cloned().unwrap_or_default();
        let response = PrepareResponse {
            incarnation: to.clone(),
            data_address: format!("10.0.0.{n}:2"),
            gpus,
            fabric: self.fabric.get(&n).cloned().unwrap_or_default(),
            state: state.clone(),
        };
        let state = state.clone();
        let mut decisions =
            self.see(Observation::Prepared { id: request.id.clone(), member: request.member.clone(), response: Box::new(response) });
        decisions.extend(self.see(Observation::State(Box::new(state))));
        decisions
    }

    pub fn commit(&mut self, to: &Incarnation, member: MemberName, request: &CommitRequest) -> Vec<Decision> {
        let n = self.number(to);
        self.states[n].phase = MemberPhase::Ready;
        let mut decisions = self.see(Observation::Committed { id: request.id.clone(), member, from: to.clone() });
        let state = self.states[n].clone();
        decisions.extend(self.see(Observation::State(Box::new(state))));
        decisions
    }

    fn forget(&mut self, to: &[Incarnation], id: &EpochId) -> Vec<Decision> {
        let mut decisions = Vec::new();
        for life in to {
            let n = self.number(life);
            if self.states[n].epoch.as_ref().is_some_and(|epoch| !epoch.supersedes(id)) {
                decisions.extend(self.tell(n.try_into().unwrap(), |state| {
                    state.epoch = None;
                    state.phase = MemberPhase::Idle;
                }));
            }
        }
        decisions
    }

    /// A committed group of all.
    pub fn formed(rollouts: u32) -> Self {
        let mut desk = Self::new(rollouts);
        desk.form(rollouts);
        desk
    }

    pub fn form(&mut self, rollouts: u32) {
        let all: Vec<u32> = (0..=rollouts).collect();
        let mut decisions = self.plan(&all, Vec::new());
        for n in all {
            decisions.extend(self.announce(n));
        }
        self.obey(decisions);
        assert!(self.membership.view().committed, "{:?}\n{:#?}", self.decisions, self.membership.view());
    }
}

fn state(n: u32, number: u32) -> MemberState {
    let rollout = n != 0;
    MemberState {
        member: None,
        incarnation: life(n, number),
        role: if rollout { Role::Rollout } else { Role::Source },
        phase: MemberPhase::Idle,
        epoch: None,
        transport: None,
        roster_digest: None,
        retained: None,
        earlier: Vec::new(),
        returned: None,
        installed: None,
        proven_by: None,
        refused: Vec::new(),
        statements: Vec::new(),
        engine: rollout.then(|| EngineFacts {
            kind: "vllm".to_owned(),
            server_version: "0".to_owned(),
            size: 1,
            url: format!("http://10.0.0.{n}:8000"),
            delivery: "file".to_owned(),
            answer_version: "none".to_owned(),
            unchecked: None,
            model_bytes: None,
            groups: None,
        }),
        healthy: true,
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

pub(super) fn left_out(n: u32, code: LeftOutCode, message: &str) -> LeftOut {
    let Candidate { name, role, pods, .. } = candidate(n);
    LeftOut { who: name, role, pods, code, message: message.to_owned() }
}

/// A leader's view of an update, with each member's step.
pub(super) fn update(id: &EpochId, version: Version, attempt: u32, phase: UpdatePhase, steps: &[(u32, InstallStep)]) -> UpdateView {
    let progress =
        |(n, step): &(u32, InstallStep)| MemberProgress { member: name(*n), bytes: 0, step: *step, reason: Some("full disk".to_owned()) };
    UpdateView {
        id: id.clone(),
        version,
        attempt,
        phase,
        total_bytes: 1,
        members: steps.iter().map(progress).collect(),
        phases_ms: Vec::new(),
        failure: (phase == UpdatePhase::Failed).then(|| "too few".to_owned()),
        feeding: false,
    }
}

impl Desk {
    pub fn id(&self) -> EpochId {
        self.membership.view().id.unwrap()
    }

    pub fn member(&self, n: u32) -> MemberView {
        self.membership.view().members.into_iter().find(|member| member.name == name(n)).unwrap()
    }

    pub fn reasons(&self) -> Vec<Reason> {
        self.membership.view().degraded.into_iter().map(|degradation| degradation.reason).collect()
    }

    /// The last event with that reason.
    pub fn event(&self, wanted: Reason) -> Option<(Option<MemberName>, String)> {
        self.decisions.iter().rev().find_map(|decision| match decision {
            Decision::Event { reason, message, member, .. } if *reason == wanted => Some((member.clone(), message.clone())),
            _ => None,
        })
    }

    /// The source leads an update and reports its phase.
    pub fn leads(&mut self, version: Version, attempt: u32, phase: UpdatePhase, steps: &[(u32, InstallStep)]) -> Vec<Decision> {
        let (from, id) = (self.states[0].incarnation.clone(), self.id());
        let update = Box::new(update(&id, version, attempt, phase, steps));
        self.see(Observation::Update { from, update })
    }

    /// All members hold the version.
    pub fn serves(&mut self, version: Version) {
        for n in 0..self.states.len() {
            self.tell(n.try_into().unwrap(), |state| {
                state.retained = Some(held(version));
                state.installed = Some(held(version));
            });
        }
    }

    pub fn lose(&mut self, n: u32) -> Vec<Decision> {
        let from = self.states[n as usize].incarnation.clone();
        self.see(Observation::AgentLost { from, cause: "connection closed".to_owned() })
    }

    /// Another incarnation of a member's agent, with an empty state.
    pub fn reborn(&mut self, n: u32, number: u32) {
        self.states[n as usize] = state(n, number);
    }

    pub fn epoch(&self) -> u64 {
        self.membership.view().epoch
    }
}

/// The members to which these decisions send a prepare.
pub(super) fn asked(decisions: &[Decision]) -> Vec<MemberName> {
    let asked = decisions.iter().filter_map(|decision| match decision {
        Decision::Prepare { request, .. } => Some(request.member.clone()),
        _ => None,
    });
    asked.collect()
}

pub(super) fn persists(decisions: &[Decision]) -> bool {
    decisions.iter().any(|decision| matches!(decision, Decision::PersistEpoch { .. }))
}
