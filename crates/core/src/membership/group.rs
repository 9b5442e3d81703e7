//! A working group, and a group that is being formed. Holds facts; decides only what follows from them alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::plan::Candidate;
use crate::protocol::{
    EpochId, FabricReport, GpuReport, GroupFacts, HeldVersion, Incarnation, MemberName, Reason, Returned, Role, Roster, TransportChoice,
    UpdatePolicy,
};

/// A committed group.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub id: EpochId,
    pub roster: Roster,
    /// The candidates of the plan when the group was formed.
    pub candidates: Vec<Arc<Candidate>>,
    /// The incarnation of each member that prepared it.
    pub lives: BTreeMap<MemberName, Incarnation>,
    pub feeder: Option<MemberName>,
    /// The rollback that its members received.
    pub returned: Option<Returned>,
    pub transport: TransportChoice,
    /// The policies that its members received; for an adopted group, assumed to be the present ones.
    pub policy: UpdatePolicy,
    pub committed_at: u64,
    /// Members that failed since; a new epoch is due at once.
    pub lost: BTreeMap<MemberName, (Reason, String)>,
    /// Members that leave in good order, since when.
    pub leaving: BTreeMap<MemberName, u64>,
    /// Members whose state does not show the epoch, since when.
    pub strays: BTreeMap<MemberName, u64>,
    /// Pairs of members that cannot reach each other, since when.
    pub reports: BTreeMap<(MemberName, MemberName), (u64, String)>,
    /// Whether the result of its preflight was applied.
    pub heeded: bool,
}

impl Group {
    pub(super) fn new(
        id: EpochId,
        roster: Roster,
        candidates: Vec<Arc<Candidate>>,
        lives: BTreeMap<MemberName, Incarnation>,
        policy: UpdatePolicy,
        committed_at: u64,
    ) -> Self {
        Self {
            id,
            roster,
            candidates,
            lives,
            feeder: None,
            returned: None,
            transport: TransportChoice::default(),
            policy,
            committed_at,
            lost: BTreeMap::new(),
            leaving: BTreeMap::new(),
            strays: BTreeMap::new(),
            reports: BTreeMap::new(),
            heeded: false,
        }
    }

    pub(super) fn rollouts(&self) -> u32 {
        let count = self.roster.members.iter().filter(|member| member.role == Role::Rollout).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// The member that an incarnation represents.
    pub(super) fn member_of(&self, life: &Incarnation) -> Option<&MemberName> {
        self.lives.iter().find(|(_, other)| *other == life).map(|(name, _)| name)
    }
}

/// An eligible member, and the incarnation that represents it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Eligible {
    pub candidate: Arc<Candidate>,
    pub life: Incarnation,
}

/// A group that is being formed.
#[derive(Debug, Clone)]
pub(super) enum Forming {
    Persisting(Persisting),
    Round(Box<Round>),
}

/// Why the next group is due at once: a round was given up.
#[derive(Debug, Clone)]
pub(super) struct Urgent {
    pub why: Reason,
    /// The members because of which it was given up, as text; the first few.
    pub causes: Vec<String>,
}

/// An epoch that is being persisted.
#[derive(Debug, Clone)]
pub(super) struct Persisting {
    pub epoch: u64,
    pub why: Reason,
    /// Requested writes.
    pub tries: u32,
    pub retry_at: u64,
    pub failure: Option<String>,
}

/// A round of prepares and commits.
#[derive(Debug, Clone)]
pub(super) struct Round {
    pub id: EpochId,
    pub roster: Roster,
    /// Why there is a new epoch, as text.
    pub why: String,
    pub members: Vec<Eligible>,
    pub policy: UpdatePolicy,
    pub phase: Phase,
    pub prepared: BTreeMap<MemberName, Prepared>,
    pub committed: BTreeSet<MemberName>,
    pub failed: BTreeMap<MemberName, Failure>,
    /// Pairs of members that cannot reach each other.
    pub reports: BTreeMap<(MemberName, MemberName), (u64, String)>,
    /// Deadline: a member without a response by then has failed.
    pub deadline: u64,
    /// After a first failure: end of the time to collect failures with the same cause.
    pub settle_at: Option<u64>,
}

/// A member's response to prepare.
#[derive(Debug, Clone)]
pub(super) struct Prepared {
    /// Its data address.
    pub data: String,
    pub gpus: GpuReport,
    pub fabric: FabricReport,
    /// Its engine's ability to join a group.
    pub groups: Option<GroupFacts>,
}

/// Progress of a round.
#[derive(Debug, Clone)]
pub(super) enum Phase {
    Preparing,
    Committing {
        /// Members that were sent their commit.
        asked: BTreeSet<MemberName>,
        /// Members of later waves.
        waves: VecDeque<Vec<MemberName>>,
        current: Option<HeldVersion>,
        returned: Option<Returned>,
        feeder: Option<MemberName>,
        transport: Box<TransportChoice>,
    },
}

/// Why a member failed in a round.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub reason: Reason,
    pub message: String,
    /// Whether it blames a peer rather than itself.
    pub blames_peer: bool,
}

impl Round {
    pub(super) fn life(&self, name: &MemberName) -> Option<&Incarnation> {
        self.members.iter().find(|member| &member.candidate.name == name).map(|member| &member.life)
    }

    /// Capabilities of prepared members, in the order of their ranks.
    pub(super) fn facts(&self) -> Vec<super::transport::Prepared<'_>> {
        let known = self.roster.members.iter().filter_map(|member| Some((member, self.prepared.get(&member.name)?)));
        let facts = known.map(|(member, Prepared { gpus, fabric, groups, .. })| super::transport::Prepared {
            member,
            gpus,
            fabric,
            groups: groups.as_ref(),
        });
        facts.collect()
    }

    pub(super) fn member_of(&self, life: &Incarnation) -> Option<&MemberName> {
        self.members.iter().find(|member| &member.life == life).map(|member| &member.candidate.name)
    }

    /// Members without a response that have not failed.
    pub(super) fn unanswered(&self) -> Vec<MemberName> {
        let names = self.members.iter().map(|member| &member.candidate.name);
        let open = names.filter(|name| {
            let answered = match &self.phase {
                Phase::Preparing => self.prepared.contains_key(*name),
                Phase::Committing { asked, .. } => !asked.contains(*name) || self.committed.contains(*name),
            };
            !answered && !self.failed.contains_key(*name)
        });
        open.cloned().collect()
    }
}

/// Chooses the members to leave out so that no pair is left that cannot reach each other. First the member in pairs with most pods: all
/// engines of a pod count once. On a tie a rollout before a source, and the reported member before the reporting one.
pub(super) fn unreachable<'a>(
    reports: impl Iterator<Item = (&'a MemberName, &'a MemberName, &'a str)>,
    role: impl Fn(&MemberName) -> Option<Role>,
) -> BTreeMap<MemberName, String> {
    let known =
        |(reporter, peer, _): &(&MemberName, &MemberName, &str)| reporter != peer && role(reporter).is_some() && role(peer).is_some();
    let mut open: Vec<_> = reports.filter(known).collect();
    let mut blamed = BTreeMap::new();
    while let Some((reporter, peer, _)) = open.first().copied() {
        let others = |name: &MemberName| {
            let pairs =
                open.iter().filter_map(|(one, other, _)| if *one == name { Some(*other) } else { Some(*one).filter(|_| *other == name) });
            pairs.map(MemberName::voter).collect::<BTreeSet<_>>().len()
        };
        let reporters =
            |name: &MemberName| open.iter().filter(|report| report.1 == name).map(|report| report.0.voter()).collect::<BTreeSet<_>>().len();
        let weight = |name: &MemberName| (others(name), role(name) == Some(Role::Rollout), reporters(name));
        let names: BTreeSet<&MemberName> = open.iter().flat_map(|(one, other, _)| [*one, *other]).collect();
        let worst = names.into_iter().max_by_key(|name| weight(name)).map_or_else(|| peer.clone(), Clone::clone);
        let cause = open.iter().find(|(one, other, _)| **one == worst || **other == worst).map_or("", |(_, _, cause)| *cause);
        let message = if &worst == reporter { format!("it reports {peer}: {cause}") } else { format!("reported by {reporter}: {cause}") };
        open.retain(|(one, other, _)| **one != worst && **other != worst);
        blamed.insert(worst, message);
    }
    blamed
}
