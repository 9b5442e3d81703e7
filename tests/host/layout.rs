//! What no compiler checks of the source tree: each file says what it decides, unsafe code keeps to its files, and the
//! Dockerfile names the compiler that Cargo.toml does.
//!
//! Which crate may use which is Cargo's to check, and what the pure crate may not name is clippy's (`crates/core/clippy.toml`).

use std::fs;
use std::path::{Path, PathBuf};

fn source_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            source_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Files of the product and of the testkit, as paths below the repository.
fn all_source_files() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    source_files(&root.join("src"), &mut files);
    for entry in fs::read_dir(root.join("crates")).unwrap() {
        source_files(&entry.unwrap().path().join("src"), &mut files);
    }
    assert!(files.len() > 300, "the tree is elsewhere: {} files", files.len());
    files.into_iter().map(|file| file.strip_prefix(root).unwrap().to_owned()).collect()
}

fn text(path: &Path) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

#[test]
fn source_file_opens_with_what_it_decides() {
    let is_test = |path: &Path| path.components().any(|part| matches!(part.as_os_str().to_str(), Some("tests" | "tests.rs")));
    let silent: Vec<PathBuf> = all_source_files().into_iter().filter(|path| !is_test(path) && !text(path).starts_with("//!")).collect();
    assert!(silent.is_empty(), "{silent:?}");
}

#[test]
fn unsafe_code_is_only_in_gpu_and_shared_memory_files() {
    let unsafe_in = |path: &Path| {
        let text = text(path);
        let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
        code.into_iter().any(|line| ["unsafe {", "unsafe fn", "unsafe impl", "allow(unsafe_code)"].iter().any(|word| line.contains(word)))
    };
    let may = |path: &Path| {
        let name = path.file_name().unwrap().to_string_lossy();
        path.starts_with("crates/gpu") || ["memfd", "shm", "ipc"].iter().any(|part| name.contains(part))
    };
    let wrong: Vec<PathBuf> = all_source_files().into_iter().filter(|path| !may(path) && unsafe_in(path)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn dockerfile_builds_with_the_oldest_supported_compiler() {
    let line = format!("FROM rust:{}-bullseye AS build", env!("CARGO_PKG_RUST_VERSION"));
    assert!(text(Path::new("Dockerfile")).lines().any(|found| found == line), "the Dockerfile lacks the line {line:?}");
}
