//! Each way to break the code is noticed by the laws, with the message that belongs to it.

use super::acts::{AHEAD, GOING_BACK, LEFT_BEHIND, REFUSED_BY_MOST, REFUSED_BY_ONE, Story};
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

/// Mutations that show in a story, and a part of what the failure says.
const IN_STORIES: [(Mutation, Story, &str); 7] = [
    (Mutation::TargetCountsAtOnce, GOING_BACK, "counts as back at version 1 although only"),
    (Mutation::LeftCountsAgain, GOING_BACK, "counts again"),
    (Mutation::LeftServesOn, GOING_BACK, "counts as ready at 1 with 2 installed"),
    (Mutation::OneRefusesForAll, REFUSED_BY_ONE, "is refused for all although"),
    (Mutation::RefusedIsBrought, REFUSED_BY_MOST, "which most replicas refuse"),
    (Mutation::NewestIsCurrent, LEFT_BEHIND, "are in service at once"),
    (Mutation::NewestIsAnywhere, AHEAD, "is out of service with version 1, which counts or is near enough"),
];

/// Plays a story with the code broken, with faults only where nothing is noticed without; what the first failure said.
fn noticed_in(story: &Story, mutation: Mutation) -> Option<String> {
    let faults = Fault::basic(story.rollouts);
    let (mut played, mut failure) = (Played::default(), None);
    if let Err(why) = story.play(Switch::breaking(mutation), |_, _| {}) {
        return Some(why);
    }
    let outcome = story.play(Switch::breaking(mutation), |world, event| {
        if failure.is_none() {
            failure = every_fault(world, event, &faults, &mut played, true).into_iter().next();
        }
    });
    failure.or(outcome.err())
}

#[test]
fn every_way_to_break_the_code_is_noticed() {
    let mut missed = Vec::new();
    let usual = ALL.iter().map(|(mutation, expected)| (mutation, (1..=2).find_map(|rollouts| noticed(*mutation, rollouts)), expected));
    let stories = IN_STORIES.iter().map(|(mutation, story, expected)| (mutation, noticed_in(story, *mutation), expected));
    for (mutation, failure, expected) in usual.chain(stories) {
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
