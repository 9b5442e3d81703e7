//! Engines on the trainer's own GPU: they have no rank, and their workers copy each bucket from the source's ring, which they opened by CUDA IPC.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::process::Signal;
use serde_json::{Value, json};
use weightsync_core::protocol::LentMemory;
use weightsync_transport::nccl::Borrowed;

use super::fixture::{Machine, Member, pattern, uuid};
use super::handover::{Names, version_directories};
use crate::model::Model;
use crate::world::{Actor, SOON, World, installed, until};

/// A simulated LMDeploy on the trainer's GPU, which is fed awake.
fn guest(names: &Names) -> Actor {
    Actor::lmdeploy(&names.named("api_server"), &uuid(0)).on_gpu(0)
}

/// A group of these that stands. Slots are few, so that they are used again and again.
async fn group(machine: &Machine, silence: u32, actors: impl IntoIterator<Item = Actor>) -> World {
    let actors: Vec<Actor> = actors.into_iter().collect();
    let count = actors.len();
    let update = json!({"pause": "AbortAwake", "minReady": 1, "silenceSeconds": silence});
    let world = World::start_on(machine, json!({"type": "NCCL", "bucketMiB": 1}), update, actors).await;
    let config = json!({"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"});
    std::fs::write(world.folder().join("start/config.json"), config.to_string()).unwrap();
    world.until_ready(count).await;
    world
}

fn checkpoint(world: &World, seed: u64) -> PathBuf {
    Model::large(seed).save(&world.folder().join(format!("checkpoint-{seed}")))
}

async fn publish(world: &World, version: u64) -> Value {
    let path: &Path = &checkpoint(world, version);
    world.publish(path, version, &[]).await.done()
}

/// What the source says of the way to a member, the last time.
fn way(world: &World, member: &str) -> String {
    let log = world.log("trainer");
    let said = log.lines().rfind(|line| line.contains(member) && (line.contains("by CUDA IPC") || line.contains("through the host")));
    said.unwrap_or_else(|| panic!("nothing was said of the way to {member}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_alone_on_trainers_gpu_takes_versions_from_memory() {
    let (machine, names) = (Machine::new().with("FAKEGPU_MOST_TO_HOST", 64 << 10), Names::new());
    let world = group(&machine, 5, [guest(&names)]).await;
    for version in 1..=3 {
        let result = publish(&world, version).await;
        assert_eq!((installed(&result).len(), &result["attempts"]), (1, &json!(1)), "{result}");
        assert!(world.serves(0, &Model::large(version)).await, "version {version}");
    }
    assert!(way(&world, "actor-0").contains("by CUDA IPC"));
    assert_eq!(version_directories(world.folder()), Vec::<PathBuf>::new(), "no byte lay on the host next to the engine");
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_on_all_gpus_get_one_stream_in_one_attempt() {
    let (machine, names) = (Machine::new(), Names::new());
    let other = Actor::lmdeploy(&names.named("other"), &uuid(2)).on_gpu(2);
    // Two on the trainer's GPU, of different kinds.
    let world = group(&machine, 30, [guest(&names), other, Actor::sglang().on_gpu(0)]).await;
    for version in 1..=2 {
        let result = publish(&world, version).await;
        assert_eq!((installed(&result).len(), &result["attempts"]), (3, &json!(1)), "{result}");
        for number in 0..3 {
            assert!(world.serves(number, &Model::large(version)).await, "version {version}, actor-{number}");
        }
    }
    for member in ["actor-0", "actor-2"] {
        assert!(way(&world, member).contains("by CUDA IPC"), "{member}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_dies_or_hangs_in_a_copy_costs_one_attempt() {
    // A death shows without a silence; half a silence is also all the time that a busy machine has to answer a begin.
    for (fault, silence) in [("cuMemcpyDtoDAsync_v2@0 4 die", 30), ("cuMemcpyDtoDAsync_v2@0 4 hang", 8), ("ncclBroadcast@0 5 die", 30)] {
        let (machine, names) = (Machine::new(), Names::new());
        let other = Actor::lmdeploy(&names.named("other"), &uuid(2)).on_gpu(2);
        let world = group(&machine, silence, [guest(&names), other]).await;
        machine.order(fault);
        let result = publish(&world, 1).await;
        assert!(result["attempts"].as_u64().unwrap() > 1, "{fault}: {result}");
        for number in 0..2 {
            world.until_serves(number, &Model::large(1)).await;
        }
        world.until_ready(2).await;
        // New workers have new memory, and the way is the same.
        let result = publish(&world, 2).await;
        assert_eq!(installed(&result).len(), 2, "{fault}: {result}");
        for number in 0..2 {
            assert!(world.serves(number, &Model::large(2)).await, "{fault}, actor-{number}");
        }
        assert!(way(&world, "actor-0").contains("by CUDA IPC"), "{fault}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_or_silent_agent_does_not_delay_others() {
    for signal in [Signal::KILL, Signal::STOP] {
        let (machine, names) = (Machine::new(), Names::new());
        let other = Actor::lmdeploy(&names.named("other"), &uuid(2)).on_gpu(2);
        let world = group(&machine, 3, [guest(&names), other]).await;
        let victim = world.agent("actor-0").await;
        // Long enough to be met in the middle of the third copy.
        machine.order("cuMemcpyDtoDAsync_v2@0 3 delay 2000");
        let copying = || std::fs::read_dir(machine.folder().join("fired")).unwrap().next().is_some();
        let (result, ()) = tokio::join!(publish(&world, 1), async {
            until("the third copy", || async { copying() }).await;
            rustix::process::kill_process(victim, signal).unwrap();
        });
        assert!(result["attempts"].as_u64().unwrap() > 1 && !installed(&result).is_empty(), "{signal:?}: {result}");
        assert!(world.serves(1, &Model::large(1)).await, "{signal:?}");
        if signal == Signal::STOP {
            rustix::process::kill_process(victim, Signal::CONT).unwrap();
        }
        // It comes back as a joiner, and is fed.
        world.until_serves(0, &Model::large(1)).await;
        world.until_ready(2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_cannot_be_opened_goes_through_the_host() {
    let (machine, names) = (Machine::new(), Names::new());
    machine.order("cuIpcOpenMemHandle_v2@0 * error 201");
    let world = group(&machine, 5, [guest(&names)]).await;
    for version in 1..=2 {
        let result = publish(&world, version).await;
        assert_eq!(installed(&result).len(), 1, "{result}");
        assert!(world.serves(0, &Model::large(version)).await, "version {version}");
    }
    let way = way(&world, "actor-0");
    assert!(way.contains("through the host") && way.contains("cannot be opened") && way.contains("cuIpcOpenMemHandle"), "{way}");
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_is_not_what_was_meant_is_refused_and_closed() {
    let machine = Machine::new();
    let (source, reader) = (Member::new(machine.worker(0).await).await, machine.worker(0).await);
    let slot = source.ring.take(SOON).await.unwrap();
    let check = pattern(7, LentMemory::CHECK_BYTES);
    source.fill(&slot, &check).await;
    let good = LentMemory {
        gpu: uuid(0),
        handle: *source.ring.handle(),
        slots: source.ring.slots(),
        slot_bytes: source.ring.slot_bytes(),
        check: STANDARD.encode(&check),
        check_at: slot.offset(),
        pid_namespace: Some(7),
    };
    let open = |lent: LentMemory| {
        let reader = reader.clone();
        async move { Borrowed::open(&reader, &lent, Some(7), Duration::from_secs(20)).await }
    };
    let other = STANDARD.encode(pattern(8, LentMemory::CHECK_BYTES));
    let cases: [(LentMemory, &str); 7] = [
        (LentMemory { check: other, ..good.clone() }, "is not found in the memory"),
        (LentMemory { check_at: good.check_at + 64, ..good.clone() }, "is not found in the memory"),
        (LentMemory { slots: good.slots + 1, ..good.clone() }, "were announced"),
        (LentMemory { gpu: uuid(1), ..good.clone() }, "the worker here is on"),
        (LentMemory { pid_namespace: Some(8), ..good.clone() }, "another PID namespace"),
        (LentMemory { check: "?".into(), ..good.clone() }, "makes no sense"),
        (LentMemory { check_at: u64::MAX - 7, ..good.clone() }, "makes no sense"),
    ];
    for (lent, says) in cases {
        let Err(refused) = open(lent).await else { panic!("{says}: it was opened") };
        assert!(refused.to_string().contains(says), "{says}: {refused}");
    }
    until("refused memory to be closed", || async { machine.opened() == 0 }).await;
    let open_now = open(good).await.unwrap();
    assert_eq!(machine.opened(), 1);
    drop(open_now);
    until("the memory to be closed", || async { machine.opened() == 0 }).await;
}
