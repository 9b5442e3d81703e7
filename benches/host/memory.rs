//! Memory that agents take at its highest: pages of their own, pages that they share (the ring, files in memory that they wrote), and the
//! directories of versions. Two versions are published, because the second one arrives while the first one serves.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use weightsync::agent::client::trainer::TrainerClient;
use weightsync::local::{EngineProgram, Group, GroupSpec, PodSpec, UpdateFile, free_port};
use weightsync::membership::GroupStage;
use weightsync::protocol::{Activation, ClientRequest, EngineAssignment, QueuePolicy, Role};
use weightsync::weights::safetensors::SafetensorsPlan;
use weightsync::weights::{Bucket, Dtype, Layout, TensorSpec};

use crate::PROGRAM;
use crate::report::Report;

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
        let folder = tempfile::tempdir()?;
        let versions = tempfile::tempdir_in(&settings.versions)?;
        let peaks = runtime.block_on(measure_one(*megabytes, settings.retain, folder.path(), versions.path()))?;
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

async fn measure_one(megabytes: u64, retain: u32, folder: &Path, versions: &Path) -> Result<Vec<Peak>> {
    let layout = layout(megabytes)?;
    start_checkpoint(&layout, &folder.join("start"))?;
    let name = format!("memory-{}-{megabytes}", std::process::id());
    let group = Group::start(spec(&name, retain, folder, versions)?).await?;
    let mut view = group.view();
    let formed = view.wait_for(|view| view.stage == GroupStage::Committed && view.ready == 1);
    tokio::time::timeout(Duration::from_secs(120), formed).await.context("the group did not form")??;
    let over = Arc::new(AtomicBool::new(false));
    let sampler = sample(["trainer", "actor"], versions.to_owned(), over.clone())?;
    let socket = format!("@weightsync/{name}-trainer").parse().map_err(|error| anyhow!("{error}"))?;
    let published = tokio::task::spawn_blocking(move || -> Result<()> {
        let mut client = TrainerClient::connect(&socket, "weightsync bench")?;
        for version in 1..=2 {
            let request = ClientRequest::Publish {
                version,
                tensors: layout.tensors().cloned().collect(),
                queue: QueuePolicy::Wait,
                activation: Activation::Auto,
                repeatable: true,
                gpu: None,
                timeout_ms: 600_000,
            };
            let mut fill = |_: &Layout, bucket: Bucket, into: &mut [u8]| {
                into.fill(u8::try_from(version).unwrap_or(1).wrapping_add(bucket.sequence.to_le_bytes()[0]));
                Ok(())
            };
            client.publish(&request, &mut fill, &mut |_| ())?;
        }
        Ok(())
    });
    let published = published.await?;
    over.store(true, Ordering::Release);
    let peaks = sampler.join().map_err(|_| anyhow!("the sampler failed"))?;
    group.stop().await;
    published.map(|()| peaks)
}

fn layout(megabytes: u64) -> Result<Layout> {
    // Matrices of 32 MB, as in a model of some billion parameters.
    let tensors = (0..megabytes.div_ceil(32)).map(|number| TensorSpec {
        name: format!("model.layers.{number}.mlp.weight"),
        dtype: Dtype::BF16,
        shape: vec![4000, 4000],
        load_unit: None,
    });
    Ok(Layout::new("model", tensors.collect(), 0)?)
}

/// What the engine starts with: zeros that take no room on disk.
fn start_checkpoint(layout: &Layout, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let plan = SafetensorsPlan::new(layout, None)?;
    for planned in &plan.files {
        std::fs::write(folder.join(&planned.name), &planned.header)?;
        std::fs::OpenOptions::new().write(true).open(folder.join(&planned.name))?.set_len(planned.bytes)?;
    }
    std::fs::write(folder.join("config.json"), "{}")?;
    Ok(())
}

fn spec(name: &str, retain: u32, folder: &Path, versions: &Path) -> Result<GroupSpec> {
    let port = free_port()?;
    let model = folder.join("start").to_string_lossy().into_owned();
    let command = [PROGRAM, "simulate-engine", "--engine", "vllm", "--port", &port.to_string(), "--model", &model].map(str::to_owned);
    let engine = EngineProgram {
        assignment: EngineAssignment { kind: "vllm".into(), port },
        command: command.to_vec(),
        environment: std::collections::BTreeMap::new(),
    };
    let update = UpdateFile { retain_mib: retain, silence_seconds: 30, ..UpdateFile::default() };
    Ok(GroupSpec {
        target: None,
        name: name.to_owned(),
        address: std::net::Ipv4Addr::LOCALHOST.into(),
        directory: folder.to_owned(),
        versions: versions.to_owned(),
        pods: vec![
            PodSpec { name: "trainer".into(), role: Role::Source, size: 1, gpus: Vec::new(), engine: None },
            PodSpec { name: "actor".into(), role: Role::Rollout, size: 1, gpus: Vec::new(), engine: Some(engine) },
        ],
        policy: update.policy(),
        debounce: Duration::from_millis(u64::from(update.debounce_milliseconds)),
        program: PROGRAM.into(),
    })
}

/// Looks at the agents of these pods again and again, in a thread of its own.
fn sample(pods: [&str; 2], versions: PathBuf, over: Arc<AtomicBool>) -> Result<std::thread::JoinHandle<Vec<Peak>>> {
    let mut peaks = Vec::new();
    for pod in pods {
        let pid = agent_of(pod)?;
        let versions = (pod == "actor").then(|| versions.clone());
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
