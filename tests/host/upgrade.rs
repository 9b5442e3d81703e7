//! Builds side by side: a group whose agents are replaced one after another by those of another build, under the coordinator of the first.
//!
//! The other build is the file that `WEIGHTSYNC_PREVIOUS` names: `make test-previous` makes that of an earlier commit. This build stands for
//! it in one test: agents may be replaced one by one while versions flow.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::json;

use crate::model::Model;
use crate::world::{Actor, PROGRAM, World, installed, until};

const PODS: [&str; 3] = ["actor-0", "trainer", "actor-1"];

fn previous() -> PathBuf {
    std::env::var_os("WEIGHTSYNC_PREVIOUS").expect("WEIGHTSYNC_PREVIOUS=$(tests/tools/previous.sh)").into()
}

/// Puts a build where the next agent is started from.
fn put(build: &Path, place: &Path) {
    let alongside = place.with_extension("next");
    fs::copy(build, &alongside).unwrap();
    fs::rename(&alongside, place).unwrap();
}

async fn upgraded(from: &Path, to: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("weightsync");
    put(from, &program);
    let world = if std::env::var_os("WEIGHTSYNC_PREVIOUS").is_some_and(|previous| previous == from) {
        World::start_earlier(&program, [Actor::new(), Actor::new()]).await
    } else {
        World::start_from(&program, &Model::small(0), json!({}), [Actor::new(), Actor::new()]).await
    };
    world.until_ready(2).await;
    put(to, &program);
    let file = fs::metadata(&program).unwrap().ino();
    let build_of = async |pod: &str| fs::metadata(format!("/proc/{}/exe", world.agent(pod).await.as_raw_nonzero())).map(|file| file.ino());
    for (version, pod) in (1..).zip(PODS.map(Some).into_iter().chain([None])) {
        let model = Model::small(version);
        let result = world.publish(&model.save(&world.folder().join(version.to_string())), version, &[]).await.done();
        assert_eq!(installed(&result), ["actor-0", "actor-1"], "{result}");
        for actor in [0, 1] {
            assert!(world.serves(actor, &model).await, "actor-{actor} serves version {version}");
        }
        let Some(pod) = pod else { break };
        let before = world.roster("trainer").await["epoch"].as_u64().unwrap();
        assert_ne!(build_of(pod).await.ok(), Some(file), "{pod} is of the first build");
        world.signal(pod, Signal::KILL).await;
        until(&format!("{pod} to be of the other build"), || async { build_of(pod).await.ok() == Some(file) }).await;
        let again = || async { world.roster("trainer").await["epoch"].as_u64().is_some_and(|epoch| epoch > before) };
        until(&format!("a group with the new {pod}"), again).await;
        world.until_ready(2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_are_replaced_one_by_one_while_versions_flow() {
    upgraded(Path::new(PROGRAM), Path::new(PROGRAM)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an earlier build: make test-previous"]
async fn new_agents_replace_earlier_ones_under_old_coordinator() {
    upgraded(&previous(), Path::new(PROGRAM)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an earlier build: make test-previous"]
async fn earlier_agents_replace_new_ones_under_this_coordinator() {
    upgraded(Path::new(PROGRAM), &previous()).await;
}
