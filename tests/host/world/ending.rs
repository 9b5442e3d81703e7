//! The end of a world: in good order, and with the output of its processes when a test failed.

use std::path::PathBuf;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::World;
use super::processes::children;

impl World {
    /// Has the group end in good order, so that its agents and the engines that it started end with it, and waits for that.
    pub fn stop(&mut self) {
        let Some(pid) = self.local.id().and_then(|id| Pid::from_raw(i32::try_from(id).unwrap())) else { return };
        // One that was stopped must be able to.
        for (child, _) in children(pid.as_raw_nonzero().get().unsigned_abs()) {
            let _ = kill_process(child, Signal::CONT);
        }
        let _ = kill_process(pid, Signal::TERM);
        let deadline = std::time::Instant::now() + Duration::from_secs(15);
        while self.local.try_wait().is_ok_and(|ended| ended.is_none()) && std::time::Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// What a pod's agent logged, as plain text.
    pub fn log(&self, pod: &str) -> String {
        let log = std::fs::read(self.folder.path().join(format!("state/{pod}-agent.log"))).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    pub(super) fn evidence(&self) {
        for event in self.events.borrow().iter() {
            eprintln!("{event}");
        }
        let mut logs: Vec<PathBuf> = vec![self.folder.path().join("local.log")];
        logs.extend(std::fs::read_dir(self.folder.path().join("state")).into_iter().flatten().flatten().map(|entry| entry.path()));
        for log in logs.iter().filter(|log| log.extension().is_some_and(|extension| extension == "log")) {
            let text = std::fs::read_to_string(log).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            eprintln!("--- {}\n{}", log.display(), lines[lines.len().saturating_sub(25)..].join("\n"));
        }
    }
}
