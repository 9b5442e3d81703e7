//! The kill: chooses the moment by what the victim has received, and measures how long the group takes to notice.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::DemoFault;
use weightsync_coordinator::local::Group;
use weightsync_core::membership::{GroupStage, MembershipView};
use weightsync_core::protocol::MemberName;

/// Longest wait for the victim to report its bytes; shorter than the silence that ends an update.
const PATIENCE: Duration = Duration::from_secs(4);

/// A kill that waits for its moment.
pub struct Kill {
    pub pod: String,
    pub member: MemberName,
    /// Part of the version's buckets after which it is killed, in percent.
    pub at_percent: u64,
    pub fault: DemoFault,
    pub done: Arc<Mutex<Option<Killed>>>,
}

#[derive(Debug, Clone)]
pub struct Killed {
    /// Bytes that the victim had, as the leader last heard.
    pub bytes: u64,
    pub total: u64,
    pub at: Instant,
}

impl Killed {
    /// What the victim had, in percent.
    pub fn percent(&self) -> u64 {
        self.bytes * 100 / self.total.max(1)
    }
}

impl Kill {
    /// Called before each bucket is written: kills when the moment has come. Blocks its thread; an error when the moment was missed.
    pub fn before_bucket(&self, group: &Group, handle: &Handle, offset: u64, total: u64) -> Result<(), String> {
        if self.done.lock().is_some() || offset * 100 < total * self.at_percent {
            return Ok(());
        }
        let mut view = group.view();
        let bytes = handle.block_on(tokio::time::timeout(PATIENCE, bytes_between(&mut view, &self.member, total)));
        let bytes = bytes.map_err(|_| format!("{} did not report between 20 and 80 % of the bytes within {PATIENCE:?}", self.member))?;
        let at = Instant::now();
        let done = match self.fault {
            DemoFault::Kill => handle.block_on(group.kill(&self.pod)),
            DemoFault::Freeze => handle.block_on(group.freeze(&self.pod)),
        };
        if !done {
            return Err(format!("there is no pod {}", self.pod));
        }
        *self.done.lock() = Some(Killed { bytes, total, at });
        Ok(())
    }
}

async fn bytes_between(view: &mut watch::Receiver<MembershipView>, member: &MemberName, total: u64) -> u64 {
    let bytes = |view: &MembershipView| {
        let row = view.update.as_ref()?.members.iter().find(|row| &row.member == member)?;
        (row.bytes * 5 >= total && row.bytes * 5 <= total * 4).then_some(row.bytes)
    };
    match view.wait_for(|view| bytes(view).is_some()).await {
        Ok(view) => bytes(&view).unwrap_or_default(),
        // The group ended: the waiting caller's deadline reports it.
        Err(_) => std::future::pending().await,
    }
}

/// Waits until the group has ended the epoch, or formed a newer one; returns when.
pub async fn noticed(mut view: watch::Receiver<MembershipView>, epoch: u64) -> Instant {
    let gone = view.wait_for(|view| view.epoch > epoch || view.stage != GroupStage::Committed).await.is_ok();
    if gone { Instant::now() } else { std::future::pending().await }
}
