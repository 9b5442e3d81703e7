//! What several tasks do to the GPUs of one endpoint at the same time.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::thread;

use super::*;
use crate::core::Facts;
use crate::group::Me;
use weightsync_core::protocol::worker::{GpuFacts, NcclFacts};
use weightsync_core::protocol::{Incarnation, Role};
use weightsync_transport::tcp::{TcpOptions, TcpTransport};

const ROUNDS: usize = 20_000;
const AMPLE: Duration = Duration::from_secs(60);

/// A entry whose worker never says anything.
fn entry() -> Open {
    let arguments = vec!["-c".into(), "exec sleep 600".into()];
    let start = WorkerStart { program: "/bin/sh".into(), arguments, environment: Vec::new(), defaults: Vec::new(), label: "test".into() };
    let worker = Worker::start(&start).unwrap();
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

/// Seen in CI: a source's agent that was informed of NCCL's settings while it reported its trainer of its worker stood still for ever.
#[tokio::test(flavor = "multi_thread")]
async fn settings_during_a_worker_message_block_no_one() {
    let me = Me { incarnation: Incarnation { pod_uid: "pod".into(), instance: "life".into() }, role: Role::Source, port: None };
    let core = Core::new(me, Facts::default());
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let transport = NcclTransport::new(TcpTransport::bind(loopback, core.clone(), TcpOptions::default()).await.unwrap());
    let gpus = Gpus::new(
        core,
        GpuSettings::default(),
        Vec::new(),
        Share { number: 0, of: 1 },
        &TransportPolicy::default(),
        Arc::new(transport),
        None,
    );
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
        done.send("told").unwrap();
    });
    let both = tokio::task::spawn_blocking(move || [ended.recv_timeout(AMPLE), ended.recv_timeout(AMPLE)]).await.unwrap();
    assert!(both.iter().all(Result::is_ok), "the two wait for each other: {both:?}");
}
