//! Groups whose members read from each other over an RDMA device, without `allowTcp`: `make verbs-test`, which sets
//! `WEIGHTSYNC_STORIES_OVER=verbs`.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use serde_json::{Value, json};

use crate::model::Model;
use crate::world::{Actor, PROGRAM, World, installed, is_member, until};

/// Bytes of a version of [`Model::small`].
const BYTES: u64 = 1 << 20;
/// Payload of one packet at most: RDMA knows no larger one.
const PACKET: u64 = 4096;

fn must_be_over_verbs() {
    let over = std::env::var("WEIGHTSYNC_STORIES_OVER");
    assert_eq!(over.as_deref(), Ok("verbs"), "WEIGHTSYNC_STORIES_OVER=verbs says that this host has an RDMA device");
}

/// Packets that a software RDMA device sent; none where there is another one, whose counters leave out what stays on the host.
fn packets() -> Option<u64> {
    let text = std::fs::read_to_string("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts").ok()?;
    Some(text.trim().parse().unwrap())
}

/// Times that an emulated machine keeps to.
fn slow() -> Value {
    json!({"silenceSeconds": 30, "timeoutSeconds": 60, "health": {"periodSeconds": 5, "timeoutSeconds": 5}})
}

/// F83: reads over a network card, and over nothing else.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: make verbs-test"]
async fn three_versions_reach_two_receivers_over_the_device() {
    must_be_over_verbs();
    let mut world = World::start(slow(), [Actor::new(), Actor::sglang()]).await;
    world.until_ready(2).await;
    let over_gdr = |event: &Value| event["message"].as_str().is_some_and(|text| text.ends_with("over gdr (GroupForming)"));
    world.event("a group over gdr", |event| event["reason"] == "GroupFormed" && over_gdr(event)).await;
    for version in 1..=3 {
        let (model, before) = (Model::small(version), packets());
        let checkpoint = model.save(&world.folder().join(format!("v{version}")));
        let result = world.publish(&checkpoint, version, &[]).await.done();
        assert_eq!((installed(&result).len(), &result["attempts"]), (2, &json!(1)), "{result}");
        assert!(world.serves(0, &model).await && world.serves(1, &model).await, "version {version}");
        // Each receiver read every byte.
        let carried = before.zip(packets()).map(|(before, after)| after - before);
        assert!(carried.is_none_or(|packets| packets >= 2 * BYTES / PACKET), "version {version}: {carried:?} packets");
    }
}

/// A worker of a pod's agent, which has NIXL open.
async fn worker(world: &World, pod: &str) -> Pid {
    let agent = world.agent(pod).await;
    // Each thread has the children that it made.
    let threads = std::fs::read_dir(format!("/proc/{}/task", agent.as_raw_nonzero())).unwrap().flatten();
    let children: String = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok()).collect();
    let of_agent = |pid: &&str| std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|words| words.ends_with(b"\0worker\0"));
    let found = children.split_whitespace().find(of_agent).unwrap_or_else(|| panic!("the agent of {pod} has no worker: {children}"));
    Pid::from_raw(found.parse().unwrap()).unwrap()
}

/// A replica dies while it reads: its worker stands still with a READ, so that the read cannot end before.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: make verbs-test"]
async fn receiver_killed_while_it_reads_costs_the_others_an_attempt() {
    must_be_over_verbs();
    let world = World::start(slow(), [Actor::new(), Actor::new()]).await;
    world.until_ready(2).await;
    let (agent, reading) = (world.agent("actor-1").await, worker(&world, "actor-1").await);
    let one = Model::small(1);
    let checkpoint = one.save(&world.folder().join("v1"));
    kill_process(reading, Signal::STOP).unwrap();
    let killing = async {
        let receives = |text: &str| {
            let mut totals = text.lines().filter(|line| line.starts_with("weightsync_agent_update_total_bytes{"));
            totals.any(|line| !line.ends_with(" 0"))
        };
        until("actor-1 to receive", || async { receives(&world.page("actor-1", "/metrics").await.1) }).await;
        for process in [agent, reading] {
            kill_process(process, Signal::KILL).unwrap();
        }
    };
    let (published, ()) = tokio::join!(world.publish(&checkpoint, 1, &[]), killing);
    let result = published.done();
    assert!(installed(&result).contains(&"actor-0") && result["attempts"] != 1, "{result}");
    assert!(world.serves(0, &one).await);
    // Its pod gets a new agent.
    world.until_serves(1, &one).await;
}

/// The program without the right to lock any amount of memory, which root has.
fn without_ipc_lock(folder: &Path) -> PathBuf {
    let program = folder.join("weightsync");
    let text = format!("#!/bin/sh\nexec /usr/bin/setpriv --inh-caps=-ipc_lock --bounding-set=-ipc_lock {PROGRAM} \"$@\"\n");
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    program
}

/// F65: memory registration fails.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: make verbs-test"]
async fn member_that_may_lock_too_little_is_left_out_by_the_limit() {
    must_be_over_verbs();
    let folder = tempfile::tempdir().unwrap();
    let program = without_ipc_lock(folder.path());
    let mut world = World::start_from(&program, &Model::small(0), slow(), [Actor::new(), Actor::new()]).await;
    world.until_ready(2).await;
    let agent = world.agent("actor-1").await;
    let limited = |bytes: Option<u64>| {
        prlimit(Some(agent), Resource::Memlock, Rlimit { current: bytes, maximum: None }).unwrap();
    };
    // Its next worker has the limit.
    limited(Some(64 << 10));
    kill_process(worker(&world, "actor-1").await, Signal::KILL).unwrap();
    let names_limit = |event: &Value| {
        let message = event["message"].as_str().unwrap_or_default();
        is_member(&event["member"], "actor-1") && message.contains("RLIMIT_MEMLOCK") && message.contains("ulimit -l")
    };
    world.event("the limit to be named", names_limit).await;
    let one = Model::small(1);
    let checkpoint = one.save(&world.folder().join("v1"));
    assert_eq!(installed(&world.publish(&checkpoint, 1, &[]).await.done()), ["actor-0"]);
    // With the right again it comes in, and gets what it missed.
    limited(None);
    world.until_serves(1, &one).await;
    until("both to be ready", || async { world.replicas("ready").await.len() == 2 }).await;
}
