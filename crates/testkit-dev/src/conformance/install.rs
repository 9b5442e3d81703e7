//! An update by the real adapter, and the proof that it happened: there and back again.
//!
//! Expects that the server is what the adapter says, that another version changes what it computes, and that the first version back again gives
//! exactly what the server computed at the start: a change alone would also be seen of garbage.

use std::sync::Arc;
use std::time::Duration;

use super::fixture::Fixture;
use super::source::LEAVE;
use super::{ConformanceError, Row, Way};
use weightsync_agent::hand_over::feed_checkpoint;
use weightsync_core::protocol::HeldVersion;
use weightsync_core::weights::Layout;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_engine::{DeviceJob, Engine, EngineError, Holding, InstallError, InstallReport, Left, Settling};
use weightsync_gpu::worker::{Ring, Worker, WorkerStart};

pub(super) async fn rows(fixture: &Fixture, way: Way) -> Result<Vec<Row>, ConformanceError> {
    let part = &way.part("update");
    let engine = fixture.adapter(&fixture.url)?;
    let engine = engine.as_ref();
    let mut rows = Vec::new();
    let probed = engine
        .probe(fixture.patience)
        .await
        .map(|facts| format!("{} {}, {} ranks, {}", facts.kind, facts.server_version, facts.size, facts.delivery));
    let works = probed.is_ok();
    rows.push(Row::new(part, "probe", "an engine that can be updated", probed.map_err(|error| error.to_string())));
    if !works {
        return Ok(rows);
    }
    let health = engine.health(fixture.patience).await;
    rows.push(Row::new(part, "health", "it lives", health.map(|health| health.start.0).map_err(|error| error.to_string())));
    if way == Way::Group {
        rows.push(Row::new(part, "can its workers join a group", "yes", joins(fixture, engine).await));
    }
    match fixture.route(engine).await {
        _ if way == Way::Group => {}
        Ok(route) => {
            let expected = match way {
                Way::Device(name) => name.to_owned(),
                Way::Directory | Way::Group | Way::Any => "a way from GPU memory".to_owned(),
            };
            let right = !matches!(way, Way::Device(name) if name != route.name);
            let why = route.why_not_faster.map(|why| format!(" ({why})")).unwrap_or_default();
            let found = format!("{}{why}", route.name);
            rows.push(Row::new(part, "way from GPU memory", expected, if right { Ok(found) } else { Err(found) }));
        }
        Err(error) if matches!(way, Way::Device(_)) => rows.push(Row::new(part, "way from GPU memory", "one", Err(error.to_string()))),
        Err(error) => rows.push(Row::skipped(part, "way from GPU memory", error.to_string())),
    }
    if !fixture.has_versions() || !fixture.destructive {
        let why = if fixture.destructive { "no checkpoints were given" } else { "it changes weights: --destructive" };
        rows.push(Row::skipped(part, "install, and back again", why));
        return Ok(rows);
    }
    rows.extend(there_and_back(fixture, part, engine, way).await?);
    Ok(rows)
}

async fn joins(fixture: &Fixture, engine: &dyn Engine) -> Result<String, String> {
    let group = engine.group().ok_or_else(|| "this kind of engine joins none".to_owned())?;
    let facts = group.facts(fixture.patience).await.map_err(|error| error.to_string())?;
    let found = format!("{} ranks, {:?}", facts.size, facts.rendezvous);
    if facts.why_not.is_empty() { Ok(found) } else { Err(facts.why_not) }
}

async fn there_and_back(fixture: &Fixture, part: &str, engine: &dyn Engine, way: Way) -> Result<Vec<Row>, ConformanceError> {
    let mut rows = Vec::new();
    let first = fixture.serves().await;
    let reference = fixture.reference(2).await?;
    let mut served = vec![first.clone()];
    for version in [2, 1, 2] {
        let installed = fixture.install(engine, version, fixture.patience).await;
        let steps =
            |report: InstallReport| report.steps_ms.iter().map(|(step, ms)| format!("{step} {ms} ms")).collect::<Vec<_>>().join(", ");
        let failed = installed.is_err();
        let left = installed.as_ref().is_ok_and(|report| report.steps_ms.iter().any(|(step, _)| step == LEAVE));
        rows.push(Row::new(
            part,
            format!("install version {version}"),
            "confirmed",
            installed.map(steps).map_err(|error| error.to_string()),
        ));
        if failed {
            return Ok(rows);
        }
        if way == Way::Group {
            let found = if left { Ok("it left".to_owned()) } else { Err("it did not, though rank 0 had aborted".to_owned()) };
            rows.push(Row::new(part, "leave the group", "it leaves", found));
        }
        let holding = engine.holding(fixture.patience).await;
        let holds = matches!(&holding, Ok(Holding::Version(held)) if held.version == version);
        let found = format!("{holding:?}");
        rows.push(Row::new(
            part,
            "what it says it holds",
            format!("version {version}"),
            if holds { Ok(format!("version {version}")) } else { Err(found) },
        ));
        let resumed = engine.settle(&Settling::LEFT_PAUSED, fixture.patience).await;
        let runs = resumed.as_ref().is_ok_and(|settled| !settled.resumed && !matches!(settled.holding, Holding::HalfAnUpdate(_)));
        rows.push(Row::new(part, "is it paused", "it runs", if runs { Ok("it runs".into()) } else { Err(format!("{resumed:?}")) }));
        served.push(fixture.serves().await);
    }
    let [first, second, back, again] = served.as_slice() else { return Ok(rows) };
    let reported = |equal: bool, same: &str, other: &str| if equal { Ok(same.to_owned()) } else { Err(other.to_owned()) };
    let works = first.is_ok() && second.is_ok();
    rows.push(Row::new(
        part,
        "another version computes",
        "something else",
        reported(works && first != second, "something else", "the same, or nothing"),
    ));
    rows.push(Row::new(
        part,
        "the first version back again computes",
        "what it did",
        reported(works && first == back, "what it did", "something else"),
    ));
    rows.push(Row::new(part, "the second again", "what that did", reported(works && second == again, "what that did", "something else")));
    if let Some(reference) = reference {
        let same = second.as_ref().is_ok_and(|second| *second == reference);
        rows.push(Row::new(part, "a fresh server on the second", "the same", reported(same, "the same", "something else")));
    }
    Ok(rows)
}

/// Feeds a live server through the memory of its GPUs, as `weightsync-dev feed` does.
pub(super) async fn from_gpus(
    engine: &dyn Engine,
    job: DeviceJob,
    held: HeldVersion,
    checkpoint: Checkpoint,
    gpus: &[String],
) -> Result<InstallReport, InstallError> {
    let clean = InstallError::before_start;
    let route = engine.device_route(job.terms.pause, job.terms.kv_cache, job.terms.timeout).await.map_err(clean)?;
    let wanted = if route.gpus.is_empty() { gpus.to_vec() } else { route.gpus };
    let own = |what: String| clean(EngineError::Unsupported { what, next_step: "give the suite a GPU of the engine (--gpu)".into() });
    let rings = rings(&wanted, &job.layout, job.terms.timeout).await.map_err(own)?;
    let fed = feed_checkpoint(engine, &job, held, Arc::new(checkpoint), &rings, false).await;
    let (report, _) = fed.map_err(|error| error.into_install(Left::Mixture))?;
    Ok(report)
}

async fn rings(wanted: &[String], layout: &Layout, within: Duration) -> Result<Vec<Ring>, String> {
    let slot_bytes = layout.largest_bucket().max(64).next_multiple_of(64);
    let names: Vec<Option<&str>> = if wanted.is_empty() { vec![None] } else { wanted.iter().map(|gpu| Some(gpu.as_str())).collect() };
    let mut rings = Vec::new();
    for gpu in names {
        let start = WorkerStart::own(gpu.unwrap_or("gpu")).map_err(|error| error.to_string())?;
        let worker = Worker::start(&start).map_err(|error| error.to_string())?;
        let (_, facts, _) = worker.open(gpu, None, within).await.map_err(|error| error.to_string())?;
        if let Some(why) = facts.refused {
            return Err(format!("{} cannot be used: {why}", facts.uuid));
        }
        rings.push(worker.ring(2, slot_bytes, within).await.map_err(|error| error.to_string())?);
    }
    Ok(rings)
}
