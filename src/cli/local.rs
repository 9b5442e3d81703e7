//! `weightsync local -f FILE`: a group of processes on this host, until it is interrupted.

use std::io::Write;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use clap::Args;
use serde_json::json;
use tokio::sync::broadcast::error::RecvError;

use super::Output;
use crate::local_file::LocalFile;
use weightsync_coordinator::CoordinatorEvent;
use weightsync_coordinator::local::{EngineProgram, Group, GroupSpec, PodSpec};
use weightsync_core::protocol::{EngineAssignment, Role};
use weightsync_net::logs::{self, LogFormat};
use weightsync_net::shutdown::{self, Hangup, Hangups};

#[derive(Debug, Args)]
pub struct LocalArgs {
    /// The file with trainer, rollouts and policies (docs/local.md).
    #[arg(short, long)]
    filename: PathBuf,
    /// Output format of events: one line of text or one JSON object for each.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// Log filter, e.g. `info` or `weightsync=debug`; logs go to standard error.
    #[arg(long, env = "WEIGHTSYNC_LOG", default_value = "warn")]
    log: String,
}

impl LocalArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        logs::init(LogFormat::Human, &self.log)?;
        let text = std::fs::read_to_string(&self.filename).with_context(|| format!("{} cannot be read", self.filename.display()))?;
        let file = LocalFile::parse(&text).map_err(|error| anyhow!("{}: {error}", self.filename.display()))?;
        let base = self.filename.parent().unwrap_or(Path::new("."));
        let spec = group_spec(&file, base)?;
        super::block_on(self.supervise(spec, &file))
    }

    /// Reads the file again: the target version is applied at once, all other fields at the next start.
    async fn reload(&self, group: &Group, began_with: &LocalFile) {
        let read = tokio::fs::read_to_string(&self.filename).await.map_err(|error| error.to_string());
        let (event, message) = match read.and_then(|text| LocalFile::parse(&text)) {
            Ok(file) => {
                group.set_target(file.target_version).await;
                let target = file.target_version.map_or_else(|| "none".to_owned(), |version| version.to_string());
                let other = LocalFile { target_version: began_with.target_version, ..file } != *began_with;
                let rest = if other { "; all other changes are applied after a restart" } else { "" };
                ("reloaded", format!("target version: {target}{rest}"))
            }
            Err(error) => ("unreadable", format!("{} is not applied: {error}", self.filename.display())),
        };
        self.tell(&json!({"event": event, "message": message}), || message.clone());
    }

    async fn supervise(&self, spec: GroupSpec, file: &LocalFile) -> anyhow::Result<ExitCode> {
        let mut hangups = Hangups::new().context("signals cannot be awaited")?;
        let stop = shutdown::on_signals().context("signals cannot be awaited")?;
        let socket = spec.pods.first().map(|trainer| format!("@weightsync/{}-{}", spec.name, trainer.name)).unwrap_or_default();
        let logs = spec.directory.display().to_string();
        let group = Group::start(spec).await?;
        let mut events = group.events();
        self.tell(&json!({"event": "started", "socket": socket, "logs": logs}), || {
            format!("started; logs in {logs}\nin the trainer: export WEIGHTSYNC_SOCKET={socket}")
        });
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                hangup = hangups.next() => match hangup {
                    Hangup::Closed => break,
                    Hangup::Reread => self.reload(&group, file).await,
                },
                event = events.recv() => match event {
                    Ok(event) => self.tell(&as_json(&event), || as_line(&event)),
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => break,
                },
            }
        }
        group.stop().await;
        self.tell(&json!({"event": "stopped"}), || "stopped".into());
        Ok(ExitCode::SUCCESS)
    }

    fn tell(&self, object: &serde_json::Value, line: impl FnOnce() -> String) {
        let line = match self.output {
            Output::Human => line(),
            Output::Json => object.to_string(),
        };
        // The reader is gone, or the disk is full: the group continues.
        let _ = writeln!(std::io::stdout(), "{line}");
    }
}

fn as_json(event: &CoordinatorEvent) -> serde_json::Value {
    json!({"event": "group", "reason": event.reason.to_string(), "message": event.message, "member": event.member, "warning": event.warning})
}

fn as_line(event: &CoordinatorEvent) -> String {
    let member = event.member.as_ref().map(|member| format!("{member}: ")).unwrap_or_default();
    format!("{} {}{}", event.reason, member, event.message)
}

/// Converts the file into the group's settings; paths are relative to the file.
fn group_spec(file: &LocalFile, base: &Path) -> anyhow::Result<GroupSpec> {
    let directory = base.join(&file.directory);
    std::fs::create_dir_all(&directory).with_context(|| format!("{} cannot be made", directory.display()))?;
    let trainer = PodSpec {
        name: file.trainer.name.clone(),
        role: Role::Source,
        size: 1,
        gpus: file.trainer.gpu.iter().cloned().collect(),
        engine: None,
    };
    let rollouts = file.rollouts.iter().map(|rollout| PodSpec {
        name: rollout.name.clone(),
        role: Role::Rollout,
        size: rollout.size,
        gpus: rollout.gpus.clone(),
        engine: Some(EngineProgram {
            assignment: EngineAssignment { kind: rollout.engine.kind.clone(), port: rollout.engine.port },
            command: rollout.engine.command.clone(),
            environment: rollout.engine.environment.clone(),
        }),
    });
    let program = std::env::current_exe().context("this program's own path is unknown")?;
    Ok(GroupSpec {
        name: file.name.clone(),
        address: Ipv4Addr::LOCALHOST.into(),
        pods: std::iter::once(trainer).chain(rollouts).collect(),
        versions: file.versions.clone().unwrap_or_else(|| PathBuf::from(format!("/dev/shm/weightsync-{}", file.name))),
        directory,
        policy: file.policy(),
        target: file.target_version,
        debounce: std::time::Duration::from_millis(u64::from(file.update.debounce_milliseconds)),
        guard: program.clone(),
        program,
    })
}
