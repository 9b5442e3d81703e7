//! How a FastDeploy server gets its weights, from its command line and the one variable that changes its meaning. Pure.

use std::path::PathBuf;

use serde_json::Value;

use super::async_ipc::Workers;
use super::steps::{By, Names, Steps};
use super::unsupported;
use crate::EngineError;
use crate::process::EngineProcess;

pub(super) const START: &str = "start FastDeploy with --dynamic-load-weight --load_strategy ipc_snapshot";
/// The variable by which a server takes checkpoint tensors, whatever its strategy (`envs.py`: an integer).
pub(super) const FLAG: &str = "FD_USE_GDR_CHECKPOINT_TRANSFER";

/// Whether a server was started with [`FLAG`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flag {
    On,
    Off,
    /// Its environment is not seen from here.
    Unseen,
}

impl Flag {
    /// From the variable, as [`EngineProcess::variable`] gives it.
    #[allow(clippy::option_option)]
    pub(super) fn of(variable: Option<Option<String>>) -> Self {
        match variable {
            None => Self::Unseen,
            Some(value) if value.as_deref().and_then(|value| value.trim().parse::<i64>().ok()).unwrap_or(0) != 0 => Self::On,
            Some(_) => Self::Off,
        }
    }
}

/// How it gets its weights, as far as its start shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Strategy {
    Snapshot,
    /// By the message of #7472.
    AsyncIpc(Workers),
    /// By `/v1/update_weights`: its `checkpoint_transfer` is ours.
    Steps(Steps),
    /// It would be [`Steps`](Self::Steps) with the flag, and its weights are the trainer's own memory without it.
    StepsOrTrainers,
    Other(String),
    Unseen,
}

impl Strategy {
    /// By the command line of its process.
    pub(super) fn of(process: Option<&EngineProcess>, flag: Flag) -> Self {
        let Some(process) = process else { return Self::Unseen };
        let option = |name: &str| process.value(&format!("--{}", name.replace('_', "-"))).or_else(|| process.value(&format!("--{name}")));
        let Some(strategy) = option("load_strategy") else { return Self::Other("none".to_owned()) };
        // What the server does not know stands in the free-form configuration: a server with #7472 looks like one without.
        let config: Value = option("rsync_config").and_then(|config| serde_json::from_str(config).ok()).unwrap_or_default();
        let text = |name: &str| config.get(name).and_then(Value::as_str);
        let steps = |names| {
            let folder = text("directory").filter(|folder| folder.starts_with('/'))?;
            let by = if text("updates") == Some("memory") { By::Memory } else { By::Folder };
            Some(Self::Steps(Steps { folder: PathBuf::from(folder), by, names }))
        };
        let other = || Self::Other(strategy.to_owned());
        match (strategy, flag) {
            ("ipc_snapshot", Flag::Off | Flag::Unseen) => Self::Snapshot,
            ("ipc", _) if text("transfer_mode") == Some("ipc_async") && text("ipc_address").is_some() => {
                let device = config.get("device").and_then(Value::as_u64).unwrap_or(0);
                Self::AsyncIpc(Workers { address: text("ipc_address").unwrap_or_default().to_owned(), device, ranks: ranks(process) })
            }
            ("ipc" | "ipc_snapshot", Flag::On) | ("rsync", Flag::On | Flag::Unseen) => steps(Names::Checkpoint).unwrap_or_else(other),
            ("rsync", Flag::Off) => steps(Names::Own).unwrap_or_else(other),
            ("ipc", Flag::Unseen) if steps(Names::Checkpoint).is_some() => Self::StepsOrTrainers,
            _ => other(),
        }
    }
}

/// Tensor-parallel ranks of a server; 1 if its command line has none.
pub(super) fn ranks(process: &EngineProcess) -> usize {
    let named = process.value("--tensor-parallel-size").or_else(|| process.value("--tensor_parallel_size"));
    named.and_then(|ranks| ranks.parse().ok()).unwrap_or(1)
}

/// Why a server whose flag is not seen cannot be fed.
pub(super) fn flag_unseen() -> EngineError {
    unsupported(
        format!("FastDeploy with --load_strategy ipc takes steps only with {FLAG}=1, and the environment of its process is not seen"),
        "let the agent run as the server's user (or as root), so that it may read it, or start FastDeploy with --load_strategy rsync",
    )
}

/// Why a server with this start-up cannot be fed.
pub(super) fn no_way(strategy: &str) -> EngineError {
    let what = match strategy {
        "rsync" => {
            return unsupported(
                "FastDeploy with --load_strategy rsync gets its weights by checkpoint_transfer, a library that is not public".to_owned(),
                "start FastDeploy with WeightSync's checkpoint_transfer and a \"directory\" in its --rsync_config, or with ipc_snapshot",
            );
        }
        "ipc" => {
            return unsupported(
                format!(
                    "FastDeploy with --load_strategy ipc and without {FLAG}=1 computes with the trainer's own memory: no update may write there"
                ),
                "start FastDeploy with that variable, WeightSync's checkpoint_transfer and a \"directory\" in its --rsync_config, or with ipc_snapshot",
            );
        }
        "ipc_snapshot" => {
            return unsupported(
                format!("FastDeploy with --load_strategy ipc_snapshot and {FLAG}=1 reads no snapshot at its start"),
                "start FastDeploy without that variable, or with a \"directory\" in its --rsync_config",
            );
        }
        "none" => "FastDeploy was started without a --load_strategy".to_owned(),
        other => format!("FastDeploy's --load_strategy {other} is not known here"),
    };
    unsupported(what, START)
}
