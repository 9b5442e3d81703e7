//! Where a server's start-up checkpoint is, as this process sees it.
//!
//! Decides by the name that the server reports: a path, a path in the working directory of the server's process, or a name of the Hugging
//! Face hub with a copy in a cache here. Reads neither memory nor environment of another process. A failure has a reason, because versions
//! are then compared with nothing.

use std::path::{Path, PathBuf};

use super::process;

/// Finds the directory that a server calls `name`.
///
/// # Errors
///
/// Why it cannot be read from here, with the remedy.
pub(super) fn find(name: &str, processes: &Path) -> Result<PathBuf, String> {
    let path = PathBuf::from(name);
    let candidates = if path.is_absolute() {
        vec![path]
    } else {
        let in_working_directory = working_directory(name, processes).map(|directory| directory.join(name));
        in_working_directory.into_iter().chain(hub_caches().iter().filter_map(|cache| in_hub(cache, name))).collect()
    };
    candidates.into_iter().find(|candidate| candidate.is_dir()).ok_or_else(|| {
        format!("the engine's checkpoint {name:?} cannot be read by its agent: mount it and set WEIGHTSYNC_MODEL_DIR to compare the first version")
    })
}

/// Of the process whose command line has that name.
fn working_directory(name: &str, processes: &Path) -> Option<PathBuf> {
    let process =
        process::find(processes, |process| process.has(name) || process.words.iter().any(|word| word.ends_with(&format!("={name}"))))?;
    std::fs::read_link(processes.join(process.pid.to_string()).join("cwd")).ok()
}

/// Where `huggingface_hub` keeps models, by its own variables (`HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`; huggingface_hub 1.2, read).
fn hub_caches() -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache"))).map(|cache| cache.join("huggingface"));
    let caches = [variable("HF_HUB_CACHE"), variable("HF_HOME").or_else(home).map(|home| home.join("hub"))];
    caches.into_iter().flatten().collect()
}

/// `models--ORG--NAME/snapshots/COMMIT`; `refs/main` contains the commit.
fn in_hub(cache: &Path, name: &str) -> Option<PathBuf> {
    let is_part =
        |part: &str| !part.is_empty() && !part.starts_with('.') && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    let parts: Vec<&str> = name.split('/').collect();
    if parts.len() > 2 || !parts.iter().all(|part| is_part(part)) {
        return None;
    }
    let model = cache.join(format!("models--{}", parts.join("--")));
    let commit = std::fs::read_to_string(model.join("refs/main")).ok()?;
    Some(model.join("snapshots").join(Some(commit.trim()).filter(|commit| is_part(commit))?))
}

#[cfg(test)]
mod tests;
