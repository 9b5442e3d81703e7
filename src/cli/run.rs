//! `weightsync run -- COMMAND`: starts an engine (or a trainer) as a child and runs the agent.
//!
//! The container runs as long as the child. Signals go to the child, its end is reported at once and ends the agent, and its exit status
//! becomes the exit status of this program. An agent that fails does not end the child: it is started again.

use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use weightsync_agent::command::AgentArgs;
use weightsync_agent::process::{self, Settings};

/// Signals that are passed on to the child.
const PASSED_ON: [Signal; 6] = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// How long the agent may take to report the child's end to its peers: its own limit for them, and its shutdown.
const REPORTED: Duration = Duration::from_secs(1);

/// How long the agent may take to end after that.
const ENDING: Duration = Duration::from_secs(5);

/// Pause before an agent that could not run is started again.
const AGAIN: Duration = Duration::from_secs(5);

const REAP_EVERY: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    agent: AgentArgs,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

impl RunArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.agent.init_logs()?;
        super::block_on(self.both())
    }

    async fn both(self) -> anyhow::Result<ExitCode> {
        let (program, arguments) = self.command.split_first().context("no command was given")?;
        // Before the child exists, so that no signal in between is lost.
        let mut signals = JoinSet::new();
        let (pids, pid) = watch::channel(None);
        for passed in PASSED_ON {
            let mut coming = signal(SignalKind::from_raw(passed.as_raw())).context("signals cannot be awaited")?;
            let mut pid = pid.clone();
            signals.spawn(async move {
                while coming.recv().await.is_some() {
                    // A signal that arrives before the child's process id is stored waits for it.
                    let Ok(known) = pid.wait_for(Option::is_some).await.map(|known| *known) else { return };
                    if let Some(pid) = known {
                        // It may have ended just now.
                        let _ = kill_process(pid, passed);
                    }
                }
            });
        }
        // The agent's settings first: a mistake in them is reported before an engine loads for minutes. They may read standard input.
        let (ended, command) = watch::channel(None);
        let mut settings = Settings { command: Some(command), ..self.agent.clone().settings().await? };
        settings.gpus.child = true;
        // The command must not see the agent's token, or the API key that the agent sends to it.
        let mut child = Command::new(program)
            .args(arguments)
            .env_remove("WEIGHTSYNC_TOKEN")
            .env_remove("WEIGHTSYNC_ENGINE_API_KEY")
            .spawn()
            .with_context(|| format!("{program} cannot be started"))?;
        let own = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        pids.send_replace(own);
        signals.spawn(reap_orphans(own));
        let cancel = CancellationToken::new();
        let over = cancel.clone();
        let mut agent = tokio::spawn(async move {
            while !over.is_cancelled() {
                match process::run(settings.clone(), over.clone()).await {
                    Ok(()) => return,
                    Err(error) => tracing::error!(%error, "the agent cannot run; it is started again"),
                }
                let _ = timeout(AGAIN, over.cancelled()).await;
            }
        });
        let status = child.wait().await.with_context(|| format!("{program} cannot be awaited"))?;
        tracing::info!(%status, "the command ended");
        ended.send_replace(Some(format!("its process ended ({status})")));
        let _ = timeout(REPORTED, &mut agent).await;
        cancel.cancel();
        // Its engine is gone: nothing is left that could be finished.
        if !agent.is_finished() {
            let _ = timeout(ENDING, agent).await;
        }
        signals.abort_all();
        Ok(exit_code(status))
    }
}

/// As in shells: 128 plus the signal's number if a signal ended it.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// The first process of a container inherits every orphan. This reaps those that ended, except for the child, which is awaited elsewhere.
async fn reap_orphans(own: Option<Pid>) {
    if std::process::id() != 1 {
        return;
    }
    loop {
        sleep(REAP_EVERY).await;
        for orphan in ended_children().into_iter().filter(|pid| Some(*pid) != own) {
            let _ = waitpid(Some(orphan), WaitOptions::NOHANG);
        }
    }
}

/// Zombie children of this process (proc(5): the fields after the name are state and parent).
fn ended_children() -> Vec<Pid> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let ended = |entry: std::fs::DirEntry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let (state, parent) = (fields.next()?, fields.next()?);
        (state == "Z" && parent == "1").then(|| Pid::from_raw(pid))?
    };
    entries.filter_map(Result::ok).filter_map(ended).collect()
}
