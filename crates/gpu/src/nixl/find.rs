//! Where NIXL's C interface may be, and what its folder says of it. Decides the order: built for the driver's CUDA first, because another one
//! registers no GPU memory.

use std::path::{Path, PathBuf};

use crate::library::site_packages;

const LIBRARY: &str = "libnixl_capi.so";
/// What folders of the packages `nixl-cu12` and `nixl-cu13` have in their names (`.nixl_cu12.mesonpy.libs`, 1.5.1, run).
const PACKAGE: &str = "nixl_cu";

/// Paths to try, in order. A bare name is looked for by the loader.
pub(super) fn candidates(path: Option<&Path>, driver: Option<u32>) -> Vec<PathBuf> {
    if let Some(path) = path {
        return vec![path.to_owned()];
    }
    let mut found: Vec<PathBuf> = site_packages().iter().flat_map(|place| in_place(place)).collect();
    found.sort_by_key(|file| driver.is_some() && cuda_major(file) != driver);
    found.push(LIBRARY.into());
    found
}

fn in_place(place: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_name().to_string_lossy().contains(PACKAGE));
    let mut found: Vec<PathBuf> = folders.map(|folder| folder.path().join(LIBRARY)).filter(|file| file.exists()).collect();
    found.sort();
    found
}

/// The CUDA major in the name of the folder that the library lies in.
pub(super) fn cuda_major(library: &Path) -> Option<u32> {
    let folder = library.parent()?.file_name()?.to_str()?;
    let digits: String = folder.split_once(PACKAGE)?.1.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

/// The version of the package that the library lies in: its neighbour `nixl_cu12-1.5.1.dist-info`.
pub(super) fn version(library: &Path) -> Option<String> {
    let package = format!("{PACKAGE}{}-", cuda_major(library)?);
    let entries = std::fs::read_dir(library.parent()?.parent()?).ok()?;
    let mut names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.find_map(|name| Some(name.strip_prefix(&package)?.strip_suffix(".dist-info")?.to_owned()))
}

#[cfg(test)]
mod tests;
