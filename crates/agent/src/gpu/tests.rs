//! What several tasks do to the GPUs of one endpoint at the same time.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::thread;

use super::*;
use crate::core::Facts;
use crate::group::Me;
use weightsync_core::protocol::worker::{GpuFacts, NcclFacts};
use weightsync_core::protocol::{Incarnation, PodRef, Role, RosterMember};
use weightsync_transport::tcp::{TcpOptions, TcpTransport};

const ROUNDS: usize = 20_000;
const AMPLE: Duration = Duration::from_secs(60);

/// A entry whose worker never says anything.
fn entry() -> Open {
    let worker = Worker::start(&WorkerStart::new("/bin/sh", &["-c", "exec sleep 600"], "test")).unwrap();
    let gpu = GpuFacts {
        uuid: "GPU-a".into(),
        name: "of a test".into(),
        bus: String::new(),
        memory_bytes: 1 << 30,
        free_bytes: 1 << 30,
        driver: 13_000,
        refused: None,
    };
    let nccl = Ok(NcclFacts { path: String::new(), version: 22_809, lacks: Vec::new() });
    let staging = Staging::new(worker.clone());
    Open { worker, gpu, nccl, devices: Vec::new(), staging, ring: Arc::default() }
}

async fn gpus(policy: &TransportPolicy) -> Arc<Gpus> {
    let me = Me { incarnation: Incarnation { pod_uid: "pod".into(), instance: "life".into() }, role: Role::Source, port: None };
    let core = Core::new(me, Facts::default());
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let tcp = TcpTransport::bind(loopback, core.clone(), TcpOptions::default()).await.unwrap();
    let share = Share { number: 0, of: 1 };
    Gpus::new(core, GpuSettings::default(), Vec::new(), share, policy, Arc::new(NcclTransport::new(tcp)), None)
}

#[tokio::test]
async fn member_over_sockets_is_reported_until_settings_change() {
    let policy = TransportPolicy { wish: TransportWish::Nccl, ..TransportPolicy::default() };
    let gpus = gpus(&policy).await;
    gpus.state.send_replace(GpuState::Open(Vec::new()));
    *lock(&gpus.over_sockets) = Some(slow(&["mlx5_0".to_owned()], "NET/IB : No device found."));
    gpus.configure(&policy, 0);
    let report = gpus.report(AMPLE).await;
    for part in ["mlx5_0", "NET/IB : No device found.", "/dev/infiniband", "set transport.allowTcp"] {
        assert!(report.reason.contains(part), "{}", report.reason);
    }
    assert_eq!(report.nccl, None);
    gpus.configure(&TransportPolicy { environment: [("NCCL_IB_HCA".to_owned(), "mlx5_0".to_owned())].into(), ..policy }, 0);
    assert_eq!(*lock(&gpus.over_sockets), None, "it is looked at again");
}

#[test]
fn ranks_of_one_node_pass_no_network() {
    let pod = |node: Option<&str>| PodRef { name: "p".into(), uid: "u".into(), node: node.map(str::to_owned), ips: Vec::new() };
    let member = |(number, node): (u32, Option<&str>)| RosterMember {
        name: MemberName(format!("m/{number}")),
        role: Role::Rollout,
        rank_offset: number,
        size: 1,
        pods: vec![pod(node)],
        port: None,
    };
    for (nodes, expected) in [
        (&[Some("a"), Some("a")][..], true),
        (&[Some("a"), Some("b")], false),
        (&[None, None], false),
        (&[Some("a"), None], false),
        (&[], false),
    ] {
        let members: Vec<RosterMember> = (0..).zip(nodes.iter().copied()).map(member).collect();
        let ranks = members.iter().map(|member| (member.name.clone(), vec!["GPU-1".to_owned()])).collect();
        let plan = CommunicatorPlan { slots: 2, slot_bytes: 1, ranks, guests: Vec::new() };
        let roster = Roster { members, world_size: 2, chain: Vec::new() };
        assert_eq!(on_one_node(&roster, &plan), expected, "{nodes:?}");
    }
}

/// Seen in CI: a source's agent that was informed of NCCL's settings while it reported its trainer of its worker stood still for ever.
#[tokio::test(flavor = "multi_thread")]
async fn settings_during_a_worker_message_block_no_one() {
    let gpus = gpus(&TransportPolicy::default()).await;
    let entry = entry();
    let (done, ended) = mpsc::channel();
    let (configured, finished) = (gpus.clone(), done.clone());
    thread::spawn(move || {
        for round in 0..ROUNDS {
            let policy = TransportPolicy { slots: 2 + u32::try_from(round % 2).unwrap(), ..TransportPolicy::default() };
            configured.configure(&policy, 1);
        }
        finished.send("configured").unwrap();
    });
    thread::spawn(move || {
        for _ in 0..ROUNDS {
            gpus.state.send_replace(GpuState::Open(vec![entry.clone()]));
            drop(gpus.source_worker());
        }
        done.send("ended").unwrap();
    });
    let both = tokio::task::spawn_blocking(move || [ended.recv_timeout(AMPLE), ended.recv_timeout(AMPLE)]).await.unwrap();
    assert!(both.iter().all(Result::is_ok), "the two wait for each other: {both:?}");
}
