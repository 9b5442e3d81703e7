//! Memory that agents take at its highest: pages of their own, pages that they share (the ring, files in memory that they wrote), and the
//! directories of versions. Two versions are published, because the second one arrives while the first one serves.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use clap::Args;

use crate::fixture::{Fixture, Over, Wanted};
use crate::report::Report;

/// The rollout that is looked at.
const ROLLOUT: &str = "actor-0";

#[derive(Args, Clone)]
pub struct Settings {
    /// Sizes of models in MB.
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 4000])]
    megabytes: Vec<u64>,
    /// Memory in MiB that the source may keep.
    #[arg(long, default_value_t = 4096)]
    retain: u32,
    /// Where versions are put.
    #[arg(long, default_value = "/dev/shm")]
    versions: PathBuf,
}

impl Default for Settings {
    fn default() -> Self {
        Self { megabytes: vec![1000, 4000], retain: 4096, versions: "/dev/shm".into() }
    }
}

pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    for megabytes in &settings.megabytes {
        let peaks = runtime.block_on(measure_one(*megabytes, settings))?;
        let rows: Vec<_> = peaks.into_iter().map(|peak| (peak.pod, peak.columns)).collect();
        let what = format!("agents of a model of {megabytes} MB, retain {} MiB, two versions, at the highest", settings.retain);
        report.table(&what, "MB", &rows);
    }
    Ok(())
}

/// The highest that was seen of one agent.
struct Peak {
    pod: String,
    pid: u32,
    versions: Option<PathBuf>,
    columns: Vec<(&'static str, f64)>,
}

async fn measure_one(megabytes: u64, settings: &Settings) -> Result<Vec<Peak>> {
    let fixture = Fixture::start(&Wanted {
        what: "memory",
        megabytes,
        retain: settings.retain,
        versions: &settings.versions,
        rollouts: 1,
        later: 0,
        debounce: Duration::from_millis(200),
        over: Over::Tcp,
    })
    .await?;
    let over = Arc::new(AtomicBool::new(false));
    let sampler = sample(["trainer", ROLLOUT], fixture.versions().to_owned(), over.clone())?;
    let published = async {
        fixture.publish(1).await?;
        fixture.publish(2).await
    };
    let published = published.await;
    over.store(true, Ordering::Release);
    let peaks = sampler.join().map_err(|_| anyhow!("the sampler failed"))?;
    fixture.stop().await;
    published.map(|_| peaks)
}

/// Looks at the agents of these pods again and again, in a thread of its own.
fn sample(pods: [&str; 2], versions: PathBuf, over: Arc<AtomicBool>) -> Result<std::thread::JoinHandle<Vec<Peak>>> {
    let mut peaks = Vec::new();
    for pod in pods {
        let pid = agent_of(pod)?;
        let versions = (pod == ROLLOUT).then(|| versions.clone());
        let columns = ["own", "shared", "versions", "together"].map(|name| (name, 0.0)).to_vec();
        peaks.push(Peak { pod: pod.to_owned(), pid, versions, columns });
    }
    Ok(std::thread::spawn(move || {
        while !over.load(Ordering::Acquire) {
            for peak in &mut peaks {
                let status = std::fs::read_to_string(format!("/proc/{}/status", peak.pid)).unwrap_or_default();
                let (own, shared) = (kilobytes(&status, "RssAnon:") + kilobytes(&status, "RssFile:"), kilobytes(&status, "RssShmem:"));
                let versions = peak.versions.as_deref().map_or(0, allocated);
                let seen = [own, shared, versions, own + shared + versions];
                for ((_, highest), bytes) in peak.columns.iter_mut().zip(seen) {
                    *highest = highest.max(megabytes(bytes));
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        peaks
    }))
}

#[allow(clippy::cast_precision_loss)]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn kilobytes(status: &str, field: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Bytes that a folder takes.
fn allocated(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(found) if found.is_dir() => allocated(&entry.path()),
            Ok(found) => found.blocks() * 512,
            Err(_) => 0,
        })
        .sum()
}

/// The process of a pod's agent, a child of this one.
fn agent_of(pod: &str) -> Result<u32> {
    let (own, variable) = (std::process::id().to_string(), format!("POD_NAME={pod}"));
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let child = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)) == Some(own.as_str());
        let environment = if child { std::fs::read(entry.path().join("environ")).unwrap_or_default() } else { Vec::new() };
        if environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes()) {
            return Ok(pid);
        }
    }
    ensure!(false, "no agent of {pod} runs");
    Ok(0)
}
