//! How a FastDeploy server gets its weights, from its command line. Pure.

use std::path::PathBuf;

use serde_json::Value;

use super::async_ipc::Workers;
use super::unsupported;
use crate::EngineError;
use crate::process::EngineProcess;

pub(super) const START: &str = "start FastDeploy with --dynamic-load-weight --load_strategy ipc_snapshot";

/// How it gets its weights, as far as its command line shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Strategy {
    Snapshot,
    /// By the message of #7472.
    AsyncIpc(Workers),
    /// By `/v1/update_weights`, from steps in this folder: its `checkpoint_transfer` is ours.
    Steps(PathBuf),
    Other(String),
    Unseen,
}

impl Strategy {
    /// By the command line of its process.
    pub(super) fn of(process: Option<&EngineProcess>) -> Self {
        let Some(process) = process else { return Self::Unseen };
        let option = |name: &str| process.value(&format!("--{}", name.replace('_', "-"))).or_else(|| process.value(&format!("--{name}")));
        match option("load_strategy") {
            Some("ipc_snapshot") => Self::Snapshot,
            Some(other) => {
                // A server with #7472 looks like one without, so the user must declare it in the free-form configuration.
                let config: Value = option("rsync_config").and_then(|config| serde_json::from_str(config).ok()).unwrap_or_default();
                let text = |name: &str| config.get(name).and_then(Value::as_str);
                match (other, text("transfer_mode"), text("ipc_address")) {
                    ("ipc", Some("ipc_async"), Some(address)) => {
                        let device = config.get("device").and_then(Value::as_u64).unwrap_or(0);
                        Self::AsyncIpc(Workers { address: address.to_owned(), device, ranks: ranks(process) })
                    }
                    ("rsync", ..) if text("directory").is_some_and(|folder| folder.starts_with('/')) => {
                        Self::Steps(text("directory").unwrap_or_default().into())
                    }
                    _ => Self::Other(other.to_owned()),
                }
            }
            None => Self::Other("none".to_owned()),
        }
    }
}

/// Tensor-parallel ranks of a server; 1 if its command line has none.
pub(super) fn ranks(process: &EngineProcess) -> usize {
    let named = process.value("--tensor-parallel-size").or_else(|| process.value("--tensor_parallel_size"));
    named.and_then(|ranks| ranks.parse().ok()).unwrap_or(1)
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
            "FastDeploy with --load_strategy ipc keeps using the trainer's memory in place, so the whole model would have to stay there"
                .to_owned()
        }
        "none" => "FastDeploy was started without a --load_strategy".to_owned(),
        other => format!("FastDeploy's --load_strategy {other} is not known here"),
    };
    unsupported(what, START)
}
