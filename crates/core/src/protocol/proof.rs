//! What shows that an engine holds the bytes of a version. Values only.

use serde::{Deserialize, Serialize};

/// What was compared before a version counted as installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ProvenBy {
    /// The digest of every tensor, in the memory or files that the engine loaded from.
    Digests,
    /// The engine's own checksums of its weights after the load: most replicas of its pool have the same.
    Engine,
    /// No bytes: only the engine's responses.
    Nothing,
}

impl ProvenBy {
    /// As status and the command line show it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Digests => "Digests",
            Self::Engine => "Engine",
            Self::Nothing => "Nothing",
        }
    }
}

/// An engine's own checksums of all its weights after a load, as one digest.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineChecksum {
    /// Kind and version of the engine, and a digest of the names of its weights. Only replicas with the same text can be compared: engines keep
    /// weights in a layout of their own.
    pub of: String,
    /// blake3 (hex) of the names and checksums of its weights, in order.
    pub digest: String,
    /// Time that the engine took to compute them, in ms.
    pub took_ms: u64,
}
