//! Which streams an attempt opens, and by which way each member gets the bytes.
//!
//! Over a communicator every rank takes part; those that do not receive keep nothing. A member without a rank copies from the source's ring,
//! where it opened that, and is reached over connections else. Anyone who is fed is reached over connections: a collective needs every rank, and
//! only one leader at a time could have it. In an epoch of reads every chain is one of reads.

use super::attempt::Attempt;
use super::probe::{Opening, hello};
use weightsync_core::protocol::{CarriedBy, MemberName};

#[derive(Default)]
pub(super) struct Openings {
    /// Those whose payloads stay on GPUs: the broadcasts, and one for each member on this one's GPU.
    pub(super) gpus: Vec<Opening>,
    /// The one whose payloads pass through memory of hosts: in connections, or read by each member from the one before.
    pub(super) plain: Option<Opening>,
}

impl Attempt<'_> {
    pub(super) fn openings(&self, receiving: &[MemberName]) -> Openings {
        let open = |members: &[MemberName], by: Option<CarriedBy>| hello(&self.epoch, &self.calls, members, &self.update(), false, by);
        if self.view.feeding {
            return Openings { gpus: Vec::new(), plain: open(receiving, self.leader.read_by(&self.epoch)) };
        }
        let communicator = self.leader.gpus().and_then(|gpus| gpus.transport().communicator(self.epoch.id()));
        let borrowers = communicator.as_ref().map(|communicator| communicator.borrowers()).unwrap_or_default();
        let (lent, rest): (Vec<MemberName>, Vec<MemberName>) = receiving.iter().cloned().partition(|member| borrowers.contains(member));
        let mut gpus = Vec::new();
        let (ranked, mut plain): (Vec<MemberName>, Vec<MemberName>) = rest.into_iter().partition(|member| self.epoch.has_rank(member));
        match self.epoch.communicator().and_then(|plan| plan.ranks_of(self.epoch.me())) {
            Some((root, _)) if !ranked.is_empty() => {
                let others: Vec<MemberName> = self.epoch.others().into_iter().filter(|member| self.epoch.has_rank(member)).collect();
                let passing = others.iter().filter(|name| !ranked.contains(name)).cloned().collect();
                gpus.extend(open(&others, Some(CarriedBy { root, passing, lent: false, fabric: None })));
            }
            _ => plain.extend(ranked),
        }
        // One each: a member's slots come back when it has copied them, whatever the others do.
        let by_memory = || Some(CarriedBy { root: 0, passing: Vec::new(), lent: true, fabric: None });
        gpus.extend(lent.into_iter().filter_map(|member| open(&[member], by_memory())));
        Openings { gpus, plain: open(&plain, self.leader.read_by(&self.epoch)) }
    }
}
