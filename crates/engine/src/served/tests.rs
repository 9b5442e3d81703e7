use std::io::{BufRead, BufReader};
use std::process::Stdio;

use super::*;

#[test]
fn hub_name_leads_to_the_snapshot_of_its_main_branch() {
    let cache = tempfile::tempdir().unwrap();
    let model = cache.path().join("models--org--small");
    std::fs::create_dir_all(model.join("snapshots/abc123")).unwrap();
    std::fs::create_dir_all(model.join("refs")).unwrap();
    std::fs::write(model.join("refs/main"), "abc123\n").unwrap();
    assert_eq!(in_hub(cache.path(), "org/small"), Some(model.join("snapshots/abc123")));
    for name in ["org/other", "../small", "org/small/more", "/org/small", ""] {
        assert_eq!(in_hub(cache.path(), name), None, "{name}");
    }
    std::fs::write(model.join("refs/main"), "../../etc").unwrap();
    assert_eq!(in_hub(cache.path(), "org/small"), None, "a commit is a name");
}

#[test]
fn relative_path_is_found_where_its_process_works() {
    let here = tempfile::tempdir().unwrap();
    let name = format!("m{}", std::process::id());
    std::fs::create_dir(here.path().join(&name)).unwrap();
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "echo up; read _", "sh", &name]).current_dir(here.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A process has no command line for a moment after it was started.
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let found = find(&name, Path::new("/proc"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(found.unwrap().canonicalize().unwrap(), here.path().join(&name).canonicalize().unwrap());
    assert!(find(&name, Path::new("/proc")).unwrap_err().contains("WEIGHTSYNC_MODEL_DIR"));
}
