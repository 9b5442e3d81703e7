//! Groups of agents on the stand-in's GPUs whose engines take weights from GPU memory: what they serve is what was published, through
//! losses in the middle, and no version lies in a directory.

use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::TempDir;

use super::fixture::{Machine, uuid};
use crate::model::Model;
use crate::world::{Actor, World, installed};
use weightsync_testkit::dev_program;

/// The program under two names: by the first its process is LMDeploy's for who looks at words, by the second it is not.
pub struct Names {
    folder: TempDir,
}

impl Names {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["api_server", "other"] {
            std::os::unix::fs::symlink(dev_program(), folder.path().join(name)).unwrap();
        }
        Self { folder }
    }

    pub fn named(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// A trainer on GPU 0 and two engines: one that is fed awake, one that sleeps.
async fn group(machine: &Machine, names: &Names) -> World {
    let actors = [Actor::lmdeploy(&names.named("api_server"), &uuid(1)), Actor::lmdeploy(&names.named("other"), &uuid(2))];
    let world = forming(machine, 5, actors).await;
    world.until_ready(2).await;
    world
}

/// A group that may not stand yet.
async fn forming(machine: &Machine, silence: u32, actors: impl IntoIterator<Item = Actor>) -> World {
    let update = json!({"pause": "AbortAwake", "minReady": 1, "silenceSeconds": silence});
    let world = World::start_on(machine, json!({"type": "NCCL", "bucketMiB": 1}), update, actors).await;
    let config = json!({"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"});
    std::fs::write(world.folder().join("start/config.json"), config.to_string()).unwrap();
    world
}

/// Directories of versions that lie anywhere.
pub fn version_directories(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for agent in std::fs::read_dir(folder.join("versions")).unwrap().flatten() {
        let Ok(entries) = std::fs::read_dir(agent.path()) else { continue };
        found.extend(
            entries
                .flatten()
                .map(|entry| entry.path())
                .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('v'))),
        );
    }
    found
}

/// How often a route was called.
async fn called(world: &World, number: usize, route: &str) -> usize {
    let calls = world.simulator(number, "calls").await;
    calls.as_array().unwrap().iter().filter(|call| call.as_str().unwrap().split('?').next() == Some(route)).count()
}

fn checkpoint(world: &World, seed: u64) -> PathBuf {
    Model::large(seed).save(&world.folder().join(format!("checkpoint-{seed}")))
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_take_each_version_from_the_memory_that_it_landed_in() {
    let (machine, names) = (Machine::new(), Names::new());
    let world = group(&machine, &names).await;
    for version in 1..=3 {
        let result = world.publish(&checkpoint(&world, version), version, &[]).await.done();
        assert_eq!(installed(&result).len(), 2, "{result}");
        for number in 0..2 {
            world.until_serves(number, &Model::large(version)).await;
        }
    }
    assert_eq!(version_directories(world.folder()), Vec::<PathBuf>::new());
    // Eight buckets and the last step for each version, and once the question whether the route is there.
    assert_eq!(called(&world, 0, "POST /update_weights").await, 3 * 9 + 1);
    assert_eq!(called(&world, 0, "POST /sleep").await, 0);
    assert_eq!(called(&world, 1, "POST /update_weights_from_ipc").await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_that_fails_midway_is_held_until_next_version() {
    let (machine, names) = (Machine::new(), Names::new());
    let world = group(&machine, &names).await;
    for failing in 0..2_u64 {
        let first = 10 * failing;
        world.publish(&checkpoint(&world, 1), first + 1, &[]).await.done();
        let number = usize::try_from(failing).unwrap();
        world.spoil(number, &json!({"load": "failHalfwayOnce"})).await;
        let result = world.publish(&checkpoint(&world, 2), first + 2, &[]).await.done();
        let other = format!("actor-{}", 1 - failing);
        assert!(installed(&result).contains(&other.as_str()), "the other engine's update goes on: {result}");
        world.until_serves(1 - number, &Model::large(2)).await;
        // Fed what the group holds, or the next version: whole in both cases.
        world.publish(&checkpoint(&world, 3), first + 3, &[]).await.done();
        for number in 0..2 {
            world.until_serves(number, &Model::large(3)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_engine_is_fed_over_connections_by_its_gpu() {
    let (machine, names) = (Machine::new(), Names::new());
    let world = group(&machine, &names).await;
    world.publish(&checkpoint(&world, 1), 1, &[]).await.done();
    let crash = json!({"rules": [{"path": "/is_sleeping", "times": 1, "fault": {"kind": "crash"}}]});
    world.spoil(0, &crash).await;
    // Its own start-up weights are version 0.
    world.until_serves(0, &Model::large(1)).await;
    world.until_ready(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_slow_to_fall_asleep_is_waited_for() {
    let (machine, names) = (Machine::new(), Names::new());
    let world = forming(&machine, 2, [Actor::lmdeploy(&names.named("other"), &uuid(1))]).await;
    world.until_ready(1).await;
    world.spoil(0, &json!({"rules": [{"path": "/sleep", "times": 1, "fault": {"kind": "slow", "ms": 3500}}]})).await;
    let result = world.publish(&checkpoint(&world, 1), 1, &[]).await.done();
    assert_eq!(result["attempts"], 1, "{result}");
    world.until_serves(0, &Model::large(1)).await;
    assert_eq!(version_directories(world.folder()), Vec::<PathBuf>::new(), "it was not put into files instead");
}

#[tokio::test(flavor = "multi_thread")]
async fn version_asked_before_a_group_formed_follows_the_group() {
    let (machine, names) = (Machine::new(), Names::new());
    let world = forming(&machine, 5, [Actor::lmdeploy(&names.named("api_server"), &uuid(1))]).await;
    world.publish(&checkpoint(&world, 1), 1, &[]).await.done();
    world.until_serves(0, &Model::large(1)).await;
    assert_eq!(version_directories(world.folder()), Vec::<PathBuf>::new(), "it was not laid out for hosts");
}
