//! Processes of a world, found by a variable of their environment among the children of this process. Ends only what it was asked to.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep};

/// A child whose environment holds `variable` exactly.
fn child(variable: &str) -> Option<Pid> {
    let me = std::process::id();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        if parent(&entry.path()) != Some(me) {
            continue;
        }
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        if environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes()) {
            return Pid::from_raw(pid);
        }
    }
    None
}

/// The parent of a process that has not ended.
fn parent(process: &Path) -> Option<u32> {
    let stat = std::fs::read_to_string(process.join("stat")).ok()?;
    // The name of a process may hold anything; after its last parenthesis stand state and parent.
    let mut rest = stat.rsplit(')').next()?.split_whitespace();
    let state = rest.next()?;
    rest.next().filter(|_| state != "Z" && state != "X")?.parse().ok()
}

/// Waits until there is such a child, and it is another one than `before`.
pub async fn until_child(variable: &str, deadline: Duration, before: Option<Pid>) -> Result<Pid, String> {
    let until = Instant::now() + deadline;
    loop {
        if let Some(pid) = child(variable).filter(|pid| before != Some(*pid)) {
            return Ok(pid);
        }
        if Instant::now() > until {
            return Err(format!("no process with {variable} within {deadline:?}"));
        }
        sleep(Duration::from_millis(10)).await;
    }
}

/// Sends a signal to a process that is there.
pub fn signal(pid: Pid, signal: Signal) -> Result<(), String> {
    kill_process(pid, signal).map_err(|error| format!("{signal:?} to {pid:?}: {error}"))
}
