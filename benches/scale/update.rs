//! One update of one group, as its agents report it: the phases and the rhythm of a real one, and no bytes.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use rand::RngExt as _;
use tokio::time::{Instant, sleep};
use weightsync_core::protocol::{
    EpochId, HeldVersion, InstallStep, MemberName, MemberPhase, MemberProgress, Role, UpdatePhase, UpdateView,
};

use super::agent::Agent;

/// What a source shows while bytes move, at most this often.
const SHOWN_EVERY: Duration = Duration::from_millis(200);
const BEGIN: Duration = Duration::from_millis(50);
const VERIFY: Duration = Duration::from_millis(100);
/// An engine's switch takes between these.
const SWITCH_MS: std::ops::Range<u64> = 300..900;
const BYTES: u64 = 16 << 30;

/// The agents of one object, the source first.
pub struct Group(pub Vec<Arc<Agent>>);

struct Reported<'a> {
    source: &'a Agent,
    view: UpdateView,
    phase_began: Instant,
}

impl Reported<'_> {
    fn step(&mut self, step: InstallStep, bytes: u64) {
        for member in &mut self.view.members {
            (member.step, member.bytes) = (step, bytes);
        }
    }

    fn enter(&mut self, phase: UpdatePhase) {
        if self.view.phase != UpdatePhase::Staged {
            let took = u64::try_from(self.phase_began.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.view.phases_ms.push((format!("{:?}", self.view.phase).to_lowercase(), took));
        }
        (self.view.phase, self.phase_began) = (phase, Instant::now());
        self.show();
    }

    fn show(&self) {
        self.source.events.set_update(self.view.clone());
    }
}

impl Group {
    /// Brings `version` to everybody, whose bytes need `transfer`; when it ended.
    pub async fn publish(&self, version: u64, transfer: Duration) -> Result<Instant> {
        let (source, rollouts) = self.0.split_first().context("a group without members")?;
        let id: EpochId = source.events.state().epoch.clone().context("the source is in no group")?;
        let held = HeldVersion { version, manifest: format!("{version:064x}") };
        let names = rollouts.iter().filter_map(|agent| agent.events.state().member.clone());
        let progress = |member: MemberName| MemberProgress { member, bytes: 0, step: InstallStep::Receiving, reason: None };
        let view = UpdateView {
            id,
            version,
            attempt: 1,
            phase: UpdatePhase::Begin,
            total_bytes: BYTES,
            members: names.map(progress).collect(),
            phases_ms: Vec::new(),
            failure: None,
            feeding: false,
        };
        let mut reported = Reported { source, view, phase_began: Instant::now() };
        source.change(|state| state.phase = MemberPhase::Updating);
        reported.show();
        sleep(BEGIN).await;
        for agent in rollouts {
            agent.change(|state| state.phase = MemberPhase::Updating);
        }
        reported.enter(UpdatePhase::Transfer);
        let began = Instant::now();
        while began.elapsed() < transfer {
            sleep(SHOWN_EVERY.min(transfer)).await;
            let share = (began.elapsed().as_secs_f64() / transfer.as_secs_f64()).min(1.0);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            reported.step(InstallStep::Receiving, (share * BYTES as f64) as u64);
            reported.show();
        }
        source.change(|state| state.retained = Some(held.clone()));
        reported.enter(UpdatePhase::Verify);
        sleep(VERIFY).await;
        for agent in rollouts {
            agent.change(|state| state.retained = Some(held.clone()));
        }
        reported.step(InstallStep::Delivered, BYTES);
        reported.enter(UpdatePhase::Staged);
        reported.enter(UpdatePhase::Activate);
        switch(rollouts, &held, &mut reported).await;
        reported.enter(UpdatePhase::Done);
        source.change(|state| {
            state.phase = MemberPhase::Ready;
            state.installed = Some(held);
        });
        Ok(Instant::now())
    }
}

/// Switches all engines at once; each takes its own time.
async fn switch(rollouts: &[Arc<Agent>], held: &HeldVersion, reported: &mut Reported<'_>) {
    let paused_until = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + Duration::from_secs(60);
    reported.step(InstallStep::Installing, BYTES);
    let mut ends: Vec<(u64, usize)> = (0..rollouts.len()).map(|number| (rand::rng().random_range(SWITCH_MS), number)).collect();
    for agent in rollouts {
        agent.change(|state| state.paused_until = u64::try_from(paused_until.as_millis()).ok());
    }
    ends.sort_unstable();
    let (began, mut shown) = (Instant::now(), Instant::now());
    for (at, number) in ends {
        sleep((began + Duration::from_millis(at)).saturating_duration_since(Instant::now())).await;
        let (Some(agent), Some(member)) = (rollouts.get(number), reported.view.members.get_mut(number)) else { continue };
        agent.change(|state| {
            debug_assert_eq!(state.role, Role::Rollout);
            (state.phase, state.installed, state.paused_until) = (MemberPhase::Ready, Some(held.clone()), None);
        });
        member.step = InstallStep::Installed;
        if shown.elapsed() >= SHOWN_EVERY {
            shown = Instant::now();
            reported.show();
        }
    }
}
