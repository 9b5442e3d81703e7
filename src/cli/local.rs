//! `weightsync local -f FILE`: a group of processes on this host, until it is interrupted.

use std::io::{ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use clap::Args;
use serde_json::json;
use tokio::sync::broadcast::error::RecvError;

use super::Output;
use crate::local_file::LocalFiles;
use weightsync_coordinator::CoordinatorEvent;
use weightsync_coordinator::local::{EngineProgram, Group, GroupSpec, PodSpec};
use weightsync_core::protocol::EngineAssignment;
use weightsync_net::logs::{self, LogFormat};
use weightsync_net::shutdown::{self, Hangup, Hangups};

#[derive(Debug, Args)]
pub struct LocalArgs {
    /// Files or folders with one WeightSync and the LocalProcesses of this host (docs/local.md). Other documents are ignored.
    #[arg(short, long, required = true)]
    filename: Vec<PathBuf>,
    /// Loopback address of this host at which agents, engines and the web page are: 127.0.0.1, or ::1.
    #[arg(long, default_value_t = Ipv4Addr::LOCALHOST.into(), value_parser = loopback)]
    address: IpAddr,
    /// Serve the web page of the group on that address at this port; without a port, at a free one.
    #[arg(long, value_name = "PORT", num_args = 0..=1, default_missing_value = "0")]
    ui: Option<u16>,
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
        let files = self.read()?;
        let spec = group_spec(&files, &self.folder(), self.address)?;
        super::block_on(self.supervise(spec, &files))
    }

    fn read(&self) -> anyhow::Result<LocalFiles> {
        let texts: Vec<String> = super::manifests::read(&self.filename)?.into_iter().map(|(_, text)| text).collect();
        let names = || self.filename.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
        LocalFiles::parse(&texts).map_err(|error| anyhow!("{}: {error}", names()))
    }

    /// The folder of the last file, to which paths in the files are relative: the processes usually stand there.
    fn folder(&self) -> PathBuf {
        match self.filename.last() {
            Some(folder) if folder.is_dir() => folder.clone(),
            Some(file) => file.parent().unwrap_or(Path::new(".")).to_owned(),
            None => PathBuf::from("."),
        }
    }

    /// Reads the files again: the target version is applied at once, all other fields at the next start.
    async fn reload(&self, group: &Group, began_with: &LocalFiles) {
        let (event, message) = match self.read() {
            Ok(mut files) => {
                let target = files.object.spec.target();
                group.set_target(target).await;
                let target = target.map_or_else(|| "none".to_owned(), |version| version.to_string());
                files.object.spec.target_version = began_with.object.spec.target_version;
                let other = files != *began_with;
                let rest = if other { "; all other changes are applied after a restart" } else { "" };
                ("reloaded", format!("target version: {target}{rest}"))
            }
            Err(error) => ("unreadable", format!("not applied: {error:#}")),
        };
        self.tell(&json!({"event": event, "message": message}), || message.clone());
    }

    async fn supervise(&self, spec: GroupSpec, files: &LocalFiles) -> anyhow::Result<ExitCode> {
        let mut hangups = Hangups::new().context("signals cannot be awaited")?;
        let stop = shutdown::on_signals().context("signals cannot be awaited")?;
        let socket = spec.pods.first().map(|trainer| format!("@weightsync/{}-{}", spec.name, trainer.name)).unwrap_or_default();
        let logs = spec.directory.display().to_string();
        let _only = only_one(&spec.name)?;
        let group = Group::start(spec).await?;
        let mut events = group.events();
        let page = match self.ui {
            Some(port) => Some(group.serve_page(port).await.with_context(|| format!("--ui: no page at {} port {port}", self.address))?),
            None => None,
        };
        let url = page.as_ref().map(|page| &page.url);
        self.tell(&json!({"event": "started", "socket": socket, "logs": logs, "ui": url}), || {
            let page = url.map(|url| format!("\nweb page: {url}")).unwrap_or_default();
            format!("started; logs in {logs}\nin the trainer: export WEIGHTSYNC_SOCKET={socket}{page}")
        });
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                hangup = hangups.next() => match hangup {
                    Hangup::Closed => break,
                    Hangup::Reread => self.reload(&group, files).await,
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

/// Holds the group's name on this host until the result is dropped, or this process ends in any way. A second group of that name would start
/// agents whose sockets the first one holds, again and again.
fn only_one(name: &str) -> anyhow::Result<UnixListener> {
    let address = SocketAddr::from_abstract_name(format!("weightsync-local/{name}"))?;
    UnixListener::bind_addr(&address).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => {
            anyhow!("a group named {name} already runs on this host: end its `weightsync local`, or change metadata.name")
        }
        _ => anyhow::Error::new(error).context(format!("the name {name} cannot be held on this host")),
    })
}

fn as_json(event: &CoordinatorEvent) -> serde_json::Value {
    json!({"event": "group", "reason": event.reason.to_string(), "message": event.message, "member": event.member, "warning": event.warning})
}

fn as_line(event: &CoordinatorEvent) -> String {
    let member = event.member.as_ref().map(|member| format!("{member}: ")).unwrap_or_default();
    format!("{} {}{}", event.reason, member, event.message)
}

/// Other hosts must not reach what has no authentication: engines, and the web page.
fn loopback(text: &str) -> Result<IpAddr, String> {
    let address: IpAddr = text.parse().map_err(|_| format!("{text} is no address"))?;
    if address.is_loopback() { Ok(address) } else { Err(format!("{address} is no loopback address: give 127.0.0.1 or ::1")) }
}

/// Time that a join waits for others: shorter than in a cluster, because processes of one host start together.
const JOIN_DEBOUNCE: std::time::Duration = std::time::Duration::from_millis(200);

/// Converts the files into the group's settings; paths are relative to `base`.
fn group_spec(files: &LocalFiles, base: &Path, address: IpAddr) -> anyhow::Result<GroupSpec> {
    let processes = &files.processes;
    let directory = base.join(&processes.directory);
    std::fs::create_dir_all(&directory).with_context(|| format!("{} cannot be created", directory.display()))?;
    let trainer = PodSpec {
        name: processes.trainer.name.clone(),
        pool: None,
        size: 1,
        gpus: processes.trainer.gpu.iter().cloned().collect(),
        engine: None,
    };
    let rollouts = files.rollouts.iter().map(|rollout| PodSpec {
        name: rollout.process.name.clone(),
        pool: Some(rollout.pool.clone()),
        size: rollout.ranks,
        gpus: rollout.process.gpus.clone(),
        engine: Some(EngineProgram {
            assignment: EngineAssignment { kind: rollout.kind.name().to_owned(), port: rollout.port },
            registered: None,
            ignored: rollout.ignored.clone(),
            command: rollout.process.command.clone(),
            environment: rollout.process.environment.clone(),
        }),
    });
    let program = std::env::current_exe().context("this program's own path is unknown")?;
    let name = files.name();
    Ok(GroupSpec {
        address,
        pods: std::iter::once(trainer).chain(rollouts).collect(),
        versions: processes.versions.clone().unwrap_or_else(|| PathBuf::from(format!("/dev/shm/weightsync-{name}"))),
        name,
        directory,
        policy: files.policy(),
        join: files.object.spec.membership.join.policy(),
        target: files.object.spec.target(),
        debounce: JOIN_DEBOUNCE,
        guard: program.clone(),
        program,
    })
}
