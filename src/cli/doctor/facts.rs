//! The types of the doctor's report. Decides only its form.

use std::path::Path;

use serde::Serialize;

use super::advice::{Advice, advise, notes};
use super::found::{Found, Gpus};
use super::gdr::{self, Check};
use super::host::Host;
use weightsync_core::plan::NoSharing;
use weightsync_core::protocol::worker::FabricFacts;

/// The whole report; `--output json` prints it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    pub version: &'static str,
    #[serde(flatten)]
    pub gpus: Gpus,
    #[serde(flatten)]
    pub host: Host,
    /// GPUs whose memory can be shared with the engine or trainer in the same pod (CUDA IPC), or why none.
    pub shared: Found<Vec<String>>,
    /// NIXL, with its backend UCX, or why it cannot be used.
    pub nixl: Found<FabricFacts>,
    /// The requirements of reads through NIXL, with what was found.
    pub gdr: Vec<Check>,
    pub transports: Vec<Advice>,
    /// What should be changed.
    pub notes: Vec<String>,
}

/// Inputs of a report.
pub struct Facts {
    pub gpus: Gpus,
    pub nixl: Found<FabricFacts>,
    pub host: Host,
    /// GPUs whose memory can be shared with the process in the same pod.
    pub shared: Result<Vec<String>, NoSharing>,
}

impl Report {
    /// `root` is `/` except in tests.
    pub fn new(facts: Facts, root: &Path) -> Self {
        let Facts { gpus, nixl, host, shared } = facts;
        let gdr = gdr::checks(&nixl, &gpus, &host, root);
        let mut transports = advise(&gpus, &host);
        // Second best: TCP comes last.
        transports.insert(transports.len().saturating_sub(1), gdr::advice(&gdr));
        let notes = notes(&gpus, &host);
        let shared = shared.map_err(|why| why.to_string()).into();
        Self { version: env!("CARGO_PKG_VERSION"), gpus, host, shared, nixl, gdr, transports, notes }
    }

    /// Whether that transport can be used here.
    pub fn usable(&self, transport: &str) -> bool {
        self.transports.iter().any(|advice| advice.transport == transport && advice.unusable.is_none())
    }
}
