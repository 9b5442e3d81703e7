//! One child process: started with a log file, ended by its pid, and reported when it ends. Never restarts anything by itself.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::task::JoinHandle;

use super::guard::{Guard, Whole};

/// Longest time that a killed process may take to end.
const KILLED: Duration = Duration::from_secs(5);

/// A running child. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Process {
    pid: Pid,
    whole: Whole,
    waiter: JoinHandle<()>,
}

pub(super) struct Start<'a> {
    pub program: &'a str,
    pub arguments: &'a [String],
    pub environment: Vec<(String, String)>,
    /// The log file; output is appended.
    pub log: &'a Path,
    /// Written to its standard input, which stays open until this program ends. So a secret appears neither in a command line nor in an
    /// environment.
    pub input: Option<String>,
    /// Which processes get its signals.
    pub whole: Whole,
    /// Time between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// Ends it if this program dies.
    pub guard: Arc<Guard>,
}

impl Process {
    /// Starts it; `exited` is called once with how it ended.
    pub(super) fn start(start: Start<'_>, exited: impl FnOnce(String) + Send + 'static) -> io::Result<Self> {
        let log = OpenOptions::new().create(true).append(true).open(start.log)?;
        let mut command = Command::new(start.program);
        command.args(start.arguments).envs(start.environment).stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log).kill_on_drop(true);
        // A terminal's Ctrl-C goes to our whole process group: in that group, an agent would end before its engine is released.
        command.process_group(0);
        let mut child = command.spawn()?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("the process ended at once"))?;
        let (input, guard) = (start.input, start.guard);
        guard.started(pid, start.whole, start.grace);
        let waiter = tokio::spawn(async move {
            let mut stdin = child.stdin.take();
            if let (Some(stdin), Some(input)) = (stdin.as_mut(), input) {
                // A child that does not read this ends, or reports the problem itself.
                let _ = stdin.write_all(input.as_bytes()).await;
                let _ = stdin.flush().await;
            }
            let how = child.wait().await;
            drop(stdin);
            guard.ended(pid);
            exited(describe(how));
        });
        Ok(Self { pid, whole: start.whole, waiter })
    }

    pub(super) fn id(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Sends a signal; has no effect after the child ended. Only our own task reaps the child, so the pid is ours until then.
    pub(super) fn signal(&self, signal: Signal) {
        if !self.waiter.is_finished() {
            let _ = match self.whole {
                Whole::Process => kill_process(self.pid, signal),
                Whole::Group => kill_process_group(self.pid, signal),
            };
        }
    }

    /// Requests its end, kills it after the grace period, and waits for it.
    pub(super) async fn stop(mut self, grace: Duration) {
        self.signal(Signal::TERM);
        if tokio::time::timeout(grace, &mut self.waiter).await.is_err() {
            self.signal(Signal::KILL);
            let _ = tokio::time::timeout(KILLED, &mut self.waiter).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

fn describe(how: io::Result<ExitStatus>) -> String {
    match how {
        Ok(status) => status.to_string(),
        Err(error) => format!("cannot be waited for: {error}"),
    }
}

/// The last lines of a log, for an error message.
pub(super) fn tail(log: &Path, lines: usize) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(8192)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_else(|error| format!("{}: {error}", log.display()));
    let all: Vec<&str> = text.lines().collect();
    all.get(all.len().saturating_sub(lines)..).unwrap_or_default().join("\n")
}
