//! What no compiler checks of the source tree: each file says what it decides, unsafe code keeps to its files, the Dockerfile names the
//! compiler that Cargo.toml does, and no test passes without a check.
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

/// These, and the tests between programs.
fn files_with_tests() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = all_source_files();
    let mut between = Vec::new();
    source_files(&root.join("tests"), &mut between);
    source_files(&root.join("crates/core/tests"), &mut between);
    files.extend(between.into_iter().map(|file| file.strip_prefix(root).unwrap().to_owned()));
    files
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

/// The lines of each test of a file: from its attribute to the brace that closes it.
fn tests(text: &str) -> Vec<Vec<&str>> {
    let lines: Vec<&str> = text.lines().collect();
    let begins = |line: &&str| ["#[test]", "#[tokio::test"].iter().any(|attribute| line.trim_start().starts_with(attribute));
    let of = |first: usize| {
        let indent = lines[first].len() - lines[first].trim_start().len();
        let closing = format!("{}}}", " ".repeat(indent));
        let length = lines[first..].iter().position(|line| line.starts_with(&closing)).map_or(lines.len() - first, |last| last + 1);
        lines[first..first + length].to_vec()
    };
    (0..lines.len()).filter(|number| begins(&lines[*number])).map(of).collect()
}

#[test]
fn no_test_returns_before_its_end_and_passes() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for file in files_with_tests() {
        let text = text(&file);
        for test in tests(&text) {
            seen += 1;
            let returns = test.iter().any(|line| line.trim() == "return;" || line.ends_with("{ return };"));
            if returns {
                let name = test.iter().find(|line| line.contains("fn ")).unwrap().trim();
                wrong.push(format!("{}: {name}", file.display()));
            }
        }
    }
    assert!(seen > 1400, "{seen} tests");
    assert!(wrong.is_empty(), "where something is missing, a test is ignored with a reason, or fails: {wrong:#?}");
}

#[test]
fn ignored_test_names_the_stage_or_page_that_runs_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let makefile = text(Path::new("Makefile"));
    let mut wrong = Vec::new();
    for file in files_with_tests() {
        let text = text(&file);
        for line in text.lines().filter(|line| line.trim_start().starts_with("#[ignore")) {
            let place = line.trim().strip_prefix("#[ignore = \"").and_then(|rest| rest.strip_suffix("\"]")?.split_once(": "));
            let known = place.is_some_and(|(_, place)| match place.strip_prefix("make ") {
                Some(target) => makefile.contains(&format!("\n.PHONY: {target}\n")),
                None => root.join(place).is_file(),
            });
            if !known {
                wrong.push(format!("{}: {}", file.display(), line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
