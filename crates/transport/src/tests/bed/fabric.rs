//! Members with a worker process that has NIXL open: this test's own executable, started again as a worker.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::gdr::{FabricRing, GdrTransport, RingWanted, Slots};
use crate::nccl::NcclTransport;
use crate::tcp::TcpTransport;
use weightsync_core::protocol::worker::UcxSettings;
use weightsync_core::protocol::{CarriedBy, EpochId, FabricPlan, MemberName};
use weightsync_gpu::worker::{Worker, WorkerStart};

pub const WITHIN: Duration = Duration::from_secs(20);
/// Set for the executable that is to be a worker.
const AS_WORKER: &str = "WEIGHTSYNC_TEST_WORKER";

/// NIXL's library, where the tests have one.
pub fn library() -> Option<PathBuf> {
    let found = std::env::var_os("WEIGHTSYNC_NIXL").map(PathBuf::from);
    if found.is_none() {
        println!("not run: WEIGHTSYNC_NIXL names no libnixl_capi.so (WEIGHTSYNC_NIXL=$(tests/tools/nixl.sh))");
    }
    found
}

/// A worker, where the executable was started as one.
#[test]
fn worker_process() {
    if std::env::var_os(AS_WORKER).is_some() {
        let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        weightsync_gpu::worker::serve(socket).unwrap();
    }
}

/// TCP on loopback, or the RDMA device of this host where the stories are to run over verbs.
fn ucx() -> UcxSettings {
    if std::env::var("WEIGHTSYNC_STORIES_OVER").as_deref() != Ok("verbs") {
        return UcxSettings { tls: vec!["tcp".into()], devices: vec!["lo".into()] };
    }
    let devices = std::env::var("UCX_NET_DEVICES").unwrap_or_default();
    let devices = devices.split(',').filter(|name| !name.is_empty()).map(Into::into).collect();
    UcxSettings { tls: ["rc", "dc", "ud", "self"].map(Into::into).into(), devices }
}

pub async fn worker(name: &str) -> Worker {
    let arguments = ["--exact", "tests::bed::fabric::worker_process", "--nocapture"].map(Into::into).to_vec();
    let environment = vec![(AS_WORKER.into(), "1".into())];
    let start = WorkerStart { program: std::env::current_exe().unwrap(), arguments, environment, defaults: Vec::new(), label: name.into() };
    let ucx = ucx();
    let worker = Worker::start(&start.with_ucx(&ucx).unwrap()).unwrap();
    worker.open_fabric(library().as_deref(), &format!("{name}-{}", uuid::Uuid::new_v4().simple()), &ucx, WITHIN).await.unwrap();
    worker
}

pub async fn transport(tcp: TcpTransport, me: MemberName, epoch: EpochId) -> (GdrTransport, CarriedBy) {
    let worker = worker(&me.0).await;
    let gdr = GdrTransport::new(Arc::new(NcclTransport::new(tcp)));
    let wanted = RingWanted {
        epoch: epoch.clone(),
        me,
        worker,
        plan: FabricPlan { slots: 3, slot_bytes: 64 << 10, on_gpus: false },
        within: WITHIN,
    };
    gdr.enter(Slots::Host(FabricRing::register(wanted).await.unwrap()));
    let carried = CarriedBy { root: 0, passing: Vec::new(), lent: true, fabric: gdr.memory(&epoch) };
    (gdr, carried)
}
