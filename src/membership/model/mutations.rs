//! Each way to break the code is noticed by the laws, with the message that belongs to it.

use super::faults::Fault;
use super::play::{Played, every_fault, story};
use crate::membership::mutation::{Mutation, Switch};

/// Plays the story of so many rollouts with the code broken; what the first failure said.
fn noticed(mutation: Mutation, rollouts: usize) -> Option<String> {
    let faults = [Fault::basic(rollouts), Fault::more(rollouts)].concat();
    let mut played = Played::default();
    let mut failure = None;
    let outcome = story(rollouts, Switch::breaking(mutation), |world, event| {
        if failure.is_none() {
            failure = every_fault(world, event, &faults, &mut played, true).into_iter().next();
        }
    });
    failure.or(outcome.err())
}

/// Mutations, and a part of what the failure says.
const ALL: [(Mutation, &str); 17] = [
    (Mutation::EpochCheckRemoved, "never prepared it"),
    (Mutation::FenceForgotten, "epoch that is over"),
    (Mutation::PrepareDeadlineNotArmed, "Preparing"),
    (Mutation::CommitDeadlineNotArmed, "Committing"),
    (Mutation::OffsetsNotRecomputed, "offset"),
    (Mutation::VersionMovedOnFailure, "replicas ever held it"),
    (Mutation::BackoffGlobal, "held off although"),
    (Mutation::StaleIncarnationAccepted, "pod"),
    (Mutation::PrepareBeforePersist, "before it is written"),
    (Mutation::EpochReused, "used again"),
    (Mutation::SilenceIgnored, "held off although"),
    (Mutation::CommitBeforeAllPrepared, "never prepared it"),
    (Mutation::AdoptionSkipped, "disturbed what worked"),
    (Mutation::FeederHoldsNothing, "does not hold"),
    (Mutation::UpdateCountsAsFailure, ""),
    (Mutation::DirtyCountsAsReady, "half an update"),
    (Mutation::ConflictIgnored, "another controller decides"),
];

#[test]
fn every_way_to_break_the_code_is_noticed() {
    let mut missed = Vec::new();
    for (mutation, expected) in ALL {
        let failure = (1..=2).find_map(|rollouts| noticed(mutation, rollouts));
        match failure {
            None => missed.push(format!("{mutation:?}: not noticed at all")),
            Some(failure) => {
                let head = failure.lines().take(2).collect::<Vec<_>>().join(" ");
                println!("{mutation:?}: {head}");
                if !head.contains(expected) {
                    missed.push(format!("{mutation:?}: noticed for another reason than {expected:?}: {head}"));
                }
            }
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}
