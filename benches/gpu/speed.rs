//! How fast: broadcasts with and without digests against torch in the same run, and the formation of a group.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::Result;
use futures::future::try_join_all;
use weightsync_core::protocol::worker::Part;
use weightsync_gpu::worker::Broadcast;

use crate::fleet::{self, AMPLE, Member};
use crate::report::Report;
use crate::{Settings, torch};

/// Buckets of one measurement: 32 GiB with 256 MiB each.
const BUCKETS: usize = 128;

pub async fn bandwidth(settings: &Settings, report: &mut Report) -> Result<()> {
    let bytes = settings.mib << 20;
    let mut torch_runs = Vec::new();
    // Torch before and after, with no worker on the GPUs: clocks and temperature change while one looks.
    torch_runs.extend(torch::bandwidth(settings, BUCKETS)?);
    let members = fleet::start(settings).await?;
    let (group, _, _) = fleet::form(&members).await?;
    let (mut plain, mut digested) = (Vec::new(), Vec::new());
    once(&members, group, bytes, &[]).await?;
    once(&members, group, bytes, &fleet::whole(bytes)).await?;
    for _ in 0..settings.runs {
        plain.push(once(&members, group, bytes, &[]).await?);
        digested.push(once(&members, group, bytes, &fleet::whole(bytes)).await?);
    }
    drop(members);
    torch_runs.extend(torch::bandwidth(settings, BUCKETS)?);
    let what = format!("broadcast of {} MiB buckets to {} receivers", settings.mib, torch::world(settings).await? - 1);
    report.compare(&what, "GB/s", ("weightsync", &plain), ("torch.distributed", &torch_runs), "0.98");
    let what = format!("{what}, with digests on all ranks");
    report.compare(&what, "GB/s", ("with digests", &digested), ("without", &plain), "0.95");
    Ok(())
}

/// GB/s of one measurement, all slots in flight.
async fn once(members: &[Member], group: u64, bytes: u64, parts: &[Part]) -> Result<f64> {
    let begun = Instant::now();
    let mut in_flight = VecDeque::new();
    for _ in 0..BUCKETS {
        if in_flight.len() == members[0].ring.slots() as usize {
            finish(in_flight.pop_front()).await?;
        }
        // A slot is free when its broadcast was answered.
        let slots = fleet::slots(members).await?;
        let asked: Vec<_> = members
            .iter()
            .zip(&slots)
            .map(|(member, slot)| {
                let broadcast = Broadcast { group, root: 0, at: slot.at(0), bytes, parts: parts.to_vec(), after: None };
                member.worker.broadcast_now(broadcast, AMPLE)
            })
            .collect();
        in_flight.push_back(try_join_all(asked));
    }
    while !in_flight.is_empty() {
        finish(in_flight.pop_front()).await?;
    }
    Ok(BUCKETS as f64 * bytes as f64 / 1e9 / begun.elapsed().as_secs_f64())
}

async fn finish<T, E: Into<anyhow::Error>>(broadcast: Option<impl Future<Output = Result<T, E>>>) -> Result<()> {
    if let Some(broadcast) = broadcast {
        broadcast.await.map_err(Into::into)?;
    }
    Ok(())
}

pub async fn formation(settings: &Settings, report: &mut Report) -> Result<()> {
    let settings = Settings { mib: 1, ..settings.clone() };
    let members = fleet::start(&settings).await?;
    let (mut all, mut first) = (Vec::new(), None);
    for _ in 0..settings.runs.max(10) {
        let (group, took, joined) = fleet::form(&members).await?;
        let ms = took.as_secs_f64() * 1e3;
        let slowest = |of: fn(&weightsync_gpu::worker::Joined) -> std::time::Duration| joined.iter().map(of).max().unwrap_or_default();
        println!("  group of {}: {ms:.1} ms, init {:?}, warm-up {:?}", members.len(), slowest(|j| j.init), slowest(|j| j.warm_up));
        if first.replace(ms).is_some() {
            all.push(ms);
        }
        try_join_all(members.iter().map(|member| member.worker.abort(group, AMPLE))).await?;
    }
    report.series(&format!("formation of a group of {} warm workers, warm-up included", members.len()), "ms", &all, "below 150");
    Ok(())
}
