//! SIGKILL of a worker in the middle of broadcasts, to the first verified broadcast of a new group of the others.
//!
//! NCCL notices nothing; the worker's end is seen here as the agent sees it. The killed worker is then replaced, as an agent would.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::{join_all, try_join_all};
use rustix::process::{Pid, Signal, kill_process};
use weightsync_gpu::worker::Broadcast;

use crate::Settings;
use crate::fleet::{self, AMPLE, Member};
use crate::report::Report;

const RUNS: usize = 20;
/// Buckets that move before the kill.
const BEFORE: usize = 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// Abort, and a new group at the same time.
    Alongside,
    /// Abort, then a new group.
    Behind,
    /// The survivors' group by `ncclCommShrink` with abort.
    Shrink,
    /// Revoke, then shrink.
    Revoke,
}

pub async fn run(settings: &Settings, report: &mut Report) -> Result<()> {
    let settings = Settings { mib: settings.mib.min(64), ..settings.clone() };
    let mut members = fleet::start(&settings).await?;
    if members.len() < 3 {
        println!("# recovery needs 3 GPUs: a group of one says nothing");
        return Ok(());
    }
    let last = members.len() - 1;
    for (how, victim, runs) in
        [(How::Alongside, last, RUNS), (How::Behind, last, 5), (How::Shrink, last, 5), (How::Revoke, last, 5), (How::Alongside, 0, 5)]
    {
        let mut all = Vec::new();
        for _ in 0..runs {
            match one(&settings, &mut members, how, victim).await {
                Ok(ms) => all.push(ms),
                Err(error) if how == How::Alongside => return Err(error),
                Err(error) => {
                    println!("recovery {how:?} does not work here: {error:#}");
                    members.clear();
                    members = fleet::start(&settings).await?;
                    break;
                }
            }
        }
        if !all.is_empty() {
            let who = if victim == 0 { "the source's" } else { "a receiver's" };
            let wanted = if how == How::Alongside { "median below 1000, none above 2000" } else { "for comparison" };
            report.series(&format!("SIGKILL of {who} worker of {} to the first verified broadcast, {how:?}", last + 1), "ms", &all, wanted);
        }
    }
    Ok(())
}

async fn one(settings: &Settings, members: &mut Vec<Member>, how: How, victim: usize) -> Result<f64> {
    let bytes = settings.mib << 20;
    let (group, _, _) = fleet::form(members).await?;
    let pid = Pid::from_raw(members[victim].pid).context("a worker without a pid")?;
    let victim_worker = members[victim].worker.clone();
    let lost = tokio::spawn(async move { tokio::time::timeout(AMPLE, victim_worker.lost()).await.ok().map(|()| Instant::now()) });
    // Broadcasts go on until they fail.
    let mut in_flight = VecDeque::new();
    let mut killed = None;
    let mut moved = 0;
    let failed = loop {
        if in_flight.len() == members[0].ring.slots() as usize
            && let Some(broadcast) = in_flight.pop_front()
        {
            let ended = tokio::select! {
                done = broadcast => { let done: Result<Vec<_>, _> = done; done.is_err() }
                _ = members[victim].worker.ended() => true,
            };
            if ended {
                break Instant::now();
            }
            moved += 1;
        }
        if moved == BEFORE {
            kill_process(pid, Signal::KILL)?;
            killed.get_or_insert_with(Instant::now);
        }
        let mut slots = Vec::new();
        for member in members.iter() {
            slots.push(member.ring.try_take().context("no slot is free")?);
        }
        let asked = members.iter().zip(&slots).map(|(member, slot)| {
            let broadcast = Broadcast { group, root: 0, at: slot.at(0), bytes, parts: fleet::whole(bytes), after: None };
            member.worker.broadcast_now(broadcast, AMPLE)
        });
        in_flight.push_back(try_join_all(asked.collect::<Vec<_>>()));
    };
    let killed = killed.context("a worker ended by itself")?;
    let lost = lost.await?.context("its socket did not close")?;
    drop(in_flight);
    let gone = members.remove(victim);
    let next = fleet::next_group();
    match how {
        How::Alongside | How::Behind => {
            let aborts = join_all(members.iter().map(|member| member.worker.abort(group, AMPLE)));
            if how == How::Behind {
                aborts.await;
            }
            let id = members[0].worker.unique_id(AMPLE).await?;
            let world = u32::try_from(members.len())?;
            try_join_all((0..).zip(members.iter()).map(|(rank, member)| member.worker.join(next, id, rank, world, AMPLE))).await?;
        }
        How::Shrink | How::Revoke => {
            let (without, revoke, within) = (vec![u32::try_from(victim)?], how == How::Revoke, Duration::from_secs(10));
            let shrinks = members.iter().map(|member| member.worker.shrink(group, next, without.clone(), revoke, within));
            try_join_all(shrinks).await?;
        }
    }
    let formed = Instant::now();
    let slots = fleet::slots(members).await?;
    let sum = fleet::broadcast(members, next, &slots, bytes).await?;
    let done = Instant::now();
    ensure!(sum == members[0].worker.digest(slots[0].at(0), fleet::whole(bytes), None, AMPLE).await?.sums[0], "a wrong digest");
    let ms = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64() * 1e3;
    println!(
        "  {how:?} without rank {victim}: socket closed {:.0} ms, ended {:.0} ms, group {:.0} ms, first broadcast {:.0} ms: {:.0} ms",
        ms(killed, lost),
        ms(killed, failed),
        ms(failed, formed),
        ms(formed, done),
        ms(killed, done)
    );
    drop(slots);
    let begun = Instant::now();
    members.insert(victim, Member::start(settings, &gone.gpu).await?);
    println!("  a new worker in its place after {:.0} ms", ms(begun, Instant::now()));
    try_join_all(members.iter().map(|member| member.worker.abort(next, AMPLE))).await?;
    Ok(ms(killed, done))
}
