//! Ways to break this room on purpose. The model test must notice each of them: a test that lets one pass tests nothing.
//!
//! Outside tests a [`Switch`] has no size and every question it is asked is answered `false` at compile time.

/// One way to break it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Mutation {
    /// Answers are taken whatever epoch they are about.
    EpochCheckRemoved,
    /// A member that is left out keeps its old epoch.
    FenceForgotten,
    /// Nobody watches the deadline of a prepare.
    PrepareDeadlineNotArmed,
    /// Nobody watches the deadline of a commit.
    CommitDeadlineNotArmed,
    /// A new group keeps the rank offsets of the one before.
    OffsetsNotRecomputed,
    /// The version moves when a leader began with it, not when replicas hold it.
    VersionMovedOnFailure,
    /// One member's failure holds all others off as well.
    BackoffGlobal,
    /// A pod made again under the same name is taken for the pod before it.
    StaleIncarnationAccepted,
    /// Members hear of an epoch before it is written.
    PrepareBeforePersist,
    /// The number of a failed epoch is used again.
    EpochReused,
    /// An agent that says nothing is taken to be well.
    SilenceIgnored,
    /// Commits go out while a member has not prepared.
    CommitBeforeAllPrepared,
    /// A restarted controller forms a new group without asking what there is.
    AdoptionSkipped,
    /// Whoever is first is made feeder, whether it holds the version or not.
    FeederHoldsNothing,
    /// A pause of ours counts as ill health.
    UpdateCountsAsFailure,
    /// A replica that may hold half an update counts as ready.
    DirtyCountsAsReady,
    /// A controller that lost the lease goes on deciding.
    ConflictIgnored,
    /// The version that the spec names counts as soon as somebody keeps it.
    TargetCountsAtOnce,
    /// A version that the group went back from counts again where somebody still holds it.
    LeftCountsAgain,
    /// A replica that serves what the group went back from lacks nothing.
    LeftServesOn,
    /// One replica's canary speaks for all.
    OneRefusesForAll,
    /// A refused version is brought to everybody all the same.
    RefusedIsBrought,
    /// Nothing is newer than what counts.
    NewestIsCurrent,
    /// What is too new to serve counts as the newest in service.
    NewestIsAnywhere,
}

/// Which mutation is on, if any.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Switch {
    #[cfg(test)]
    on: Option<Mutation>,
}

impl Switch {
    /// A switch that breaks one thing.
    #[cfg(test)]
    pub(super) const fn breaking(mutation: Mutation) -> Self {
        Self { on: Some(mutation) }
    }

    /// Whether this is broken now.
    #[cfg(test)]
    pub(super) fn is(self, mutation: Mutation) -> bool {
        self.on == Some(mutation)
    }

    /// Whether this is broken now: never.
    #[cfg(not(test))]
    #[allow(clippy::unused_self)]
    pub(super) const fn is(self, _mutation: Mutation) -> bool {
        false
    }
}
