use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use super::*;

fn tar(words: &[&str]) -> String {
    let output = Command::new("tar").args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn archive_read_by_the_systems_tar_holds_every_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.tar");
    let longest = format!("pods/{}.json", "p".repeat(LONGEST_NAME - 10));
    let files = [("empty.txt", String::new()), ("a/block.txt", "b".repeat(BLOCK)), (longest.as_str(), "öä\n".repeat(700))];
    let mut archive = Archive::create(&path, 1_767_225_600).unwrap();
    for (name, text) in &files {
        archive.add(name, text).unwrap();
    }
    archive.finish().unwrap();
    let file = path.to_str().unwrap();
    assert_eq!(tar(&["-tf", file]).lines().collect::<Vec<_>>(), files.each_ref().map(|(name, _)| *name));
    for (name, text) in &files {
        assert_eq!(tar(&["-xOf", file, name]), *text, "{name}");
    }
    assert_eq!(std::fs::metadata(&path).unwrap().len() % 512, 0);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn name_that_is_too_long_or_a_file_that_is_there_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.tar");
    let mut archive = Archive::create(&path, 0).unwrap();
    let error = archive.add(&"n".repeat(LONGEST_NAME + 1), "text").unwrap_err().to_string();
    assert!(error.contains("1 to 99 bytes"), "{error}");
    assert!(archive.add("", "text").is_err());
    assert!(Archive::create(&path, 0).is_err());
}
