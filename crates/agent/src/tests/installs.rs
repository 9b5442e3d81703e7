//! Directories: nothing stays behind, and no living agent's files are touched.

use std::path::Path;

use super::bed::*;
use super::trainer::*;
use crate::rollout::version_dir::AgentDir;

fn names(root: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn an_agent_that_ends_leaves_no_file_behind() {
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
fn what_a_killed_agent_left_is_swept_by_the_next_one_and_a_living_one_is_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let (living, _) = AgentDir::open(root.path(), "living").unwrap();
    let kept = living.version(1, 1).unwrap();
    // A killed process lets its locks go, and nothing else.
    for name in ["killed", "self"] {
        std::fs::create_dir_all(root.path().join(name).join("v1-a1.0")).unwrap();
        std::fs::write(root.path().join(format!("{name}.lock")), b"").unwrap();
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

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_ends_leaves_no_version_directory_behind() {
    let mut bed = Bed::new();
    let (source, rollout) = (bed.source(), bed.rollout("actors/r-0"));
    bed.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    assert!(!names(bed.versions.path()).is_empty());
    drop(rollout);
    drop(source);
    let root = bed.versions.path().to_owned();
    for _ in 0..500 {
        if names(&root).is_empty() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("left behind: {:?}", names(&root));
}
