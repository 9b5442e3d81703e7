//! What is left of a group when the program that started it is killed, or loses its terminal: nothing.

use std::path::Path;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::model::Model;
use crate::world::{Actor, PROGRAM, SOON, World, files, installed, until};

/// Processes that name `mark` on their command line or in their environment.
fn marked(mark: &str) -> Vec<(Pid, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw) else { continue };
        let read = |name| String::from_utf8_lossy(&std::fs::read(entry.path().join(name)).unwrap_or_default()).replace('\0', " ");
        let words = read("cmdline");
        if words.contains(mark) || read("environ").contains(mark) {
            found.push((pid, words));
        }
    }
    found
}

async fn until_gone(mark: &str) {
    until(&format!("the end of {:?}", marked(mark)), || async { marked(mark).is_empty() }).await;
}

fn kill(child: &Child) {
    kill_process(Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap(), Signal::KILL).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_local_leaves_no_process_and_its_ports_free() {
    let mut world = World::start(json!({}), [Actor::new(), Actor::new()]).await;
    world.until_ready(2).await;
    let mark = world.folder().display().to_string();
    assert!(marked(&mark).len() >= 6, "itself, three agents, two engines: {:?}", marked(&mark));
    world.kill();
    until_gone(&mark).await;
    // The same file, and the same ports.
    world.restart().await;
    world.until_ready(2).await;
    let one = Model::small(1);
    let result = world.publish(&one.save(&world.folder().join("v1")), 1, &[]).await.done();
    assert_eq!(installed(&result).len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn second_local_of_a_name_ends_and_says_what_to_do() {
    let mut world = World::start(json!({}), [Actor::new()]).await;
    world.until_ready(1).await;
    let mut command = Command::new(PROGRAM);
    command.arg("local").args(files::arguments(world.folder())).stdin(Stdio::null()).kill_on_drop(true);
    let second = tokio::time::timeout(SOON, command.output()).await.expect("it ends").unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success() && said.contains("already runs on this host") && said.contains("metadata.name"), "{said}");
    // A killed one frees the name.
    world.kill();
    world.restart().await;
    world.until_ready(1).await;
}

/// A group in a terminal of its own: what the terminal shows comes on standard output, and it closes with this process.
fn in_terminal(folder: &Path) -> Child {
    let mut command = Command::new("python3");
    // The tests may run under nohup, which a program inherits.
    let code = "import pty, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); pty.spawn(sys.argv[1:])";
    command.args(["-c", code, PROGRAM, "local", "--output", "json"]);
    command.args(files::arguments(folder)).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_terminal_ends_local_and_a_signal_alone_rereads() {
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().display().to_string();
    Model::small(0).save(&folder.path().join("start"));
    let port = weightsync_coordinator::local::free_port().unwrap();
    let dev = weightsync_testkit::dev_program();
    let command =
        json!([dev, "simulate-engine", "--engine", "vllm", "--server-port", port.to_string(), "--model", folder.path().join("start")]);
    let object = files::object(&format!("closed-{}", std::process::id()), &[Actor::new()], json!({}), "Agent", json!({}));
    let processes = json!({
        "apiVersion": "weightsync.dev/v1alpha1", "kind": "LocalProcesses",
        "versions": folder.path().join("versions"),
        "rollouts": [{"name": "actor-0", "port": port, "command": command}],
    });
    std::fs::write(folder.path().join(files::OBJECT), object.to_string()).unwrap();
    std::fs::write(folder.path().join(files::PROCESSES), processes.to_string()).unwrap();
    let mut terminal = in_terminal(folder.path());
    let mut lines = BufReader::new(terminal.stdout.take().unwrap()).lines();
    let mut shows = async |what: &str| {
        let shown = async { while !lines.next_line().await.unwrap().expect("it goes on").contains(what) {} };
        tokio::time::timeout(SOON, shown).await.unwrap_or_else(|_| panic!("waited for {what}"));
    };
    shows("epoch 1").await;
    let local = marked(&mark).into_iter().find(|(_, words)| words.starts_with(PROGRAM) && words.contains(" local "));
    kill_process(local.expect("it runs").0, Signal::HUP).unwrap();
    shows("reloaded").await;
    assert!(marked(&mark).len() >= 4, "{:?}", marked(&mark));
    kill(&terminal);
    until_gone(&mark).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_demo_leaves_no_process() {
    let mut command = Command::new(weightsync_testkit::dev_program());
    command.args(["demo", "--megabytes", "8"]).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut demo = command.spawn().unwrap();
    let mark = format!("weightsync-demo-{}", demo.id().unwrap());
    let mut lines = BufReader::new(demo.stdout.take().unwrap()).lines();
    // A rollout whose agent was late joins in a second epoch, so the line's epoch may be 1 or more.
    let begun = async { while !lines.next_line().await.unwrap().expect("the demo ended").contains("world size 4") {} };
    tokio::time::timeout(SOON, begun).await.expect("the group forms");
    assert!(marked(&mark).len() >= 7, "four agents, three engines: {:?}", marked(&mark));
    kill(&demo);
    demo.wait().await.unwrap();
    until_gone(&mark).await;
    let _ = std::fs::remove_dir_all(std::env::temp_dir().join(mark));
}
