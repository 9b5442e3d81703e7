//! Which network NCCL uses between hosts, as the agent's side reads it from a worker's log, and what follows on a host with an RDMA device.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::fixture::{Machine, Member, abort, form};
use crate::model::Model;
use crate::world::{Actor, PROGRAM, SOON, World, installed};

/// Runs the program where the kernel lists an RDMA device: in mounts of its own, over `/sys/class` and `/dev`.
const WITH_DEVICE: &str = r#"#!/bin/sh
exec unshare --mount --propagation private sh -ec '
old=$1; shift
port=/sys/class/infiniband/mlx5_9/ports/1
mount -t tmpfs none /sys/class
mkdir -p $port /sys/class/infiniband_verbs/uverbs9
echo "4: ACTIVE" >$port/state
echo mlx5_9 >/sys/class/infiniband_verbs/uverbs9/ibdev
mount --rbind /dev $old
mount -t tmpfs none /dev
for device in null zero full random urandom; do : >/dev/$device; mount --bind $old/$device /dev/$device; done
mkdir /dev/shm /dev/infiniband
mount --bind $old/shm /dev/shm
ln -s /proc/self/fd /dev/fd
for number in 0:stdin 1:stdout 2:stderr; do ln -s /proc/self/fd/${number%:*} /dev/${number#*:}; done
: >/dev/infiniband/uverbs9
exec PROGRAM "$@"' sh OLD "$@"
"#;

/// The program for a host with an RDMA device, as a script in a folder.
fn with_device(folder: &Path) -> PathBuf {
    let (old, script) = (folder.join("dev"), folder.join("weightsync"));
    fs::create_dir(&old).unwrap();
    fs::write(&script, WITH_DEVICE.replace("PROGRAM", PROGRAM).replace("OLD", old.to_str().unwrap())).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    script
}

/// A group of two rollouts on a host with an RDMA device that NCCL does not use.
async fn over_sockets(folder: &Path, machine: &Machine, transport: Value) -> World {
    World::start_on_by(&with_device(folder), machine, transport, [Actor::new(), Actor::sglang()]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn member_whose_nccl_passes_sockets_is_refused_with_cause() {
    let (folder, machine) = (tempfile::tempdir().unwrap(), Machine::new().with("FAKEGPU_NCCL_NET", "Socket"));
    let mut world = over_sockets(folder.path(), &machine, json!({"type": "NCCL", "bucketMiB": 1})).await;
    // All three are on that host: any of them may be refused first.
    let refused = world.event("a member to be refused", |event| event["reason"] == "TransportUnavailable").await;
    let why = refused["message"].as_str().unwrap();
    for part in ["mlx5_9", "NET/IB : No device found", "set transport.allowTcp"] {
        assert!(why.contains(part), "{why}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn auto_avoids_an_nccl_that_passes_sockets() {
    let (folder, machine) = (tempfile::tempdir().unwrap(), Machine::new().with("FAKEGPU_NCCL_NET", "Socket"));
    let world = over_sockets(folder.path(), &machine, json!({"bucketMiB": 1})).await;
    world.until_ready(2).await;
    let model = Model::large(1);
    let result = world.publish(&model.save(&world.folder().join("v1")), 1, &[]).await.done();
    assert_eq!(installed(&result).len(), 2, "{result}");
    let log = world.log("trainer");
    assert!(log.contains("NCCL uses NET/Socket between hosts"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_that_are_allowed_carry_versions() {
    for (network, allow) in [("Socket", true), ("IB", false)] {
        let (folder, machine) = (tempfile::tempdir().unwrap(), Machine::new().with("FAKEGPU_NCCL_NET", network));
        let transport = json!({"type": "NCCL", "bucketMiB": 1, "allowTcp": allow});
        let world = over_sockets(folder.path(), &machine, transport).await;
        world.until_ready(2).await;
        let model = Model::large(1);
        let result = world.publish(&model.save(&world.folder().join("v1")), 1, &[]).await.done();
        assert_eq!((installed(&result).len(), &result["attempts"]), (2, &json!(1)), "{network}: {result}");
        assert!(!world.log("trainer").contains("uses NET/Socket"), "{network}");
        for actor in ["actor-0", "actor-1"] {
            let log = world.log(actor);
            let received = log.lines().find(|line| line.contains("received a version")).unwrap_or_else(|| panic!("{actor}: {log}"));
            assert!(received.contains("trainer/trainer") && received.contains("\"nccl\""), "{received}");
            let (_, metrics) = world.page(actor, "/metrics").await;
            let rate = metrics.lines().find(|line| line.starts_with("weightsync_agent_last_transfer_bytes_per_second{"));
            let rate = rate.and_then(|line| line.split_whitespace().last()).and_then(|rate| rate.parse::<f64>().ok());
            assert!(rate.is_some_and(|rate| rate > 0.0), "{actor}: {metrics}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_between_hosts_are_read_from_the_log() {
    let no_device = Some("NET/IB : No device found".to_owned());
    for (network, level, expected) in [
        (Some("Socket"), None, &no_device),
        (Some("Socket"), Some("WARN"), &no_device),
        (Some("Socket"), Some("INFO"), &no_device),
        (Some("IB"), None, &None),
        (None, None, &None),
    ] {
        let mut machine = Machine::new().reading_nccl_log();
        for (name, value) in [("FAKEGPU_NCCL_NET", network), ("NCCL_DEBUG", level)] {
            machine = value.into_iter().fold(machine, |machine, value| machine.with(name, value));
        }
        let members = machine.members(2).await;
        let members: Vec<&Member> = members.iter().collect();
        for group in 1..=2 {
            form(group, &members).await;
            for member in &members {
                assert_eq!(&member.worker.over_sockets(group, SOON).await, expected, "{network:?} {level:?} group {group}");
            }
            abort(group, &members).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn network_of_a_worker_whose_log_is_not_read_is_unknown() {
    let machine = Machine::new().with("FAKEGPU_NCCL_NET", "Socket");
    let members = machine.members(2).await;
    let members: Vec<&Member> = members.iter().collect();
    form(1, &members).await;
    assert_eq!(members[0].worker.over_sockets(1, Duration::from_millis(300)).await, None);
    abort(1, &members).await;
}
