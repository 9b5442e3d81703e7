//! Where NCCL's library may be. Decides the order: next to the engine's torch first, because both must be of one version.

use std::path::{Path, PathBuf};

use crate::library::site_packages;

/// In a folder of Python packages: where `nvidia-nccl-cu12` and `-cu13` put it.
const IN_SITE_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// Paths to try, in order. A bare name is looked for by the loader.
pub(super) fn candidates(path: Option<&Path>) -> Vec<PathBuf> {
    if let Some(path) = path {
        return vec![path.to_owned()];
    }
    let mut found: Vec<PathBuf> = site_packages().iter().map(|place| place.join(IN_SITE_PACKAGES)).filter(|file| file.exists()).collect();
    found.push("libnccl.so.2".into());
    found
}

#[cfg(test)]
mod tests;
