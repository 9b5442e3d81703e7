//! Which faults are played, in which phases, on whom and when: a pure function of the seed. Plays nothing.

use std::collections::BTreeMap;

use weightsync_testkit::liar::Lie;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// SIGKILL of a rollout's agent.
    KillAgent,
    /// SIGKILL of the source's agent.
    KillSource,
    /// SIGKILL of an engine.
    KillEngine,
    /// SIGSTOP of a rollout's agent; SIGCONT when the others noticed.
    StopAgent,
    /// The same of the source's agent.
    StopSource,
    /// Every connection of a pod is reset.
    Reset,
    /// An agent dies while its link is dead: its peers hold connections to no one.
    HalfOpen,
    /// The link of a pod loses everything; it works again when the others noticed.
    Blackhole,
    /// The link of a pod carries 8 Mbit/s.
    SlowLink,
    /// The disk that the epoch and logs are written to is full.
    FullDisk,
    /// The memory that versions are put into is full.
    FullMemory,
    /// The wall clock of an agent jumps.
    ClockJump,
    /// An engine is slow, or stands still.
    SlowEngine,
    /// An engine says that it did what it did not do.
    LyingEngine,
    /// An engine does not pause, or says so late or never.
    PauseStep,
    /// A load fails half way: once, or each time.
    HalfLoad,
    /// An engine does not take the text of its version, or says so late or never.
    VersionStep,
    /// An engine does not run again, or says so late or never.
    ResumeStep,
    /// An engine computes no token, or does so late.
    TokenStep,
    /// Strangers hold silent connections to every port of an agent and of the coordinator.
    Strangers,
    /// The agent of a rollout is one that lies, with the token of its pod.
    LyingMember,
    /// SIGKILL of the process that registered the engine of a rollout: the engine runs on, and belongs to no group.
    EndRegistration,
}

impl Fault {
    pub const ALL: [Self; 22] = [
        Self::KillAgent,
        Self::KillSource,
        Self::KillEngine,
        Self::StopAgent,
        Self::StopSource,
        Self::Reset,
        Self::HalfOpen,
        Self::Blackhole,
        Self::SlowLink,
        Self::FullDisk,
        Self::FullMemory,
        Self::ClockJump,
        Self::SlowEngine,
        Self::LyingEngine,
        Self::PauseStep,
        Self::HalfLoad,
        Self::VersionStep,
        Self::ResumeStep,
        Self::TokenStep,
        Self::Strangers,
        Self::LyingMember,
        Self::EndRegistration,
    ];

    /// A step of an install that an engine refuses or delays.
    pub fn is_step(self) -> bool {
        matches!(self, Self::PauseStep | Self::HalfLoad | Self::VersionStep | Self::ResumeStep | Self::TokenStep)
    }

    /// In the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::KillAgent => "SIGKILL of a rollout's agent",
            Self::KillSource => "SIGKILL of the source's agent",
            Self::KillEngine => "SIGKILL of an engine",
            Self::StopAgent => "SIGSTOP of a rollout's agent",
            Self::StopSource => "SIGSTOP of the source's agent",
            Self::Reset => "connections reset",
            Self::HalfOpen => "half-open connections",
            Self::Blackhole => "blackholed link",
            Self::SlowLink => "slow link",
            Self::FullDisk => "full disk",
            Self::FullMemory => "full shared memory",
            Self::ClockJump => "clock jump",
            Self::SlowEngine => "slow engine",
            Self::LyingEngine => "lying engine",
            Self::PauseStep => "pause refused or late",
            Self::HalfLoad => "load fails half way",
            Self::VersionStep => "version's text refused or late",
            Self::ResumeStep => "resume refused or late",
            Self::TokenStep => "token refused or late",
            Self::Strangers => "silent strangers on every port",
            Self::LyingMember => "lying member",
            Self::EndRegistration => "registration ends",
        }
    }

    /// Which pods it may hit: the source, a rollout.
    fn victims(self) -> (bool, bool) {
        match self {
            Self::KillSource | Self::StopSource => (true, false),
            Self::Reset | Self::HalfOpen | Self::Blackhole | Self::SlowLink | Self::ClockJump | Self::Strangers => (true, true),
            _ => (false, true),
        }
    }
}

/// Where in the life of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The trainer has announced its version, and has written no byte.
    Publish,
    /// Members prepare an epoch.
    Prepare,
    /// Members commit it.
    Commit,
    /// Some buckets were written, others were not.
    Transfer,
    /// Everything is delivered, engines are being switched.
    Install,
    /// A rollout that lacks the current version is fed.
    Join,
}

impl Phase {
    pub const ALL: [Self; 6] = [Self::Publish, Self::Prepare, Self::Commit, Self::Transfer, Self::Install, Self::Join];

    /// In the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Prepare => "prepare",
            Self::Commit => "commit",
            Self::Transfer => "transfer",
            Self::Install => "install",
            Self::Join => "join",
        }
    }
}

/// Why a fault cannot happen in a phase.
pub fn impossible(fault: Fault, phase: Phase) -> Option<&'static str> {
    match (fault, phase) {
        (fault, Phase::Prepare | Phase::Commit) if fault == Fault::LyingEngine || fault.is_step() => {
            Some("no engine is asked to do anything while a group forms")
        }
        (Fault::FullMemory, Phase::Prepare | Phase::Commit) => Some("nothing is put into memory while a group forms"),
        _ => None,
    }
}

/// One fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strike {
    /// Its place in the run, from 0.
    pub number: usize,
    pub fault: Fault,
    pub phase: Phase,
    /// The pod that is hit: 0 is the source, then the rollouts.
    pub victim: usize,
    /// Another rollout: its agent restarts where a phase needs a new group, its engine where one must be fed.
    pub other: usize,
    /// The tensor before which the trainer stops (transfer).
    pub gate: usize,
    /// How far into the phase, in ms.
    pub delay_ms: u64,
    /// Chooses among the variants of a fault.
    pub variant: u64,
}

/// Rollouts of a group.
pub const ROLLOUTS: usize = 3;
/// Tensors of a version.
pub const TENSORS: usize = 8;

/// SplitMix64 (Steele, Lea, Flood 2014): small, and the same everywhere.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `bound`, which is small: the bias does not matter.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.draw() % bound as u64).unwrap()
    }
}

/// All cells that can happen.
pub fn cells() -> Vec<(Fault, Phase)> {
    let all = Fault::ALL.into_iter().flat_map(|fault| Phase::ALL.map(|phase| (fault, phase)));
    all.filter(|(fault, phase)| impossible(*fault, *phase).is_none()).collect()
}

/// The run of a seed: every cell `rounds` times, in an order of the seed's, then cells of its choice until there are `faults`.
pub fn plan(seed: u64, faults: usize, rounds: usize) -> Vec<Strike> {
    let mut random = Random::new(seed);
    let mut order = Vec::new();
    for _ in 0..rounds {
        let mut round = cells();
        for at in (1..round.len()).rev() {
            round.swap(at, random.below(at + 1));
        }
        order.extend(round);
    }
    let all = cells();
    while order.len() < faults {
        order.push(all[random.below(all.len())]);
    }
    order.into_iter().enumerate().map(|(number, (fault, phase))| strike(number, fault, phase, &mut random)).collect()
}

fn strike(number: usize, fault: Fault, phase: Phase, random: &mut Random) -> Strike {
    let rollout = 1 + random.below(ROLLOUTS);
    let victim = match fault.victims() {
        (true, false) => 0,
        (true, true) if random.below(4) == 0 => 0,
        _ => rollout,
    };
    // Who joins is hit itself, unless the fault hits its feeder, or lies while another one joins.
    let joins = phase == Phase::Join && victim != 0 && fault != Fault::LyingMember;
    let other = if joins { victim } else { 1 + (rollout + random.below(ROLLOUTS - 1)) % ROLLOUTS };
    let gate = 2 + random.below(TENSORS - 3);
    Strike { number, fault, phase, victim, other, gate, delay_ms: random.draw() % 120, variant: random.draw() }
}

impl Strike {
    /// Its cell, and the lie of a member that lies: what a run can be narrowed to.
    pub fn label(&self) -> String {
        let lie = if self.fault == Fault::LyingMember { format!("/{}", self.lie().name()) } else { String::new() };
        format!("{}/{}{lie}", self.fault.name(), self.phase.name())
    }

    /// Whether the world must be new: after a stream that did not verify, leaders put members in another order, and the liar may be the last.
    pub fn needs_new_world(&self) -> bool {
        self.fault == Fault::LyingMember && matches!(self.lie(), Lie::Bytes | Lie::Sums)
    }

    /// Whether engines of its world must have registered.
    pub fn needs_registered(&self) -> bool {
        self.fault == Fault::EndRegistration || self.fault == Fault::LyingMember && self.lie() == Lie::Engines
    }

    /// What the agent of the victim lies about. The last of a chain passes nothing on.
    pub fn lie(&self) -> Lie {
        let lie = Lie::ALL[usize::try_from(self.variant % Lie::ALL.len() as u64).unwrap()];
        if matches!(lie, Lie::Bytes | Lie::Sums) && self.victim == ROLLOUTS { Lie::Progress } else { lie }
    }
}

/// How often each cell is in a plan.
pub fn counts(strikes: &[Strike]) -> BTreeMap<(Fault, Phase), usize> {
    let mut counts = BTreeMap::new();
    for strike in strikes {
        *counts.entry((strike.fault, strike.phase)).or_default() += 1;
    }
    counts
}

#[test]
fn a_seed_always_makes_the_same_plan_and_another_seed_another() {
    assert_eq!(plan(7, 200, 1), plan(7, 200, 1));
    assert_ne!(plan(7, 200, 1), plan(8, 200, 1));
}

#[test]
fn every_possible_cell_is_planned_as_often_as_asked() {
    for seed in 0..50 {
        for rounds in [1, 5] {
            let counts = counts(&plan(seed, 0, rounds));
            assert_eq!(counts.keys().copied().collect::<Vec<_>>(), cells());
            assert!(counts.values().all(|count| *count == rounds));
        }
        let more = plan(seed, 300, 2);
        assert!(more.len() == 300 && counts(&more).values().all(|count| *count >= 2));
        assert!(counts(&more).keys().all(|(fault, phase)| impossible(*fault, *phase).is_none()));
    }
}

#[test]
fn strike_picks_a_valid_target_and_leaves_a_group() {
    for strike in plan(3, 2_000, 1) {
        let (source, rollout) = strike.fault.victims();
        assert!(if strike.victim == 0 { source } else { rollout && strike.victim <= ROLLOUTS }, "{strike:?}");
        assert!((1..=ROLLOUTS).contains(&strike.other) && (2..TENSORS).contains(&strike.gate), "{strike:?}");
        match strike.phase {
            Phase::Join if strike.fault != Fault::LyingMember => {
                assert!(strike.victim == 0 || strike.other == strike.victim, "{strike:?}");
            }
            _ => assert_ne!(strike.other, strike.victim, "{strike:?}"),
        }
    }
}
