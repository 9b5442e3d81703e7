//! Reads the `use` lines of the crate and fails when a room uses one above it (src/lib.rs, table of rooms).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Rooms that each room may use besides itself. What is missing here is forbidden.
fn allowed() -> BTreeMap<&'static str, &'static [&'static str]> {
    BTreeMap::from([
        ("weights", &[][..]),
        ("protocol", &["weights"][..]),
        ("plan", &["protocol", "weights"][..]),
        ("membership", &["plan", "protocol"][..]),
        ("runtime", &["protocol"][..]),
        ("gpu", &["protocol", "weights"][..]),
        ("worker", &["gpu", "protocol", "weights"][..]),
        ("transport", &["protocol", "weights", "runtime", "worker"][..]),
        ("torch", &["weights"][..]),
        ("engine", &["protocol", "weights", "runtime", "torch", "worker"][..]),
        ("agent", &["protocol", "weights", "plan", "runtime", "torch", "transport", "engine", "worker"][..]),
        ("conformance", &["agent", "engine", "protocol", "torch", "transport", "weights", "worker"][..]),
        ("coordinator", &["protocol", "plan", "membership", "runtime"][..]),
        ("api", &["protocol", "plan", "weights"][..]),
        ("controller", &["api", "coordinator", "membership", "plan", "protocol", "runtime", "weights"][..]),
        ("local", &["api", "coordinator", "membership", "plan", "protocol", "runtime", "weights", "engine"][..]),
        (
            "cli",
            &[
                "agent",
                "api",
                "conformance",
                "controller",
                "coordinator",
                "engine",
                "local",
                "membership",
                "plan",
                "protocol",
                "runtime",
                "transport",
                "weights",
                "worker",
            ][..],
        ),
    ])
}

/// Crates that the pure rooms must not know.
const IMPURE: [&str; 8] = ["kube", "k8s_openapi", "tokio", "reqwest", "axum", "hyper", "std::time::Instant", "std::time::SystemTime"];
const PURE_ROOMS: [&str; 4] = ["weights", "protocol", "plan", "membership"];

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

fn all_source_files() -> Vec<(String, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    source_files(&root, &mut files);
    let rooms = files.into_iter().map(|path| {
        let inside = path.strip_prefix(&root).unwrap();
        let first = inside.components().next().unwrap().as_os_str().to_string_lossy().into_owned();
        (first.trim_end_matches(".rs").to_owned(), path)
    });
    rooms.collect()
}

/// Code without comments: documentation may name any room.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn rooms_used(code: &str) -> Vec<String> {
    let mut used = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        let names: Vec<&str> = match rest.strip_prefix('{') {
            Some(group) => {
                let mut depth = 0;
                let end = group
                    .find(|c| {
                        depth += i32::from(c == '{') - i32::from(c == '}');
                        depth < 0
                    })
                    .unwrap_or(group.len());
                let mut depth = 0;
                group[..end]
                    .split(|c| {
                        depth += i32::from(c == '{') - i32::from(c == '}');
                        c == ',' && depth == 0
                    })
                    .collect()
            }
            None => vec![rest],
        };
        for name in names {
            let name = name.trim();
            used.push(name[..name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len())].to_owned());
        }
    }
    used
}

#[test]
fn an_arrow_between_rooms_only_points_down() {
    let allowed = allowed();
    let mut wrong = Vec::new();
    for (room, path) in all_source_files() {
        if ["lib", "main", "bin"].contains(&room.as_str()) {
            continue;
        }
        let Some(may) = allowed.get(room.as_str()) else {
            wrong.push(format!("{}: the room {room} is not in the table", path.display()));
            continue;
        };
        for used in rooms_used(&code(&path)) {
            if allowed.contains_key(used.as_str()) && used != room && !may.contains(&used.as_str()) {
                wrong.push(format!("{}: {room} uses {used}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "arrows that point up:\n{}", wrong.join("\n"));
}

#[test]
fn pure_rooms_know_no_runtime_no_kubernetes_and_no_clock() {
    let mut wrong = Vec::new();
    for (room, path) in all_source_files() {
        if !PURE_ROOMS.contains(&room.as_str()) {
            continue;
        }
        let code = code(&path);
        for name in IMPURE {
            let called = if name.contains("::") { code.contains(name) } else { code.contains(&format!("{name}::")) };
            if called {
                wrong.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "impure names in pure rooms:\n{}", wrong.join("\n"));
}

#[test]
fn files_stay_under_400_lines_and_say_what_they_decide() {
    let mut wrong = Vec::new();
    for (_, path) in all_source_files() {
        let text = fs::read_to_string(&path).unwrap();
        let lines = text.lines().count();
        let is_test = path.components().any(|part| matches!(part.as_os_str().to_str(), Some("tests" | "tests.rs" | "model")));
        if lines > 400 {
            wrong.push(format!("{}: {lines} lines", path.display()));
        }
        if !is_test && !text.starts_with("//!") {
            wrong.push(format!("{}: does not open with what it decides", path.display()));
        }
        if path.file_name().is_some_and(|name| name == "mod.rs") {
            wrong.push(format!("{}: use foo.rs + foo/", path.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_reader_of_use_lines_sees_groups() {
    let found = rooms_used("use crate::{plan::{a, b}, weights}; use crate::protocol::X; pub(crate) fn f() { crate::engine::g() }");
    assert_eq!(found, ["plan", "weights", "protocol", "engine"]);
}

#[test]
fn unsafe_code_is_only_in_shared_memory_ipc_and_gpu_files() {
    let mut wrong = Vec::new();
    for (room, path) in all_source_files() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let may = room == "gpu" || ["memfd", "shm", "ipc"].iter().any(|part| name.contains(part));
        let code = code(&path);
        if !may
            && (code.contains("unsafe {")
                || code.contains("unsafe fn")
                || code.contains("unsafe impl")
                || code.contains("allow(unsafe_code)"))
        {
            wrong.push(path.display().to_string());
        }
    }
    assert!(wrong.is_empty(), "unsafe code outside its rooms: {wrong:?}");
}
