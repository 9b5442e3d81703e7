//! Where the Python packages of this environment are: libraries for GPUs often come with them. Decides the order of the places, and knows no library.

use std::env;
use std::path::{Path, PathBuf};

/// Folders of packages: of the active virtual environment, of the Pythons on `PATH`, of the system's. Each once.
pub(crate) fn site_packages() -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = Vec::new();
    for place in prefixes().iter().flat_map(|prefix| in_prefix(prefix)) {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

fn prefixes() -> Vec<PathBuf> {
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
            let places = ["site-packages", "dist-packages"].map(|place| python.path().join(place));
            found.extend(places.into_iter().filter(|place| place.is_dir()));
        }
    }
    found
}

#[cfg(test)]
mod tests;
