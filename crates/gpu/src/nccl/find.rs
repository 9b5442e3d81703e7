//! Where NCCL's library may be. Decides the order: beside the engine's torch first, because both must be of one version.

use std::env;
use std::path::{Path, PathBuf};

/// In a Python prefix: where the packages `nvidia-nccl-cu12` and `-cu13` put it.
const IN_SITE_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// Paths to try, in order. A bare name is looked for by the loader.
pub(super) fn candidates(path: Option<&Path>) -> Vec<PathBuf> {
    if let Some(path) = path {
        return vec![path.to_owned()];
    }
    let mut found: Vec<PathBuf> = Vec::new();
    for prefix in python_prefixes() {
        for file in in_prefix(&prefix) {
            if !found.contains(&file) {
                found.push(file);
            }
        }
    }
    found.push("libnccl.so.2".into());
    found
}

/// Prefixes of the Pythons of this environment: the active virtual environment, those on `PATH`, the system's.
fn python_prefixes() -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    let path = env::var_os("PATH").unwrap_or_default();
    for folder in env::split_paths(&path).filter(|folder| folder.join("python3").exists()) {
        prefixes.extend(folder.parent().map(Path::to_owned));
    }
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
    prefixes
}

fn in_prefix(prefix: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for lib in ["lib", "lib64"] {
        let Ok(entries) = std::fs::read_dir(prefix.join(lib)) else { continue };
        let pythons = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
        for python in pythons {
            let places = ["site-packages", "dist-packages"].map(|place| python.path().join(place).join(IN_SITE_PACKAGES));
            found.extend(places.into_iter().filter(|file| file.exists()));
        }
    }
    found
}

/// The file behind a bare name that the loader found, as the kernel says; the path itself when it is one.
pub(super) fn loaded_from(path: &Path) -> String {
    if path.components().count() > 1 {
        return path.display().to_string();
    }
    let name = path.to_string_lossy();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let file = maps.lines().filter_map(|line| line.find('/').and_then(|at| line.get(at..))).find(|file| file.contains(name.as_ref()));
    file.map_or_else(|| name.clone().into_owned(), str::to_owned)
}

#[cfg(test)]
mod tests;
