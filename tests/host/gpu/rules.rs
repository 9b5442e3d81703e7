//! The stand-in itself: rules of the driver and of NCCL that it must see broken, or the other tests prove less than they say.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use super::fixture::libraries;

/// A program that breaks the rule it is reported.
fn build(folder: &Path) -> std::path::PathBuf {
    let (source, program) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fakegpu/check.c"), folder.join("check"));
    let mut gcc = Command::new("gcc");
    gcc.arg("-o").arg(&program).arg(source).args(["libcuda.so.1", "libnccl.so.2"].map(|name| libraries().join(name)));
    assert!(gcc.arg(format!("-Wl,-rpath,{}", libraries().display())).status().unwrap().success());
    program
}

fn run(program: &Path, rule: &str) -> (Output, String) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let output = Command::new(program).arg(rule).env("FAKEGPU_DIR", folder.path()).output().unwrap();
    (output, std::fs::read_to_string(folder.path().join("violations")).unwrap_or_default())
}

#[test]
fn broken_rules_are_seen_and_kept_ones_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path());
    // The result of the call, and what is reported: nothing where the driver's own answer is all that a program could see.
    let cases = [
        ("none", "7", ""),
        ("before-init", "3", ""),
        ("no-context", "201", "without a current context"),
        ("use-after-free", "1", "is freed memory"),
        ("free-twice", "1", "is freed memory"),
        ("beyond-the-end", "1", "4097 bytes at offset 0 of an allocation of 4096"),
        ("host-address", "1", "is not device memory"),
        ("register-twice", "712", "registered already"),
        ("other-device", "400", "of another device"),
        ("own-handle", "201", ""),
        ("early-broadcast", "4", ""),
    ];
    for (rule, result, reported) in cases {
        let (output, violations) = run(&program, rule);
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), result, "{rule}: {violations}");
        assert_eq!(violations.is_empty(), reported.is_empty(), "{rule}: {violations}");
        assert!(violations.contains(reported), "{rule}: {violations}");
    }
    for rule in ["abort-twice", "broadcast-after-abort"] {
        let (output, violations) = run(&program, rule);
        assert_eq!(output.status.signal(), Some(6), "{rule}: {violations}");
        assert!(violations.contains("aborted before"), "{rule}: {violations}");
    }
}
