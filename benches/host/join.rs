//! From the moment at which a new rollout's engine is healthy until its pod is ready with the current version, and how much of that is not
//! the copy.
//!
//! Each run is a group of its own. The new rollout's agent is there before, as a sidecar is, and its engine is started after a publish.
//! "Healthy" is the engine's own `/health`, asked every 2 ms; "ready" is what the group says of the replica, and then the agent's
//! `/readyz`, which Kubernetes asks.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use weightsync_core::protocol::{UpdatePhase, UpdateView};

use crate::fixture::{Fixture, Over, Wanted};
use crate::report::{Report, median};

#[derive(Args, Clone)]
pub struct Settings {
    /// Joins that are measured.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Size of the model in MB.
    #[arg(long, default_value_t = 1000)]
    megabytes: u64,
    /// Replicas that are there before.
    #[arg(long, default_value_t = 2)]
    replicas: u32,
    /// How long a join waits for others, in ms: what an object says unless its author does.
    #[arg(long, default_value_t = 1000)]
    debounce: u64,
    /// Where versions are put.
    #[arg(long, default_value = "/dev/shm")]
    versions: PathBuf,
}

impl Default for Settings {
    fn default() -> Self {
        Self { runs: 5, megabytes: 1000, replicas: 2, debounce: 1000, versions: "/dev/shm".into() }
    }
}

/// Parts of one join, in ms.
struct Join {
    /// From healthy to ready.
    whole: f64,
    /// Bytes travelled.
    copy: f64,
    /// The engine loaded: its own time.
    load: f64,
    /// The feed's other phases: opened, compared, switched.
    rest_of_feed: f64,
}

impl Join {
    /// Until the group began to feed it: seen, waited for others, a new epoch.
    fn before(&self) -> f64 {
        self.whole - self.copy - self.load - self.rest_of_feed
    }
}

pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let joins = (0..settings.runs).map(|_| runtime.block_on(join(settings))).collect::<Result<Vec<_>>>()?;
    let of = |part: fn(&Join) -> f64| joins.iter().map(part).collect::<Vec<_>>();
    let what = format!("a rollout joins {} replicas of {} MB: from healthy to ready", settings.replicas, settings.megabytes);
    report.series(&what, "ms", &of(|join| join.whole), "for comparison");
    report.series(&format!("{what}, beyond the copy"), "ms", &of(|join| join.whole - join.copy), "for comparison");
    let part = |part: fn(&Join) -> f64| median(&of(part));
    let columns = vec![
        ("until it is fed", part(Join::before)),
        ("copy", part(|join| join.copy)),
        ("engine's load", part(|join| join.load)),
        ("rest of feed", part(|join| join.rest_of_feed)),
    ];
    report.table(
        &format!("parts of it, {} ms of which it waits for others to join", settings.debounce),
        "ms",
        &[("median".to_owned(), columns)],
    );
    Ok(())
}

async fn join(settings: &Settings) -> Result<Join> {
    let fixture = Fixture::start(&Wanted {
        what: "join",
        megabytes: settings.megabytes,
        retain: 4096,
        versions: &settings.versions,
        rollouts: settings.replicas,
        later: 1,
        debounce: Duration::from_millis(settings.debounce),
        over: Over::Tcp,
    })
    .await?;
    let (published, _) = fixture.publish(1).await?;
    ensure!(published.installed.len() == usize::try_from(settings.replicas)?, "not all replicas took the version: {published:?}");
    let newcomer = format!("actor-{}", settings.replicas);
    let ready = format!("{}/readyz", fixture.pages(&newcomer)?);
    let engine = fixture.start_engine(settings.replicas)?;
    let healthy = fixture.until_answers(&format!("{}/health", fixture.engine(settings.replicas)?)).await?;
    fixture.until("the newcomer to be ready", |view| view.ready == settings.replicas + 1).await?;
    let whole = fixture.until_answers(&ready).await?.duration_since(healthy);
    let fed = |update: &UpdateView| update.feeding && update.phase == UpdatePhase::Done;
    let view = fixture.until("the feed to be over", |view| view.update.as_ref().is_some_and(fed)).await?;
    let installs = fixture.installs(&newcomer, 1).await?;
    let view = view.update.context("no update is known")?;
    let of_feed = |wanted: &str| {
        view.phases_ms.iter().filter(|(phase, _)| wanted.is_empty() || phase == wanted).map(|(_, ms)| number(*ms)).sum::<f64>()
    };
    let (copy, load) = (of_feed("transfer"), installs.step("load") * 1e3);
    fixture.stop().await;
    drop(engine);
    Ok(Join { whole: whole.as_secs_f64() * 1e3, copy, load, rest_of_feed: of_feed("") - copy - load })
}

#[allow(clippy::cast_precision_loss)]
fn number(milliseconds: u64) -> f64 {
    milliseconds as f64
}
