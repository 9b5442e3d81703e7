//! How long a group takes to form: without a killed replica, and with it again. From the moment at which membership writes the new epoch
//! until the group is committed.
//!
//! Of the group with it again, one member's agent is new: it opens what the transport needs while the others keep theirs.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use clap::Args;
use tokio::sync::watch;
use weightsync_core::membership::{GroupStage, MembershipView};

use crate::fixture::{Fixture, Over, Wanted};
use crate::report::Report;

/// Longest wait for a group to form.
const LONG: Duration = Duration::from_secs(60);

#[derive(Args, Clone)]
pub struct Settings {
    /// Kills, one after the other.
    #[arg(long, default_value_t = 9)]
    runs: u32,
    /// Members, the trainer included.
    #[arg(long, default_value_t = 4)]
    members: u32,
    /// How bytes travel.
    #[arg(long, value_enum, default_value_t)]
    transport: Over,
    /// Where versions are put.
    #[arg(long, default_value = "/dev/shm")]
    versions: PathBuf,
}

pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let formed = runtime.block_on(formations(settings))?;
    let (over, members) = (settings.transport.name(), settings.members);
    report.series(&format!("a group of {} forms over {over}, a replica killed", members - 1), "ms", &formed.without, "for comparison");
    report.series(&format!("a group of {members} forms over {over}, that replica new"), "ms", &formed.with, "for comparison");
    Ok(())
}

/// Milliseconds of each formation.
#[derive(Default)]
struct Formed {
    without: Vec<f64>,
    with: Vec<f64>,
}

async fn formations(settings: &Settings) -> Result<Formed> {
    let rollouts = settings.members.saturating_sub(1);
    ensure!(rollouts >= 2, "a group needs a trainer and two replicas, of which one is killed");
    let fixture = Fixture::start(&Wanted {
        what: "formation",
        megabytes: 64,
        retain: 1024,
        versions: &settings.versions,
        rollouts,
        later: 0,
        debounce: Duration::from_millis(100),
        over: settings.transport,
    })
    .await?;
    let mut formed = Formed::default();
    for run in 0..settings.runs {
        let (mut view, pod) = (fixture.view(), format!("actor-{}", run % rollouts));
        ensure!(fixture.kill(&pod).await, "there is no such pod");
        formed.without.push(next(&mut view, settings.members - 1).await?);
        ensure!(fixture.replace(&pod).await, "there is no such pod");
        formed.with.push(next(&mut view, settings.members).await?);
        fixture.until("all replicas to be ready", |view| view.ready == rollouts).await?;
    }
    fixture.stop().await;
    Ok(formed)
}

/// How long the next group of `world` ranks takes to form, in ms.
async fn next(view: &mut watch::Receiver<MembershipView>, world: u32) -> Result<f64> {
    let forming = |view: &MembershipView| matches!(view.stage, GroupStage::Persisting | GroupStage::Preparing | GroupStage::Committing);
    let mut begun = None;
    let formed = async {
        loop {
            let seen = view.borrow_and_update().clone();
            if forming(&seen) {
                begun.get_or_insert_with(Instant::now);
            } else if seen.stage == GroupStage::Committed && begun.is_some() && seen.world_size == world {
                return anyhow::Ok(());
            }
            view.changed().await.map_err(|_| anyhow!("the group ended"))?;
        }
    };
    tokio::time::timeout(LONG, formed).await.map_err(|_| anyhow!("no group of {world} ranks was formed"))??;
    Ok(begun.map_or(f64::NAN, |begun| begun.elapsed().as_secs_f64() * 1e3))
}
