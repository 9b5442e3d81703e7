//! The same update with one call spoiled after the other: what an adapter makes of a server that dies, refuses, lies or falls silent.
//!
//! The invariant: after any fault, no report names a version that is not served. An engine that may hold half an update is marked and never
//! resumed. A running engine serves one whole version. The same version can be installed afterwards (if a server is stuck in a broadcast:
//! after its restart). In doubt a server may be taken for a restarted one, and is then fed again. Does not decide which call may fail how:
//! all are tried.

use std::time::Duration;

use futures::StreamExt;

use super::fixture::Fixture;
use super::proxy::{Proxy, Spoil};
use super::{ConformanceError, Options, Row, Way};
use weightsync_engine::{EngineError, Holding, InstallError, InstallReport, Left, Settling};

/// Cases that run at once; each has a server of its own.
const AT_ONCE: usize = 8;
/// The same where each has GPU workers as well.
const GROUPS_AT_ONCE: usize = 5;
/// A server that computes no token for so long is stuck.
const STUCK: Duration = Duration::from_secs(5);
/// Longest time of one case, in waits for an answer: each of its steps waits for a few.
const CASE_WAITS: u32 = 10;
const EXPECTED: &str = "no lie, and the version goes in afterwards";

/// What a server serves with each version.
struct References {
    first: String,
    second: String,
}

/// Every call of an update, spoiled in every way; a fresh simulator for each.
pub(super) async fn simulated(options: &Options, way: Way) -> Result<Vec<Row>, ConformanceError> {
    let part = way.part("negative");
    let fixture = Fixture::simulated(options, way).await?;
    let (calls, references) = match learn(&fixture).await? {
        Ok(learned) => learned,
        Err(why) => return Ok(vec![Row::new(&part, "an update through a relay", "confirmed", Err(why))]),
    };
    // A simulated LMDeploy goes to sleep, and wakes, although its workers are stuck: whether it is stuck cannot be seen there.
    let of_groups = (fixture.joins() && fixture.engine != "lmdeploy").then_some(Spoil::KillSource);
    let spoils: Vec<Spoil> = Spoil::ALL.into_iter().chain(of_groups).collect();
    let cases = calls.iter().enumerate().flat_map(|(number, call)| spoils.iter().map(move |spoil| (number, call.clone(), *spoil)));
    let (part, references) = (&part, &references);
    let rows = futures::stream::iter(cases).map(|(number, call, spoil)| async move {
        let fixture = Fixture::simulated(options, way).await?;
        case(&fixture, part, number, &call, spoil, references).await
    });
    let rows: Vec<Result<Row, ConformanceError>> = rows.buffered(if fixture.joins() { GROUPS_AT_ONCE } else { AT_ONCE }).collect().await;
    rows.into_iter().collect()
}

/// The same on a live server: one case after the other, and no process is killed.
pub(super) async fn live(fixture: &Fixture) -> Result<Vec<Row>, ConformanceError> {
    let part = &fixture.part("negative");
    if !fixture.has_versions() || !fixture.destructive {
        let why = if fixture.destructive { "no checkpoints were given" } else { "it changes weights: --destructive" };
        return Ok(vec![Row::skipped(part, "every call spoiled", why)]);
    }
    let (calls, references) = match learn(fixture).await? {
        Ok(learned) => learned,
        Err(why) => return Ok(vec![Row::new(part, "an update through a relay", "confirmed", Err(why))]),
    };
    let mut rows = vec![Row::skipped(part, "the server is killed before each call", "anyone who runs a live server kills it")];
    if fixture.joins() {
        let why = "a rank 0 that gives up in the middle of a broadcast may leave a live server stuck for good";
        rows.push(Row::skipped(part, "no answer to each call", why));
    }
    for (number, call) in calls.iter().enumerate() {
        for spoil in Spoil::ALL.into_iter().filter(|spoil| *spoil != Spoil::Kill && !(fixture.joins() && spoil.is_quiet())) {
            rows.push(case(fixture, part, number, call, spoil, &references).await?);
        }
    }
    Ok(rows)
}

/// One update through the relay with nothing spoiled: its calls, and what the server serves before and after. It is back at the first then.
async fn learn(fixture: &Fixture) -> Result<Result<(Vec<String>, References), String>, ConformanceError> {
    let direct = fixture.adapter(&fixture.url)?;
    if !fixture.is_simulated()
        && let Err(error) = fixture.install(direct.as_ref(), 1, fixture.patience).await
    {
        return Ok(Err(error.to_string()));
    }
    let first = match fixture.serves().await {
        Ok(first) => first,
        Err(why) => return Ok(Err(why)),
    };
    let proxy = Proxy::start(&fixture.url, fixture.killer()).await?;
    let engine = fixture.adapter(&proxy.url())?;
    // What is asked once for each start of a server is asked again for each case.
    proxy.begin(None);
    if let Err(error) = attempt(fixture, engine.as_ref(), fixture.patience).await {
        return Ok(Err(error.to_string()));
    }
    let calls = proxy.seen();
    let second = match fixture.serves().await {
        Ok(second) => second,
        Err(why) => return Ok(Err(why)),
    };
    if first == second {
        return Ok(Err("both versions are served alike, so they cannot be distinguished".into()));
    }
    Ok(Ok((calls, References { first, second })))
}

/// Probe and install, as an agent does both.
async fn attempt(fixture: &Fixture, engine: &dyn weightsync_engine::Engine, within: Duration) -> Result<InstallReport, InstallError> {
    let clean = |source: EngineError| InstallError { step: "probe", left: Left::AsBefore, source };
    engine.probe(within).await.map_err(clean)?;
    fixture.install(engine, 2, within).await
}

async fn case(
    fixture: &Fixture,
    part: &str,
    number: usize,
    call: &str,
    spoil: Spoil,
    references: &References,
) -> Result<Row, ConformanceError> {
    let step = format!("{} call {} ({call})", spoil.name(), number + 1);
    let limit = fixture.patience * CASE_WAITS;
    let played = tokio::time::timeout(limit, play(fixture, part, number, step.clone(), spoil, references)).await;
    played.unwrap_or_else(|_| Ok(Row::new(part, step, EXPECTED, Err(format!("the case did not end within {limit:?}")))))
}

async fn play(
    fixture: &Fixture,
    part: &str,
    number: usize,
    step: String,
    spoil: Spoil,
    references: &References,
) -> Result<Row, ConformanceError> {
    let direct = fixture.adapter(&fixture.url)?;
    if !fixture.is_simulated()
        && let Err(error) = fixture.install(direct.as_ref(), 1, fixture.patience).await
    {
        return Ok(Row::new(part, step, EXPECTED, Err(format!("the first version cannot be brought back: {error}"))));
    }
    let kill = if spoil == Spoil::KillSource { fixture.source_killer() } else { fixture.killer() };
    let proxy = Proxy::start(&fixture.url, kill).await?;
    let engine = fixture.adapter(&proxy.url())?;
    proxy.begin(Some((number, spoil)));
    let quiet = spoil.is_quiet();
    let within = if quiet { fixture.silence } else { fixture.patience };
    let outcome = attempt(fixture, engine.as_ref(), within).await;
    drop((proxy, engine));
    let restarted = fixture.revive().await?;
    Ok(Row::new(part, step, EXPECTED, judge(fixture, &outcome, restarted, references).await))
}

/// Holds the law against what is found; in words, either way.
async fn judge(
    fixture: &Fixture,
    outcome: &Result<InstallReport, InstallError>,
    mut restarted: bool,
    references: &References,
) -> Result<String, String> {
    let said = |what: &dyn std::fmt::Display| what.to_string();
    // As the next life of an agent finds it.
    let engine = fixture.adapter(&fixture.url).map_err(|error| said(&error))?;
    // Rank 0 gave up while the server was already in the broadcast: that is found, and nothing but another start helps.
    if fixture.joins() && outcome.is_err() && engine.is_stuck(STUCK).await {
        restarted = fixture.restart().await.map_err(|error| said(&error))?;
        if !restarted {
            return Err("it is stuck in a broadcast whose rank 0 is gone: start it again".to_owned());
        }
    }
    let holding = engine.holding(fixture.patience).await.map_err(|error| format!("it does not answer any more: {error}"))?;
    let settled =
        engine.settle(&Settling::LEFT_PAUSED, fixture.patience).await.map_err(|error| format!("it cannot be resumed: {error}"))?;
    let summary = match outcome {
        Ok(_) => "confirmed".to_owned(),
        Err(error) if error.is_dirty() => format!("held: {error}"),
        Err(error) => format!("failed: {error}"),
    };
    match &holding {
        Holding::HalfAnUpdate(_) if settled.resumed => return Err(format!("{summary}, and half an update was let run")),
        Holding::HalfAnUpdate(_) if outcome.is_ok() => return Err(format!("{summary}, and it is marked as half an update")),
        Holding::HalfAnUpdate(_) => {}
        Holding::Foreign(text) => return Err(format!("{summary}, and it holds {text:?}")),
        Holding::Startup | Holding::Version(_) => {
            let served = fixture.serves().await?;
            let is_second = served == references.second;
            if !is_second && served != references.first {
                return Err(format!("{summary}, and it serves neither version, unmarked"));
            }
            let second = matches!(&holding, Holding::Version(held) if held.version == 2);
            // One that is taken for a fresh start is fed again, whatever it serves; one that says a version must serve it.
            if second && !is_second {
                return Err(format!("{summary}, and it says {holding:?} and serves the first version"));
            }
            if outcome.is_ok() && !is_second && !restarted {
                return Err(format!("{summary}, and it serves the first version"));
            }
            if outcome.as_ref().is_err_and(weightsync_engine::InstallError::is_dirty) && !restarted && !second {
                return Err(format!("{summary}, and it is not marked"));
            }
        }
    }
    fixture
        .install(engine.as_ref(), 2, fixture.patience)
        .await
        .map_err(|error| format!("{summary}, and then it takes no update: {error}"))?;
    let served = fixture.serves().await?;
    if served != references.second {
        return Err(format!("{summary}, and then an update that was confirmed is not served"));
    }
    Ok(summary)
}
