//! One strike from a whole group to a whole group: reach the phase, let the fault happen, see what comes of it, end it, and see everybody
//! well again and taking the next version. Every wait has a deadline; what is not as it must be is an error that says so.

use std::ops::Range;
use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::AbortOnDropHandle;
use weightsync_core::membership::{GroupStage, MemberStanding, MemberView, MembershipView};
use weightsync_core::protocol::{Incarnation, MOST_ENGINES, Reason, UpdatePhase};
use weightsync_testkit::liar::Lie;

use crate::fault::{self, Armed};
use crate::fixture::{Fixture, Said, UPDATE, member, pod};
use crate::plan::{Fault, Phase, ROLLOUTS, Strike};
use crate::processes::signal;
use crate::trainer::Outcome;

/// A phase that was provoked comes within this.
const REACHED: Duration = Duration::from_secs(30);
/// Everybody is well again within this: a member that failed before waits for up to 8 s, an engine of a busy machine for some more.
const WHOLE: Duration = Duration::from_secs(45);

/// A member lies for this long at least.
const LIES: Duration = Duration::from_secs(3);

/// What happened.
#[derive(Debug, Clone)]
pub struct Record {
    /// Whether the phase still ran when the fault had happened.
    pub hit: bool,
    /// From the fault until a warning named the victim, if one did.
    pub noticed: Option<Duration>,
    /// From the fault until the others served the version that was published, where a publish ran.
    pub served: Option<Duration>,
    /// From the end of the fault until everybody was well.
    pub whole: Duration,
    /// The words by which it was informed of.
    pub reasons: Vec<Reason>,
    /// Answers of engines that were looked at.
    pub answers: u64,
}

/// The fault as it happened.
struct Struck {
    hit: bool,
    at: Instant,
    /// A publish that runs.
    version: Option<u64>,
    /// Its outcome, where it is known already.
    outcome: Option<Outcome>,
}

pub async fn play(fixture: &mut Fixture, strike: &Strike) -> Result<Record, String> {
    let before = fixture.version();
    fixture.watcher.floor(before);
    fixture.watcher.fault(format!("none yet; {} in {} is next", strike.fault.name(), strike.phase.name()));
    let life = life_of(&fixture.view(), strike.victim);
    let mut armed = fault::arm(fixture, strike).await?;
    let reported = fixture.reported.lock().unwrap().len();
    let mut struck = match strike.phase {
        Phase::Publish | Phase::Transfer => at_gate(fixture, strike, &mut armed).await?,
        Phase::Install => installing(fixture, strike, &mut armed).await?,
        Phase::Prepare | Phase::Commit => forming(fixture, strike, &mut armed).await?,
        Phase::Join => joining(fixture, strike, &mut armed).await?,
    };
    let mut served = None;
    if let Some(version) = struck.version {
        finish(fixture, strike, &mut struck, version, before).await?;
        served = matches!(struck.outcome, Some(Outcome::Published { .. })).then(|| struck.at.elapsed());
    }
    live_with(fixture, strike, &mut struck).await?;
    let heal = fixture.reported.lock().unwrap().len();
    if strike.fault == Fault::LyingMember {
        liar_deceives_about_itself_only(fixture, strike, reported..heal)?;
    }
    fault::heal(fixture, strike, &mut armed).await?;
    let healed = Instant::now();
    if matches!(strike.fault, Fault::KillAgent | Fault::KillSource | Fault::HalfOpen) {
        // What looks whole before anybody noticed is not.
        fixture.until("its agent's next life", WHOLE, |view| life_of(view, strike.victim) != life).await?;
    }
    fixture.whole(WHOLE).await?;
    let whole = healed.elapsed();
    // That a liar is killed is no word about its lie.
    let reported = reported..if strike.fault == Fault::LyingMember { heal } else { usize::MAX };
    let reasons = named(fixture, strike, &struck, reported.clone())?;
    let noticed = first_naming(fixture, strike, reported).map(|at| at.saturating_duration_since(struck.at));
    publish_to_all(fixture).await?;
    fixture.trainer.untouched()?;
    match fixture.watcher.violations() {
        none if none.is_empty() => Ok(Record { hit: struck.hit, noticed, served, whole, reasons, answers: fixture.watcher.answers() }),
        some => Err(some.join("; ")),
    }
}

/// The life of a pod's agent that the coordinator listens to.
fn life_of(view: &MembershipView, victim: usize) -> Option<Incarnation> {
    let name = member(victim);
    view.members.iter().find(|row| row.name.0 == name).and_then(|row| row.incarnation.clone())
}

/// Publish, transfer: the trainer stands before a tensor while the fault happens, so the phase cannot pass.
async fn at_gate(fixture: &mut Fixture, strike: &Strike, armed: &mut Armed) -> Result<Struck, String> {
    let version = fixture.next_version().await;
    let gate = if strike.phase == Phase::Publish { 0 } else { strike.gate };
    fixture.publish(version, Some(gate)).await;
    if let Some(outcome) = fixture.trainer.at_gate(version).await? {
        return Err(format!("a publish ended before its tensor {gate} was read: {outcome:?}"));
    }
    let at = Instant::now();
    fault::strike(fixture, strike, armed).await?;
    fixture.trainer.go().await;
    Ok(Struck { hit: true, at, version: Some(version), outcome: None })
}

/// Install: everything is delivered, engines load.
async fn installing(fixture: &mut Fixture, strike: &Strike, armed: &mut Armed) -> Result<Struck, String> {
    let version = fixture.next_version().await;
    fixture.publish(version, None).await;
    let installs = |view: &MembershipView| {
        let update = view.update.as_ref();
        update.is_some_and(|update| update.version == version && matches!(update.phase, UpdatePhase::Verify | UpdatePhase::Activate))
    };
    fixture.until("engines to be switched", REACHED, installs).await?;
    sleep(Duration::from_millis(strike.delay_ms)).await;
    let at = Instant::now();
    fault::strike(fixture, strike, armed).await?;
    Ok(Struck { hit: installs(&fixture.view()), at, version: Some(version), outcome: None })
}

/// Prepare, commit: another rollout's agent is lost, so a group forms. A third one is hard to reach meanwhile, or the phase would often be over
/// before the fault has happened.
async fn forming(fixture: &mut Fixture, strike: &Strike, armed: &mut Armed) -> Result<Struck, String> {
    let (epoch, other) = (fixture.view().epoch, fixture.agent(strike.other).await?);
    let stage = if strike.phase == Phase::Prepare { GroupStage::Preparing } else { GroupStage::Committing };
    let forms = |view: &MembershipView| view.epoch > epoch && view.stage == stage;
    let third = (1..=ROLLOUTS).find(|number| *number != strike.victim && *number != strike.other).unwrap_or(strike.other);
    fixture.links[third].narrow();
    signal(other, Signal::KILL)?;
    let reached = fixture.until("a group to form", REACHED, forms).await;
    let at = Instant::now();
    let struck = match &reached {
        Ok(view) => {
            let passed = passes(fixture.group.view(), view.epoch, stage);
            fault::strike(fixture, strike, armed).await.map(|()| passed)
        }
        Err(error) => Err(error.clone()),
    };
    fixture.links[third].mend();
    let passed = struck?;
    // That the fault ended the phase is a hit as well: a reset connection fails the round before its reset returns.
    let hit = !passed.is_finished() || !passed.await.unwrap_or(true);
    Ok(Struck { hit, at, version: None, outcome: None })
}

/// Ends with the phase: true when the group went on to what comes next.
fn passes(mut views: watch::Receiver<MembershipView>, epoch: u64, stage: GroupStage) -> AbortOnDropHandle<bool> {
    let next = if stage == GroupStage::Preparing { GroupStage::Committing } else { GroupStage::Committed };
    AbortOnDropHandle::new(tokio::spawn(async move {
        let over = views.wait_for(|view| (view.epoch, view.stage) != (epoch, stage)).await;
        over.is_ok_and(|view| view.epoch == epoch && view.stage == next)
    }))
}

/// Join: a rollout's pod starts again, with nothing kept next to its engine, and is fed.
async fn joining(fixture: &mut Fixture, strike: &Strike, armed: &mut Armed) -> Result<Struck, String> {
    let (current, agent, engine) = (fixture.version(), fixture.agent(strike.other).await?, fixture.engine(strike.other).await?);
    let fed = |view: &MembershipView| {
        let runs = |phase| matches!(phase, UpdatePhase::Begin | UpdatePhase::Transfer | UpdatePhase::Verify | UpdatePhase::Activate);
        view.update.as_ref().is_some_and(|update| update.feeding && update.version == current && runs(update.phase))
    };
    // One that ended is not one that runs: the view keeps the last update.
    let id = fixture.view().update.map(|update| (update.id.epoch, update.attempt));
    signal(agent, Signal::KILL)?;
    signal(engine, Signal::KILL)?;
    // On a busy machine it may be over before it is seen: then the phase is missed, and tried again.
    let begun = |view: &MembershipView| view.update.as_ref().is_some_and(|update| update.feeding && update.version == current);
    let again = |view: &MembershipView| begun(view) && view.update.as_ref().map(|update| (update.id.epoch, update.attempt)) != id;
    fixture.until("a rollout to be fed", REACHED, again).await?;
    sleep(Duration::from_millis(strike.delay_ms)).await;
    if strike.fault != Fault::LyingMember {
        // The engine that is hit is the one that joins: its process is another one now.
        *armed = fault::arm(fixture, strike).await?;
    }
    let at = Instant::now();
    fault::strike(fixture, strike, armed).await?;
    Ok(Struck { hit: fed(&fixture.view()), at, version: None, outcome: None })
}

/// The outcome of a publish that met the fault, and whether it is allowed.
async fn finish(fixture: &mut Fixture, strike: &Strike, struck: &mut Struck, version: u64, before: u64) -> Result<(), String> {
    let outcome = fixture.trainer.outcome(version).await?;
    let limit = UPDATE + Duration::from_secs(8);
    if struck.at.elapsed() > limit {
        return Err(format!("the publish of version {version} ended after {:?}: {outcome:?}", struck.at.elapsed()));
    }
    match &outcome {
        Outcome::Published { installed, .. } => {
            // Anyone who is named serves it, unless the fault hit it: then it may be gone again.
            for number in (1..=ROLLOUTS).filter(|number| installed.contains(&member(*number)) && *number != strike.victim) {
                let found = fixture.serves(number).await;
                if found.is_none_or(|found| found < version) {
                    return Err(format!("{} is said to serve version {version}, and serves {found:?}", pod(number)));
                }
            }
        }
        Outcome::Failed { kind, message } => {
            if strike.victim != 0 {
                return Err(format!("a publish failed because of one rollout ({kind}): {message}"));
            }
            // Where the trainer is informed that no one knows, the version may have moved, and is served by everybody in the end then.
            if !matches!(kind.as_str(), "AgentLost" | "OutcomeUnknown") && fixture.version() != before {
                return Err(format!("version {version} failed ({kind}: {message}), and the group is at {}", fixture.version()));
            }
        }
    }
    struck.outcome = Some(outcome);
    Ok(())
}

/// What a fault that lasts must not stop, and by whom it must be noticed.
async fn live_with(fixture: &mut Fixture, strike: &Strike, struck: &mut Struck) -> Result<(), String> {
    let victim = member(strike.victim);
    if let Some(deadline) = fault::noticed_within(strike.fault) {
        let gone = |view: &MembershipView| {
            let row = view.members.iter().find(|row| row.name.0 == victim);
            row.is_none_or(|row| matches!(row.standing, MemberStanding::Out | MemberStanding::Waiting))
        };
        fixture.until(&format!("{victim} to be missed"), deadline, gone).await?;
        if strike.victim != 0 && struck.version.is_none() {
            others_go_on(fixture, strike, struck).await?;
        }
        return Ok(());
    }
    match strike.fault {
        Fault::FullDisk => {
            // Nothing of an update is written there, but every new group is. Where a group formed without it, the other one comes back by
            // itself.
            if !matches!(strike.phase, Phase::Prepare | Phase::Commit) {
                signal(fixture.agent(strike.other).await?, Signal::KILL)?;
            }
            let waits = |view: &MembershipView| {
                view.stage == GroupStage::Persisting && view.degraded.iter().any(|row| row.reason == Reason::PersistFailed)
            };
            fixture.until("a group that cannot be written to be informed of", WHOLE, waits).await?;
        }
        Fault::SlowLink | Fault::FullMemory | Fault::SlowEngine | Fault::LyingEngine | Fault::ClockJump | Fault::EndRegistration
            if struck.version.is_none() =>
        {
            others_go_on(fixture, strike, struck).await?;
        }
        Fault::Strangers if struck.version.is_none() => others_go_on(fixture, strike, struck).await?,
        Fault::LyingMember => {
            if strike.lie() == Lie::Engines {
                let taken_in = |row: &&MemberView| row.name.voter() == victim && row.standing == MemberStanding::Ready;
                let all = |view: &MembershipView| view.members.iter().filter(taken_in).count() == MOST_ENGINES;
                fixture.until("all engines that it says to have to be members", WHOLE, all).await?;
            }
            if struck.version.is_none() {
                others_go_on(fixture, strike, struck).await?;
            }
            sleep(LIES.saturating_sub(struck.at.elapsed())).await;
            // Whatever it says, all others hold the version of the last publish, are ready, and are informed of so.
            others_go_on(fixture, strike, struck).await?;
            fixture.whole_but(Some(strike.victim), WHOLE).await?;
        }
        fault if fault.is_step() => {
            if struck.version.is_none() {
                others_go_on(fixture, strike, struck).await?;
            }
            let held = fault::held(strike).unwrap_or_default();
            sleep(held.saturating_sub(struck.at.elapsed())).await;
        }
        _ => {}
    }
    Ok(())
}

/// A version is published while the fault lasts: the others get it.
async fn others_go_on(fixture: &mut Fixture, strike: &Strike, struck: &mut Struck) -> Result<(), String> {
    let (before, version) = (fixture.version(), fixture.next_version().await);
    fixture.publish(version, None).await;
    let begun = Instant::now();
    let mut late = Struck { hit: struck.hit, at: begun, version: Some(version), outcome: None };
    finish(fixture, strike, &mut late, version, before).await?;
    struck.outcome = late.outcome;
    Ok(())
}

/// The next version reaches everybody. Who is slower than the others is not waited for by the publish, and has it soon after.
async fn publish_to_all(fixture: &mut Fixture) -> Result<(), String> {
    let version = fixture.next_version().await;
    fixture.publish(version, None).await;
    match fixture.trainer.outcome(version).await? {
        Outcome::Published { .. } => {}
        other @ Outcome::Failed { .. } => return Err(format!("the version after the fault was not published: {other:?}")),
    }
    fixture.whole(WHOLE).await?;
    if fixture.version() == version {
        Ok(())
    } else {
        Err(format!("version {version} was published, the group is at {}", fixture.version()))
    }
}

/// No other member is held off for what the liar did.
fn liar_deceives_about_itself_only(fixture: &Fixture, strike: &Strike, reported: Range<usize>) -> Result<(), String> {
    let (events, victim) = (fixture.reported.lock().unwrap(), member(strike.victim));
    let of_others =
        |said: &&Said| said.reason == Reason::MemberFailed && said.member.as_ref().is_some_and(|member| !of_pod(member, &victim));
    match events.iter().take(reported.end).skip(reported.start).find(of_others) {
        None => Ok(()),
        Some(said) => Err(format!("{victim} lies, and {:?} is held off: {}", said.member, said.message)),
    }
}

/// Whether it is the pod's engine, or one that the pod says to have.
fn of_pod(member: &str, pod: &str) -> bool {
    member.strip_prefix(pod).is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
}

/// When the victim was first named.
fn first_naming(fixture: &Fixture, strike: &Strike, reported: Range<usize>) -> Option<Instant> {
    let events = fixture.reported.lock().unwrap();
    events.iter().take(reported.end).skip(reported.start).find(|said| names(strike, said)).map(|said| said.at)
}

fn names(strike: &Strike, said: &Said) -> bool {
    let victim = member(strike.victim);
    said.warning && (said.member.as_ref().is_some_and(|member| of_pod(member, &victim)) || said.message.contains(&victim))
}

/// Where somebody felt the fault, status says who and why.
fn named(fixture: &Fixture, strike: &Strike, struck: &Struck, reported: Range<usize>) -> Result<Vec<Reason>, String> {
    let events = fixture.reported.lock().unwrap();
    let since: Vec<&Said> = events.iter().take(reported.end).skip(reported.start).collect();
    let mut reasons: Vec<Reason> = since.iter().filter(|said| names(strike, said)).map(|said| said.reason).collect();
    reasons.sort_unstable();
    reasons.dedup();
    let victim = member(strike.victim);
    let (felt, said) = match &struck.outcome {
        Some(Outcome::Published { behind, attempts, .. }) => {
            // A connection has two ends: a replica without the version because of a lost connection is reported with the other end's name.
            let says = |(member, why): &(String, String)| of_pod(member, &victim) && !why.is_empty() || why.contains(&victim);
            // To reach these phases the test kills another rollout, which may come back during a publish: that is an attempt more.
            let repeated = *attempts > 1 && !matches!(strike.phase, Phase::Prepare | Phase::Commit | Phase::Join);
            (repeated || !behind.is_empty(), behind.iter().any(says))
        }
        // The trainer hears that its agent is gone, which names the source.
        Some(Outcome::Failed { kind, message }) => (true, kind == "AgentLost" && strike.victim == 0 || message.contains(&victim)),
        None => (false, false),
    };
    let must = matches!(
        strike.fault,
        Fault::KillAgent
            | Fault::KillSource
            | Fault::StopAgent
            | Fault::StopSource
            | Fault::HalfOpen
            | Fault::Blackhole
            | Fault::KillEngine
    );
    if (must || felt) && reasons.is_empty() && !said && strike.fault != Fault::FullDisk {
        let reported: Vec<String> = since.iter().map(|said| format!("{}: {}", said.reason, said.message)).collect();
        return Err(format!("no one said what happened to {victim} ({:?}); reported was: {}", struck.outcome, reported.join(" | ")));
    }
    if strike.fault == Fault::FullDisk {
        reasons.push(Reason::PersistFailed);
    }
    Ok(reasons)
}

/// [`play`], with an end: what takes longer than everything in it together hangs.
pub async fn play_bounded(fixture: &mut Fixture, strike: &Strike) -> Result<Record, String> {
    const HANGS: Duration = Duration::from_secs(240);
    let played = timeout(HANGS, play(fixture, strike)).await.unwrap_or_else(|_| Err(format!("it hangs: no end within {HANGS:?}")));
    // What was seen meanwhile may be the cause.
    played.map_err(|error| fixture.watcher.violations().into_iter().fold(error, |error, seen| format!("{error}; {seen}")))
}
