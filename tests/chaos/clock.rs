//! The wall clock of one agent, which the test can move: `clock.c`, preloaded into the agent, adds what a file says.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::net::must;

/// Builds what is preloaded.
pub fn build() -> PathBuf {
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("chaos-clock-{}.so", std::process::id()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/chaos/clock.c");
    must(&["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", library.to_str().unwrap(), source.to_str().unwrap()]);
    library
}

/// Sets how far the clock of the file is from the real one.
pub fn set(file: &Path, nanoseconds: i64) {
    // In place: the agent has it mapped.
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(file).unwrap();
    file.write_all_at(&nanoseconds.to_ne_bytes(), 0).unwrap();
}

/// The jumps that are played: what NTP does, what a wrong time zone does, and more than the life of a certificate.
pub fn jump(variant: u64) -> (i64, &'static str) {
    let hours = |hours: u64| i64::try_from(Duration::from_secs(3600 * hours).as_nanos()).unwrap();
    match variant % 5 {
        0 => (hours(1) / 120, "30 s ahead"),
        1 => (-hours(1) / 120, "30 s back"),
        2 => (hours(2), "2 h ahead"),
        3 => (-hours(2), "2 h back"),
        _ => (hours(24 * 10), "10 days ahead"),
    }
}

/// The shim is what the run believes in: a process that is started with it sees the time that the file says.
#[test]
fn process_with_preloaded_clock_sees_the_files_time() {
    let folder = tempfile::tempdir().unwrap();
    let (library, file) = (build(), folder.path().join("clock"));
    for (difference, _) in (0..5).map(jump) {
        set(&file, difference);
        let mut date = std::process::Command::new("date");
        let output = date.arg("+%s").env("LD_PRELOAD", &library).env("WEIGHTSYNC_TEST_CLOCK", &file).output().unwrap();
        let seen: i64 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
        let real = i64::try_from(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs()).unwrap();
        assert!((seen - real - difference / 1_000_000_000).abs() <= 5, "{seen} {real} {difference}");
    }
}
