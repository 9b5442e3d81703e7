//! How an endpoint opens NIXL. The worker is this test's own executable, started again.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;
use crate::core::Facts;
use crate::gpu::{GpuChoice, GpuSettings, Share};
use crate::group::Me;
use crate::rdma::tests::{plug, put_gpu};
use tokio_util::sync::CancellationToken;
use weightsync_core::protocol::{Incarnation, Role, TransportWish};
use weightsync_transport::nccl::NcclTransport;
use weightsync_transport::tcp::{TcpOptions, TcpTransport};

const AMPLE: Duration = Duration::from_secs(60);
/// Set for the executable that is to be a worker.
const AS_WORKER: &str = "WEIGHTSYNC_TEST_WORKER";

#[test]
fn worker_process() {
    if std::env::var_os(AS_WORKER).is_some() {
        let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        weightsync_gpu::worker::serve(socket).unwrap();
    }
}

/// A worker that says that it started, and goes on when a line comes through the pipe `gate`.
fn gated(folder: &Path) -> WorkerStart {
    mknodat(CWD, folder.join("gate"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    let program = std::env::current_exe().unwrap();
    let script = format!(
        "cd {} && echo started >>starts && read -r line <gate && exec {} --exact fabric::tests::worker_process --nocapture",
        folder.display(),
        program.display()
    );
    WorkerStart { environment: vec![(AS_WORKER.into(), "1".into())], ..WorkerStart::new("/bin/sh", &["-c", &script], "nixl") }
}

/// Seen in an emulated machine: each report began to open NIXL once more and gave it half of its own time, so that the member never came in.
#[tokio::test(flavor = "multi_thread")]
async fn opening_that_outlasts_a_report_is_not_begun_again() {
    let folder = tempfile::tempdir().unwrap();
    let me = Me { incarnation: Incarnation { pod_uid: "pod".into(), instance: "life".into() }, role: Role::Rollout, port: None };
    let core = Core::new(me, Facts::default());
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let tcp = TcpTransport::bind(loopback, core.clone(), TcpOptions::default()).await.unwrap();
    let nccl = Arc::new(NcclTransport::new(tcp));
    let transport = Arc::new(GdrTransport::new(nccl.clone()));
    let worker = Some(gated(folder.path()));
    let settings = FabricSettings { nixl: Some("/nowhere/libnixl_capi.so".into()), worker, ..FabricSettings::default() };
    let policy = TransportPolicy { wish: TransportWish::Gdr, allow_tcp: true, ..TransportPolicy::default() };
    let none = GpuSettings { choice: GpuChoice::None, ..GpuSettings::default() };
    let gpus = Gpus::new(core.clone(), none, Vec::new(), Share { number: 0, of: 1 }, &policy, nccl, None);
    tokio::spawn(gpus.clone().supervise(CancellationToken::new()));
    let fabric = Fabric::new(core, settings, Cgroups::of_this_process(), gpus, transport);
    let early = fabric.report(&policy, Duration::ZERO).await;
    assert!(early.reason.contains("still being opened"), "{early:?}");
    let gate = folder.path().join("gate");
    let opened = tokio::task::spawn_blocking(move || std::fs::write(gate, "go on\n"));
    let late = fabric.report(&policy, AMPLE).await;
    opened.await.unwrap().unwrap();
    assert!(late.reason.contains("/nowhere/libnixl_capi.so"), "{late:?}");
    assert_eq!(std::fs::read_to_string(folder.path().join("starts")).unwrap(), "started\n");
}

#[test]
fn devices_are_those_that_ucx_would_read() {
    assert_eq!(FabricSettings::devices("mlx5_0:1, mlx5_1:1,"), ["mlx5_0:1", "mlx5_1:1"]);
    assert_eq!(FabricSettings::devices("all"), ["all"]);
    assert!(FabricSettings::devices("").is_empty());
}

#[test]
fn a_worker_takes_the_devices_nearest_to_its_gpu() {
    let root = tempfile::tempdir().unwrap();
    let only_rdma = UcxSettings { tls: vec!["rc".to_owned()], devices: Vec::new() };
    let by = |ucx: &UcxSettings, gpu: &str| devices::near(ucx, gpu, root.path()).devices;
    plug(root.path(), "mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
    put_gpu(root.path(), "pci0000:00/0000:00:01.0/0000:0a:00.0");
    put_gpu(root.path(), "pci0000:c0/0000:c0:01.0/0000:ca:00.0");
    // UCX finds one by itself.
    assert!(by(&only_rdma, "GPU-0000:0a:00.0").is_empty());
    plug(root.path(), "mlx5_1", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
    assert_eq!(by(&only_rdma, "GPU-0000:0a:00.0"), ["mlx5_0:1"]);
    // None is nearer, or nothing is known of the GPU's place.
    assert!(by(&only_rdma, "GPU-0000:ca:00.0").is_empty());
    assert!(by(&only_rdma, "GPU-elsewhere").is_empty());
    // Who chose devices, or TCP, has the last word.
    for ucx in [
        UcxSettings { devices: vec!["mlx5_1:1".to_owned()], ..only_rdma.clone() },
        UcxSettings { devices: vec!["all".to_owned()], ..only_rdma.clone() },
        UcxSettings { tls: vec!["rc".to_owned(), "tcp".to_owned()], ..only_rdma.clone() },
    ] {
        assert_eq!(by(&ucx, "GPU-0000:0a:00.0"), ucx.devices);
    }
}

#[test]
fn summary_names_transports_and_the_devices_of_each_gpu() {
    let facts = FabricFacts {
        path: "/lib/libnixl_capi.so".into(),
        version: Some("1.5.1".into()),
        cuda: Some(13),
        plugin: "UCX".into(),
        memory: vec!["VRAM".into()],
        parameters: [("UCX_TLS".to_owned(), "rc,cuda_copy".to_owned())].into(),
        gpu_memory: Ok(()),
    };
    let active = ["mlx5_0:1".to_owned(), "mlx5_1:1".to_owned()];
    let chosen = vec![(Some("GPU-1".to_owned()), vec!["mlx5_1:1".to_owned()]), (Some("GPU-2".to_owned()), Vec::new())];
    let found = summary(&facts, chosen, &active);
    assert_eq!((found.plugin.as_str(), found.transports.join(" ")), ("UCX", "rc cuda_copy".to_owned()));
    let devices: Vec<_> = found.devices.iter().map(|of| (of.gpu.as_deref(), of.names.join(" "))).collect();
    assert_eq!(devices, [(Some("GPU-1"), "mlx5_1:1".to_owned()), (Some("GPU-2"), "mlx5_0:1 mlx5_1:1".to_owned())]);
    assert!(summary(&facts, vec![(None, Vec::new())], &[]).devices.is_empty(), "no RDMA device");
    let many = vec![(None, vec!["x".repeat(500); 99]); 99];
    let found = summary(&facts, many, &active);
    assert!(found.devices.len() == 16 && found.devices.iter().all(|of| of.names.len() == 16 && of.names[0].len() == 64));
}
