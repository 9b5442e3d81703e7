//! 100 groups built, used and torn down by the same workers: what they hold must not grow.

use anyhow::{Result, bail, ensure};
use futures::future::try_join_all;
use weightsync_core::protocol::worker::WorkerAnswer;

use crate::Settings;
use crate::fleet::{self, AMPLE, Member};
use crate::report::Report;

/// The libraries fill their caches in the first ones.
const FIRST: usize = 10;
const EPOCHS: usize = 100;

#[derive(Debug, Clone, Copy)]
struct Held {
    gpu_free_mib: f64,
    resident_mib: f64,
    descriptors: u32,
    threads: u32,
}

async fn held(member: &Member) -> Result<Held> {
    match member.worker.stats(AMPLE).await? {
        WorkerAnswer::Stats { gpu_free_bytes, resident_bytes, descriptors, threads, groups: 0, under_way: 0, .. } => Ok(Held {
            gpu_free_mib: gpu_free_bytes as f64 / f64::from(1 << 20),
            resident_mib: resident_bytes as f64 / f64::from(1 << 20),
            descriptors,
            threads,
        }),
        other => bail!("a worker without groups says {other:?}"),
    }
}

pub async fn run(settings: &Settings, report: &mut Report) -> Result<()> {
    let settings = Settings { mib: settings.mib.min(16), ..settings.clone() };
    let members = fleet::start(&settings).await?;
    let mut after_first = Vec::new();
    for epoch in 0..EPOCHS {
        let (group, _, _) = fleet::form(&members).await?;
        let slots = fleet::slots(&members).await?;
        fleet::broadcast(&members, group, &slots, settings.mib << 20).await?;
        try_join_all(members.iter().map(|member| member.worker.abort(group, AMPLE))).await?;
        if (epoch + 1) % 20 == 0 {
            println!("  rank 0 after {} groups: {:?}", epoch + 1, held(&members[0]).await?);
        }
        if epoch + 1 == FIRST {
            after_first = try_join_all(members.iter().map(held)).await?;
        }
    }
    let mut rows = Vec::new();
    let mut grown = Vec::new();
    for (rank, (member, before)) in members.iter().zip(after_first).enumerate() {
        let after = held(member).await?;
        rows.push((
            format!("rank {rank}"),
            vec![
                ("GPU MiB +", before.gpu_free_mib - after.gpu_free_mib),
                ("resident MiB +", after.resident_mib - before.resident_mib),
                ("descriptors", f64::from(after.descriptors)),
                ("descriptors +", f64::from(after.descriptors) - f64::from(before.descriptors)),
                ("threads", f64::from(after.threads)),
                ("threads +", f64::from(after.threads) - f64::from(before.threads)),
            ],
        ));
        if after.descriptors > before.descriptors || after.threads > before.threads || before.gpu_free_mib - after.gpu_free_mib > 8.0 {
            grown.push(format!("rank {rank}: {before:?} became {after:?}"));
        }
    }
    report.table(&format!("what a worker holds after {EPOCHS} groups, and since group {FIRST}"), "", &rows);
    ensure!(grown.is_empty(), "{grown:#?}");
    Ok(())
}
