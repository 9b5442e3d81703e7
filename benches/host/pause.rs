//! How long an engine is paused in an update, against the whole update.
//!
//! Reported twice: by its agent's metrics (from the call that pauses until it runs again), and by a client that asks for one token again and
//! again, whose longest wait it is. A simulated engine loads by reading and hashing every byte; a real one's load takes its own time
//! instead.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::fixture::{Fixture, Installs, Over, Wanted};
use crate::report::{Report, median};

/// The replica that is looked at.
const LOOKED_AT: &str = "actor-0";
/// Between two requests of the client.
const PERIOD: Duration = Duration::from_millis(5);

#[derive(Args, Clone)]
pub struct Settings {
    /// Updates that are measured; one more goes before.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Size of the model in MB.
    #[arg(long, default_value_t = 1000)]
    megabytes: u64,
    /// Replicas, all on this host: several share its cores while they load.
    #[arg(long, default_value_t = 1)]
    replicas: u32,
    /// Where versions are put.
    #[arg(long, default_value = "/dev/shm")]
    versions: PathBuf,
}

impl Default for Settings {
    fn default() -> Self {
        Self { runs: 5, megabytes: 1000, replicas: 1, versions: "/dev/shm".into() }
    }
}

/// One update, in seconds.
struct Update {
    whole: f64,
    paused: f64,
    load: f64,
    /// The longest that a client waited for its token.
    waited: f64,
    /// What it usually waited.
    usually: f64,
}

pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let updates = runtime.block_on(updates(settings))?;
    let of = |part: fn(&Update) -> f64| updates.iter().map(part).collect::<Vec<_>>();
    let what = format!("an update of {} MB to {} simulated vLLM(s)", settings.megabytes, settings.replicas);
    report.compare(
        &what,
        "s",
        ("engine paused", &of(|update| update.paused)),
        ("whole update", &of(|update| update.whole)),
        "for comparison",
    );
    let milliseconds = |part: fn(&Update) -> f64| of(part).into_iter().map(|seconds| seconds * 1e3).collect::<Vec<_>>();
    for (name, part) in [
        ("the engine was paused", (|update| update.paused) as fn(&Update) -> f64),
        ("of it, the engine's own load", |update| update.load),
        ("the longest wait of a client for one token", |update| update.waited),
        ("that client's usual wait", |update| update.usually),
    ] {
        report.series(&format!("{what}: {name}"), "ms", &milliseconds(part), "for comparison");
    }
    Ok(())
}

async fn updates(settings: &Settings) -> Result<Vec<Update>> {
    let fixture = Fixture::start(&Wanted {
        what: "pause",
        megabytes: settings.megabytes,
        retain: 4096,
        versions: &settings.versions,
        rollouts: settings.replicas,
        later: 0,
        debounce: Duration::from_millis(200),
        over: Over::Tcp,
    })
    .await?;
    let mut all = Vec::new();
    let mut before = Installs::default();
    for version in 1..=u64::from(settings.runs) + 1 {
        let over = CancellationToken::new();
        let client = tokio::spawn(ask(fixture.http(), fixture.engine(0)?, over.clone()));
        let (published, took) = fixture.publish(version).await?;
        over.cancel();
        let waits = client.await??;
        ensure!(published.installed.len() == usize::try_from(settings.replicas)?, "not all replicas took the version: {published:?}");
        let after = fixture.installs(LOOKED_AT, version).await?;
        // The first one finds pages of memory that no one touched.
        if version > 1 {
            all.push(Update {
                whole: took.as_secs_f64(),
                paused: after.paused() - before.paused(),
                load: after.step("load") - before.step("load"),
                waited: waits.iter().copied().fold(0.0, f64::max),
                usually: median(&waits),
            });
        }
        before = after;
    }
    fixture.stop().await;
    Ok(all)
}

/// Asks an engine for one token until `over`; how long each took.
async fn ask(http: reqwest::Client, engine: String, over: CancellationToken) -> Result<Vec<f64>> {
    let mut waits = Vec::new();
    while !over.is_cancelled() {
        let start = Instant::now();
        let body = json!({"model": "model", "prompt": "a prompt", "max_tokens": 1, "temperature": 0});
        let answer = http.post(format!("{engine}/v1/completions")).json(&body).send().await?;
        answer.error_for_status().context("a request was not served")?;
        waits.push(start.elapsed().as_secs_f64());
        tokio::time::sleep(PERIOD).await;
    }
    Ok(waits)
}
