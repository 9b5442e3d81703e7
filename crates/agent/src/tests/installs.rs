//! Directories: no files remain, and no running agent's files are touched.

use std::path::Path;

use super::fixture::*;
use super::trainer::*;
use crate::rollout::version_dir::{AgentDir, MARK, MARKER, check_root};

fn names(root: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn ended_agent_leaves_no_file() {
    let root = tempfile::tempdir().unwrap();
    let (agent, swept) = AgentDir::open(root.path(), "pod/1:8000").unwrap();
    assert_eq!(swept, 0);
    let version = agent.version(3, 1).unwrap();
    let again = agent.version(3, 1).unwrap();
    assert_ne!(version.path(), again.path());
    std::fs::write(version.path().join("model.safetensors"), b"x").unwrap();
    let path = version.path().to_owned();
    drop(version);
    assert!(!path.exists());
    drop(agent);
    assert_eq!(names(root.path()), Vec::<String>::new());
}

#[test]
fn files_of_a_killed_agent_are_removed_by_the_next_only() {
    let root = tempfile::tempdir().unwrap();
    let (living, _) = AgentDir::open(root.path(), "living").unwrap();
    let kept = living.version(1, 1).unwrap();
    // A killed process lets its locks go, and nothing else.
    for name in ["killed", "self"] {
        left_by_a_killed_agent(root.path(), name);
    }
    std::fs::create_dir(root.path().join("not-ours")).unwrap();
    let (agent, swept) = AgentDir::open(root.path(), "self").unwrap();
    assert_eq!(swept, 2);
    assert!(kept.path().exists());
    assert_eq!(names(root.path()), ["living", "living.lock", "not-ours", "self", "self.lock"]);
    assert!(AgentDir::open(root.path(), "self").is_err(), "two agents of one name");
    drop(agent);
    assert_eq!(names(root.path()), ["living", "living.lock", "not-ours"]);
}

fn left_by_a_killed_agent(root: &Path, name: &str) {
    std::fs::create_dir_all(root.join(name).join("v1-a1.0")).unwrap();
    std::fs::write(root.join(name).join(MARKER), MARK).unwrap();
    std::fs::write(root.join(format!("{name}.lock")), MARK).unwrap();
}

#[test]
fn directories_with_lock_files_of_others_are_kept() {
    let parent = tempfile::tempdir().unwrap();
    let root = parent.path().join("root");
    for folder in ["root", "root/data", "root/linked-to", "nearby"] {
        std::fs::create_dir(parent.path().join(folder)).unwrap();
        std::fs::write(parent.path().join(folder).join("precious"), b"x").unwrap();
    }
    // What an attacker, or another program, may have put there.
    for lock in ["...lock", ".lock", "data.lock", "nearby.lock", "a b.lock", "lin.lock"] {
        std::fs::write(root.join(lock), MARK).unwrap();
    }
    std::os::unix::fs::symlink(parent.path().join("nearby"), root.join("nearby")).unwrap();
    std::os::unix::fs::symlink(root.join("lin.lock"), root.join("link.lock")).unwrap();
    left_by_a_killed_agent(&root, "link-target");
    std::fs::remove_file(root.join("link-target.lock")).unwrap();
    std::os::unix::fs::symlink(root.join("lin.lock"), root.join("link-target.lock")).unwrap();
    let (agent, _) = AgentDir::open(&root, "self").unwrap();
    drop(agent);
    for kept in ["root/precious", "root/data/precious", "nearby/precious", "root/nearby/precious", "root/link-target/v1-a1.0"] {
        assert!(parent.path().join(kept).exists(), "{kept}");
    }
}

#[test]
fn directory_of_its_own_name_that_no_agent_made_is_refused() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("self")).unwrap();
    std::fs::write(root.path().join("self").join("precious"), b"x").unwrap();
    let refused = AgentDir::open(root.path(), "self").unwrap_err();
    assert!(refused.to_string().contains("no agent made it"), "{refused}");
    assert!(root.path().join("self").join("precious").exists());
    assert!(AgentDir::open(root.path(), "").is_err(), "a root is no one's directory");
    let foreign = root.path().join("other.lock");
    std::fs::write(&foreign, b"of another program").unwrap();
    assert!(AgentDir::open(root.path(), "other").is_err());
    assert_eq!(std::fs::read(foreign).unwrap(), b"of another program");
}

#[test]
fn root_directory_of_another_user_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let user = rustix::process::geteuid().as_raw();
    // Only root can give a directory away.
    let (owner, refused) = if user == 0 {
        std::os::unix::fs::chown(root.path(), Some(4711), Some(4711)).unwrap();
        (4711, AgentDir::open(root.path(), "self").unwrap_err().to_string())
    } else {
        (user, check_root(root.path(), user + 1).unwrap_err().to_string())
    };
    assert!(refused.contains(&format!("belongs to user {owner}")), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ended_group_leaves_no_version_directory() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    assert!(!names(fixture.versions.path()).is_empty());
    drop(rollout);
    drop(source);
    let root = fixture.versions.path().to_owned();
    let emptied = async {
        while !names(&root).is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, emptied).await.unwrap_or_else(|_| panic!("left over: {:?}", names(&root)));
}
