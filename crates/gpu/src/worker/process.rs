//! The worker as a child process: started with its end of a socket pair as standard input, killed when it hangs or is not needed any more,
//! reaped, and asked how it ended.
//!
//! It reads what the worker and its libraries print, passes it on to the log, and keeps the last lines for the cause.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::WorkerError;
use super::nccl_log::{self, Line, NcclLog};
use super::pending::Pending;
use weightsync_core::protocol::worker::UcxSettings;

/// Lines that are kept for the cause.
const KEPT_LINES: usize = 5;

/// How often overdue requests are looked for.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// A worker that closed its socket ends by itself within this long, or is killed.
const ENDING: Duration = Duration::from_secs(2);

/// NCCL's settings that a worker starts with, unless the environment says otherwise.
///
/// - `NCCL_NVLS_ENABLE=0`: NVLink multicast needs rights that a container may lack, and broadcasts gain nothing by it.
/// - `NCCL_CUMEM_ENABLE=0`: buffers by `cuMemAlloc` instead of virtual memory. Four H200 form a group in 106 ms instead of 321 ms (NCCL
///   2.28.9), and every recovery is that much shorter. SGLang sets it for its weight groups too.
const NCCL_DEFAULTS: [(&str, &str); 2] = [("NCCL_NVLS_ENABLE", "0"), ("NCCL_CUMEM_ENABLE", "0")];

/// How to start a worker.
#[derive(Debug, Clone)]
pub struct WorkerStart {
    /// The program: this one.
    pub program: PathBuf,
    /// Its arguments: `worker`.
    pub arguments: Vec<OsString>,
    /// Added to the environment: NCCL's settings from the allow-list, and library paths.
    pub environment: Vec<(OsString, OsString)>,
    /// Added where our own environment does not have it, instead of the usual defaults of NCCL.
    pub defaults: Vec<(OsString, OsString)>,
    /// Shown in log lines: the GPU, or the member.
    pub label: String,
    /// Whether NCCL's information is read and not shown.
    pub quiet: bool,
}

impl WorkerStart {
    /// A program and its arguments, with nothing added to the environment.
    pub fn new(program: impl Into<PathBuf>, arguments: &[&str], label: impl Into<String>) -> Self {
        let arguments = arguments.iter().map(Into::into).collect();
        Self { program: program.into(), arguments, environment: Vec::new(), defaults: Vec::new(), label: label.into(), quiet: false }
    }

    /// This program's own worker.
    pub fn own(label: impl Into<String>) -> Result<Self, WorkerError> {
        let program = std::env::current_exe().map_err(|error| WorkerError::Start { cause: error.to_string() })?;
        Ok(Self::new(program, &["worker"], label))
    }

    /// With these settings of UCX, which [`Worker::open_fabric`](super::Worker::open_fabric) asks for.
    pub fn with_ucx(mut self, ucx: &UcxSettings) -> Result<Self, WorkerError> {
        let environment = ucx.environment().map_err(|error| WorkerError::Start { cause: error.to_string() })?;
        self.environment.extend(environment.map(|(name, value)| (name.into(), value.into())));
        Ok(self)
    }

    /// So that NCCL's log is read for [`Worker::over_sockets`](super::Worker::over_sockets). What the user set of it stays in force.
    #[must_use]
    pub fn with_nccl_log(mut self) -> Self {
        let own = |name: &str| std::env::var(name).ok();
        let given = |name: &str| {
            let of = |list: &[(OsString, OsString)]| list.iter().rfind(|(known, _)| known == name).map(|(_, value)| value.clone());
            let given = of(&self.environment).and_then(|value| value.into_string().ok());
            given.or_else(|| own(name)).or_else(|| of(&self.defaults).and_then(|value| value.into_string().ok()))
        };
        let settings = nccl_log::settings(given("NCCL_DEBUG").as_deref(), given("NCCL_DEBUG_SUBSYS").as_deref());
        self.environment.extend(settings.environment.map(|(name, value)| (name.into(), value.into())));
        self.quiet = settings.quiet;
        self
    }

    /// Starts the child and gives our end of the socket pair.
    pub(super) fn spawn(&self) -> Result<(Child, UnixStream), WorkerError> {
        let start = || -> std::io::Result<(Child, UnixStream)> {
            let (ours, theirs) = UnixStream::pair()?;
            ours.set_nonblocking(true)?;
            let mut command = Command::new(&self.program);
            let usual = NCCL_DEFAULTS.map(|(name, value)| (OsString::from(name), OsString::from(value)));
            for (name, value) in usual.iter().chain(&self.defaults).filter(|(name, _)| std::env::var_os(name).is_none()) {
                command.env(name, value);
            }
            command.args(&self.arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
            command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
            // Ctrl-C goes to the agent, which ends its workers when it has fenced what they are part of.
            command.process_group(0);
            Ok((command.spawn()?, ours))
        };
        start().map_err(|error| WorkerError::Start { cause: format!("{}: {error}", self.program.display()) })
    }
}

/// What the lines of a worker say of its network.
pub(super) struct Network {
    quiet: bool,
    log: Mutex<NcclLog>,
    /// The group that it joined last, by its log.
    joined: watch::Sender<Option<u64>>,
}

impl Network {
    pub(super) fn new(start: &WorkerStart) -> Arc<Self> {
        Arc::new(Self { quiet: start.quiet, log: Mutex::default(), joined: watch::Sender::new(None) })
    }

    /// Another group is joined.
    pub(super) fn begins(&self) {
        self.log.lock().begins();
    }

    /// Why broadcasts of a joined group pass TCP sockets; none where they do not, or where the log does not get so far in time.
    pub(super) async fn over_sockets(&self, group: u64, within: Duration) -> Option<String> {
        let mut joined = self.joined.subscribe();
        let read = tokio::time::timeout(within, joined.wait_for(|joined| *joined == Some(group))).await;
        read.ok()?.ok()?;
        self.log.lock().over_sockets()
    }

    /// Takes a line; whether it is one for people.
    fn shows(&self, line: &str) -> bool {
        let kind = self.log.lock().read(line);
        match kind {
            Line::Joined(group) => {
                self.joined.send_replace(Some(group));
                false
            }
            Line::Info => !self.quiet,
            Line::Other => true,
        }
    }
}

#[derive(Clone)]
struct LastLines {
    label: Arc<str>,
    lines: Arc<Mutex<VecDeque<String>>>,
    network: Arc<Network>,
}

impl LastLines {
    async fn follow(self, output: impl AsyncRead + Unpin) {
        let mut lines = BufReader::new(output).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            if !self.network.shows(&line) {
                tracing::debug!(worker = %self.label, line, "the worker wrote a line");
                continue;
            }
            tracing::info!(worker = %self.label, line, "the worker wrote a line");
            let mut kept = self.lines.lock();
            if kept.len() == KEPT_LINES {
                kept.pop_front();
            }
            kept.push_back(line);
        }
    }

    fn text(&self) -> String {
        let kept = self.lines.lock();
        kept.iter().map(String::as_str).collect::<Vec<_>>().join(" | ")
    }
}

/// Watches a worker from its start to its end, and books the end. `closed` is cancelled when its socket closed, `kill` when it must end.
pub(super) async fn supervise(
    mut child: Child,
    (label, network): (&str, Arc<Network>),
    pending: &Pending,
    kill: CancellationToken,
    closed: CancellationToken,
) {
    let last = LastLines { label: label.into(), lines: Arc::default(), network };
    let mut readers = tokio::task::JoinSet::new();
    if let Some(output) = child.stdout.take() {
        readers.spawn(last.clone().follow(output));
    }
    if let Some(output) = child.stderr.take() {
        readers.spawn(last.clone().follow(output));
    }
    let mut look = tokio::time::interval(LOOK);
    let mut why = None;
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            () = kill.cancelled() => why = pending.cause().or_else(|| Some("killed".to_owned())),
            () = closed.cancelled() => {
                if let Ok(status) = tokio::time::timeout(ENDING, child.wait()).await {
                    break status;
                }
                why = Some("killed: it closed its socket and did not end".to_owned());
            }
            _ = look.tick() => match pending.overdue() {
                None => continue,
                overdue => why = overdue,
            },
        }
        // It fails its requests before the process is reaped: one that hangs in the driver may take long to die.
        pending.gone(why.as_deref().unwrap_or("killed"));
        let _ = child.start_kill();
        break child.wait().await;
    };
    // The pipes end with the process; a grandchild that holds them must not hold the cause.
    let _ = tokio::time::timeout(ENDING, async { while readers.join_next().await.is_some() {} }).await;
    let mut cause = why.unwrap_or_else(|| match status {
        Ok(status) => status.to_string(),
        Err(error) => format!("it cannot be waited for: {error}"),
    });
    let lines = last.text();
    if !lines.is_empty() {
        cause = format!("{cause}; it said: {lines}");
    }
    pending.gone(&cause);
}
