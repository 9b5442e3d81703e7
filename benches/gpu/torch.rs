//! Torch as the other side: receivers that compare every byte, and its own broadcast as the figure to reach. `tests/gpu/torch_ranks.py`.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::fleet::{self, AMPLE, Member};
use crate::{Settings, pattern};

/// Number of ranks.
pub async fn world(settings: &Settings) -> Result<usize> {
    if settings.gpus > 0 { Ok(settings.gpus) } else { Ok(fleet::gpus(settings).await?.len()) }
}

/// GB/s of torch's own broadcast, one value a measurement.
pub fn bandwidth(settings: &Settings, buckets: usize) -> Result<Vec<f64>> {
    let output = Command::new(&settings.python)
        .arg(&settings.torch_ranks)
        .args(["bandwidth", "--gpus", &settings.gpus.to_string(), "--mib", &settings.mib.to_string()])
        .args(["--buffers", &settings.slots.to_string(), "--buckets", &buckets.to_string(), "--runs", &settings.runs.to_string()])
        .stderr(Stdio::inherit())
        .output()
        .context("python cannot be started")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix("GB/s ")).with_context(|| format!("torch said {text}"))?;
    line.split(' ').map(|run| Ok(run.parse()?)).collect()
}

/// A source of ours, and a receiver in torch on every other GPU.
pub async fn receivers(settings: &Settings) -> Result<()> {
    const BUCKETS: u64 = 8;
    let settings = Settings { mib: settings.mib.min(64), ..settings.clone() };
    let gpus = fleet::gpus(&settings).await?;
    let source = Member::start(&settings, &gpus[0]).await?;
    let id = source.worker.unique_id(AMPLE).await?;
    let mut children = Vec::new();
    for rank in 1..gpus.len() {
        let child = Command::new(&settings.python)
            .arg(&settings.torch_ranks)
            .args(["receive", "--rank", &rank.to_string(), "--gpus", &gpus.len().to_string(), "--mib", &settings.mib.to_string()])
            .args(["--buckets", &BUCKETS.to_string()])
            .env("GROUP_ID", id.to_base64())
            .spawn()?;
        children.push(child);
    }
    let group = fleet::next_group();
    let joined = source.worker.join(group, id, 0, u32::try_from(gpus.len())?, 2 * AMPLE).await?;
    let bytes = settings.mib << 20;
    for bucket in 0..BUCKETS {
        let slot = source.ring.take(AMPLE).await?;
        source.fill(&slot, &pattern::bytes(bucket, usize::try_from(bytes)?)).await?;
        let broadcast = weightsync_gpu::worker::Broadcast { group, root: 0, at: slot.at(0), bytes, parts: Vec::new(), after: None };
        source.worker.broadcast(broadcast, 2 * AMPLE).await?;
    }
    let mut wrong = Vec::new();
    for (child, rank) in children.iter_mut().zip(1..) {
        let begun = std::time::Instant::now();
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                None if begun.elapsed() > 2 * AMPLE => {
                    child.kill()?;
                    bail!("torch rank {rank} does not end");
                }
                None => tokio::time::sleep(std::time::Duration::from_millis(50)).await,
            }
        };
        if !status.success() {
            wrong.push(format!("torch rank {rank}: {status}"));
        }
    }
    ensure!(wrong.is_empty(), "{wrong:?}");
    println!(
        "torch receivers: {} of them, {BUCKETS} buckets of {} MiB, every byte right; joined in {:?}",
        gpus.len() - 1,
        settings.mib,
        joined.init
    );
    source.worker.abort(group, AMPLE).await?;
    Ok(())
}
