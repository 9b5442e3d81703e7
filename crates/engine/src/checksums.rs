//! An engine's own checksums of its weights, as one digest that replicas can compare.
//!
//! Decides which of them count, and what can be compared with what. Checksums are of weights in the engine's own layout (fused, sharded), so
//! they say nothing about the tensors of a manifest: only engines that keep the same weights under the same names can be compared. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use weightsync_core::protocol::EngineChecksum;

/// What a server reports.
pub(super) struct Checksums {
    /// Its version, and whatever else decides in which form it keeps weights.
    pub(super) version: String,
    /// By name; a name says the rank, too.
    pub(super) by_name: BTreeMap<String, String>,
}

/// SHA-256 of no bytes. SGLang reports the first half of its digits.
const OF_NOTHING: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
/// Least digits of a checksum.
const LEAST_DIGITS: usize = 16;

/// One digest of all checksums of weights.
///
/// # Errors
/// Why they prove nothing.
pub(super) fn summarise(kind: &str, said: &Checksums, took: Duration) -> Result<EngineChecksum, String> {
    let mut names = blake3::Hasher::new();
    let mut values = blake3::Hasher::new();
    let mut counted = 0_usize;
    // Engines name buffers as well, and some of those change while the engine computes.
    for (name, value) in said.by_name.iter().filter(|(name, _)| name.contains("weight") || name.contains("bias")) {
        if value.len() < LEAST_DIGITS {
            return Err(format!("its checksum of {name} has {} digits", value.len()));
        }
        // vLLM on CPU repacks linear layers, and leaves an empty parameter in their place (seen with 0.32).
        if OF_NOTHING.starts_with(value.as_str()) {
            return Err(format!("its checksum of {name} is that of no bytes"));
        }
        for hasher in [&mut names, &mut values] {
            hasher.update(name.as_bytes()).update(&[0]);
        }
        values.update(value.as_bytes()).update(&[0]);
        counted += 1;
    }
    if counted == 0 {
        return Err("it reports no checksum of a weight".into());
    }
    let names = names.finalize().to_hex();
    Ok(EngineChecksum {
        of: format!("{kind} {}, {counted} weights, names {}", said.version, names.get(..16).unwrap_or_default()),
        digest: values.finalize().to_hex().to_string(),
        took_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
    })
}

#[cfg(test)]
mod tests;
