//! The GPUs of `weightsync-dev demo --gpu`: the source takes the first, each replica one of the others. Decides whether there are enough.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};

use super::show::Screen;
use weightsync_core::protocol::worker::{GpuFacts, WorkerAnswer};
use weightsync_gpu::worker::{Worker, WorkerStart};

/// A driver that has just been loaded takes seconds for eight GPUs; one that takes longer hangs.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

/// A source, a replica that is killed, and one that continues.
const FEWEST: usize = 3;

/// UUIDs of the first `wanted` GPUs, all when it is 0.
pub async fn find(wanted: usize, screen: &Screen) -> anyhow::Result<Vec<String>> {
    // Agents inherit it and read it themselves.
    let nccl = std::env::var_os("WEIGHTSYNC_NCCL").map(PathBuf::from);
    let worker = Worker::start(&WorkerStart::own("demo")?)?;
    let WorkerAnswer::Devices { gpus, nccl, .. } = worker.devices(nccl.as_deref(), PATIENCE).await.context("see `weightsync doctor`")?
    else {
        bail!("the GPU worker answered with something else");
    };
    let nccl = nccl.map_err(anyhow::Error::msg).context("the GPUs cannot form a group; see `weightsync doctor`")?;
    let chosen = choose(gpus, wanted)?;
    let version = nccl.version;
    screen.say(&format!("NCCL {}.{}.{} in {}", version / 10_000, version / 100 % 100, version % 100, nccl.path));
    for (place, gpu) in chosen.iter().enumerate() {
        let who = if place == 0 { "source".to_owned() } else { format!("actor-{}", place - 1) };
        screen.say(&format!("{who} on {} ({})", gpu.uuid, gpu.name));
    }
    Ok(chosen.into_iter().map(|gpu| gpu.uuid).collect())
}

fn choose(mut gpus: Vec<GpuFacts>, wanted: usize) -> anyhow::Result<Vec<GpuFacts>> {
    let visible = gpus.len();
    let refused = gpus.iter().find_map(|gpu| gpu.refused.clone()).map_or_else(String::new, |why| format!(": {why}"));
    gpus.retain(|gpu| gpu.refused.is_none());
    let usable = gpus.len();
    let count = if wanted == 0 { usable } else { wanted };
    ensure!(
        count >= FEWEST && usable >= count,
        "the demo needs {} GPUs (a source, and replicas of which one is killed); this process sees {visible} and can use {usable}{refused}",
        count.max(FEWEST)
    );
    gpus.truncate(count);
    Ok(gpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(count: usize) -> Vec<GpuFacts> {
        let gpu = |number| GpuFacts {
            uuid: format!("GPU-{number}"),
            name: "NVIDIA H200".into(),
            bus: String::new(),
            memory_bytes: 1,
            free_bytes: 0,
            driver: 13000,
            refused: None,
        };
        (0..count).map(gpu).collect()
    }

    #[test]
    fn first_gpus_are_taken_or_lack_is_named_with_numbers() {
        let uuids = |wanted| choose(gpus(4), wanted).map(|gpus| gpus.len());
        assert_eq!((uuids(0).unwrap(), uuids(3).unwrap(), uuids(4).unwrap()), (4, 3, 4));
        let error = choose(gpus(4), 5).unwrap_err().to_string();
        assert!(error.contains("needs 5 GPUs") && error.contains("sees 4"), "{error}");
        let error = choose(gpus(2), 0).unwrap_err().to_string();
        assert!(error.contains("needs 3 GPUs") && error.contains("sees 2"), "{error}");
    }

    #[test]
    fn unusable_gpu_is_skipped_and_named_when_needed() {
        let mut all = gpus(4);
        all[1].refused = Some("a part of a MIG GPU".into());
        let uuids: Vec<_> = choose(all.clone(), 3).unwrap().into_iter().map(|gpu| gpu.uuid).collect();
        assert_eq!(uuids, ["GPU-0", "GPU-2", "GPU-3"]);
        let error = choose(all, 4).unwrap_err().to_string();
        assert!(error.contains("can use 3: a part of a MIG GPU"), "{error}");
    }
}
