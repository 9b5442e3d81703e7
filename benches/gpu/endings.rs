//! How groups end: aborted twice, aborted in the middle, aborted and dropped; and a rank that never comes.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::future::{join_all, try_join_all};
use weightsync_core::protocol::worker::WorkerFaultCode;
use weightsync_gpu::worker::{Broadcast, WorkerError};

use crate::Settings;
use crate::fleet::{self, AMPLE};

pub async fn run(settings: &Settings) -> Result<()> {
    let settings = Settings { mib: settings.mib.min(64), ..settings.clone() };
    let bytes = settings.mib << 20;
    let mut members = fleet::start(&settings).await?;
    let slots = fleet::slots(&members).await?;

    let (group, _, _) = fleet::form(&members).await?;
    let twice = members.iter().flat_map(|member| [member.worker.abort(group, AMPLE), member.worker.abort(group, AMPLE)]);
    try_join_all(twice).await?;
    try_join_all(members.iter().map(|member| member.worker.abort(group, AMPLE))).await?;
    println!("endings: aborted twice at once, and once more");

    let (group, _, _) = fleet::form(&members).await?;
    let late = Duration::from_millis(500);
    let alone = Broadcast { group, root: 0, at: slots[0].at(0), bytes, parts: Vec::new(), after: None };
    let begun = Instant::now();
    let fault = members[0].worker.broadcast(alone.clone(), late).await;
    // The source may be through when its receivers have room for the bytes; it must not hang.
    println!("endings: a broadcast that no one else enters ends after {:?}: {fault:?}", begun.elapsed());
    ensure!(begun.elapsed() < late + Duration::from_millis(500), "too late");
    try_join_all(members.iter().map(|member| member.worker.abort(group, AMPLE))).await?;
    let refused = members[0].worker.broadcast(alone, AMPLE).await;
    let aborted = matches!(&refused, Err(WorkerError::Fault { fault, .. }) if fault.code == WorkerFaultCode::Aborted);
    ensure!(aborted, "a broadcast into an aborted group: {refused:?}");

    let within = Duration::from_secs(3);
    let id = members[0].worker.unique_id(AMPLE).await?;
    let begun = Instant::now();
    let (group, world) = (fleet::next_group(), u32::try_from(members.len() + 1)?);
    let joins = (0..).zip(&members).map(|(rank, member)| member.worker.join(group, id, rank, world, within));
    let joins = join_all(joins).await;
    let took = begun.elapsed();
    let all_late = joins.iter().all(|join| matches!(join, Err(WorkerError::Fault { fault, .. }) if fault.code == WorkerFaultCode::Late));
    println!("endings: a rank that never comes: all {} others say so after {took:?}", joins.len());
    ensure!(all_late && took < within + Duration::from_millis(500), "{joins:?}");
    let (group, took, _) = fleet::form(&members).await?;
    fleet::broadcast(&members, group, &slots, bytes).await?;
    println!("endings: the next group forms in {took:?}");

    // Abort asked for, and the worker dropped before it is done: it must be gone, and its GPU usable.
    let gone = members.remove(0);
    let (gpu, worker) = (gone.gpu.clone(), gone.worker.clone());
    drop(worker.abort(group, AMPLE));
    drop(slots);
    drop(gone);
    worker.kill("the test drops it");
    let begun = Instant::now();
    let cause = tokio::time::timeout(Duration::from_secs(10), worker.ended()).await?;
    println!("endings: aborted and dropped: ended after {:?} ({cause})", begun.elapsed());
    drop(worker);
    try_join_all(members.iter().map(|member| member.worker.abort(group, AMPLE))).await?;
    members.insert(0, fleet::Member::start(&settings, &gpu).await?);
    let slots = fleet::slots(&members).await?;
    let (group, took, _) = fleet::form(&members).await?;
    fleet::broadcast(&members, group, &slots, bytes).await?;
    println!("endings: a new worker in its place: group in {took:?}, broadcast right");
    Ok(())
}
