//! The report of a failed world: one line for each observation.

use weightsync_core::membership::Observation;
use weightsync_core::protocol::Incarnation;

/// The agent whose stream carried an observation.
pub(super) fn sender(observation: &Observation) -> Option<Incarnation> {
    match observation {
        Observation::State(state) => Some(state.incarnation.clone()),
        Observation::Alive { from } | Observation::Update { from, .. } | Observation::PeerLost { from, .. } => Some(from.clone()),
        _ => None,
    }
}

pub(super) fn line(observation: &Observation) -> String {
    match observation {
        Observation::State(state) => format!(
            "State({} {:?} epoch {:?} retained {:?} installed {:?} healthy {})",
            state.incarnation.instance,
            state.phase,
            state.epoch.as_ref().map(|epoch| epoch.epoch),
            state.retained.as_ref().map(|held| held.version),
            state.installed.as_ref().map(|held| held.version),
            state.healthy,
        ),
        Observation::Alive { from } => format!("Alive({})", from.instance),
        Observation::Announced(announcement) => format!("Announced({} of {})", announcement.incarnation.instance, announcement.pod),
        Observation::Candidates { candidates, left_out } => {
            let names: Vec<String> = candidates.iter().map(|candidate| candidate.pods[0].uid.clone()).collect();
            format!("Candidates({names:?}, left out {:?})", left_out.iter().map(|left| (&left.who.0, left.code)).collect::<Vec<_>>())
        }
        Observation::Prepared { id, member, .. } => format!("Prepared({} {member})", id.epoch),
        Observation::Committed { id, member, .. } => format!("Committed({} {member})", id.epoch),
        Observation::Update { from, update } => {
            let steps: Vec<String> = update.members.iter().map(|member| format!("{}:{:?}", member.member, member.step)).collect();
            format!(
                "Update({} v{} epoch {} attempt {} {:?} feeding {} {steps:?})",
                from.instance, update.version, update.id.epoch, update.attempt, update.phase, update.feeding
            )
        }
        other => format!("{other:?}"),
    }
}
