use std::fs;
use std::os::unix::fs::symlink;

use super::advice::{Advice, advise, notes};
use super::facts::{Found, Gpus, Report};
use super::host::{Host, PidNamespace, Rdma, RdmaPort};
use super::show::render;
use weightsync_core::plan::NoSharing;
use weightsync_core::protocol::worker::{GpuFacts, GpuLink, NcclFacts};

fn gpu(number: u32) -> GpuFacts {
    GpuFacts {
        uuid: format!("GPU-{number}"),
        name: "Test".into(),
        bus: format!("0000:0{number}:00.0"),
        memory_bytes: 80 << 30,
        free_bytes: 0,
        driver: 13020,
        refused: None,
    }
}

fn gpus(count: u32, link: GpuLink) -> Gpus {
    let all: Vec<_> = (0..count).map(gpu).collect();
    let row = |a: u32| (0..count).map(|b| if a == b { GpuLink::Same } else { link }).collect();
    let nccl = Found::Found(NcclFacts { path: "/lib/libnccl.so.2".into(), version: 22809, lacks: Vec::new() });
    Gpus { driver: Found::driver_of(&all), gpus: all, links: (0..count).map(row).collect(), nccl }
}

fn empty_host() -> Host {
    Host::read(tempfile::tempdir().unwrap().path())
}

fn with_rdma(state: &str, peermem: bool) -> Host {
    let port = RdmaPort { number: 1, state: state.into(), link_layer: "InfiniBand".into() };
    Host { rdma: vec![Rdma { name: "mlx5_0".into(), ports: vec![port] }], peermem, ..empty_host() }
}

fn nccl(gpus: &Gpus, host: &Host) -> Advice {
    advise(gpus, host).into_iter().find(|advice| advice.transport == "nccl").unwrap()
}

#[test]
fn the_slowest_pair_of_gpus_names_the_way_within_a_host() {
    let mut mixed = gpus(4, GpuLink::Nvlink);
    mixed.links[1][3] = GpuLink::Pcie;
    let mut broken = mixed.clone();
    broken.links[0][2] = GpuLink::None;
    let cases = [
        (gpus(4, GpuLink::Nvlink), "NVLink between all 4 GPUs", None),
        (mixed, "PCIe", Some("no NVLink between GPU 1 and GPU 3")),
        (broken, "host memory", Some("GPU 0 cannot reach the memory of GPU 2")),
        (gpus(1, GpuLink::Nvlink), "one GPU", None),
    ];
    for (gpus, uses, not_better) in cases {
        let advice = nccl(&gpus, &empty_host());
        assert_eq!(advice.unusable, None);
        assert!(advice.ways[0].uses.contains(uses), "{advice:?}");
        assert_eq!(advice.ways[0].not_better.as_deref(), not_better);
    }
}

#[test]
fn the_way_to_other_hosts_says_what_is_missing_for_a_better_one() {
    let gpus = gpus(2, GpuLink::Nvlink);
    let cases = [
        (empty_host(), "TCP", Some("no RDMA device")),
        (with_rdma("DOWN", true), "TCP", Some("no port of mlx5_0 is active")),
        (with_rdma("ACTIVE", false), "RDMA by mlx5_0", Some("nvidia_peermem is not loaded")),
        (with_rdma("ACTIVE", true), "RDMA from GPU memory by mlx5_0", None),
    ];
    for (host, uses, not_better) in cases {
        let way = nccl(&gpus, &host).ways.remove(1);
        assert!(way.uses.starts_with(uses), "{way:?}");
        assert_eq!(way.not_better.is_some(), not_better.is_some(), "{way:?}");
        assert!(way.not_better.unwrap_or_default().contains(not_better.unwrap_or_default()));
    }
}

#[test]
fn what_is_missing_makes_nccl_unusable_and_tcp_stays() {
    let mut partitioned = gpus(1, GpuLink::Nvlink);
    partitioned.gpus[0].refused = Some("it is part of a MIG".into());
    let without_nccl = Gpus { nccl: Found::Missing("no libnccl.so.2".into()), ..gpus(2, GpuLink::Nvlink) };
    let cases = [
        (Gpus::nothing(&"no NVIDIA driver: no file"), "no NVIDIA driver"),
        (gpus(0, GpuLink::None), "shows no GPU"),
        (partitioned, "MIG"),
        (without_nccl, "no libnccl.so.2"),
    ];
    for (gpus, why) in cases {
        let advice = advise(&gpus, &empty_host());
        assert!(advice[0].unusable.as_deref().unwrap().contains(why), "{advice:?}");
        assert_eq!((advice[0].ways.len(), advice[1].transport, &advice[1].unusable), (0, "tcp", &None));
    }
}

#[test]
fn notes_name_what_somebody_can_change() {
    let mut host = with_rdma("ACTIVE", true);
    host.limits.shm_bytes = Some(64 << 20);
    host.limits.locked_bytes = Some(8 << 20);
    host.pid_namespace = Some(PidNamespace { number: 7, of_host: false });
    host.environment = [("PYTORCH_CUDA_ALLOC_CONF".to_owned(), "expandable_segments:True".to_owned())].into();
    let found = notes(&gpus(2, GpuLink::Nvlink), &host);
    for wanted in ["/dev/shm has 64", "RDMA locks", "CUDA IPC", "expandable segments"] {
        assert!(found.iter().any(|note| note.contains(wanted)), "{wanted}: {found:?}");
    }
    // Nothing of GPUs is said where there are none.
    host.rdma.clear();
    host.environment.clear();
    assert_eq!(notes(&Gpus::nothing(&"no driver"), &host), Vec::<String>::new());
    host.kernel_module = Some("580.1".into());
    assert_eq!(notes(&Gpus::nothing(&"no driver"), &host).len(), 1);
}

#[test]
fn the_kernels_files_are_read_as_they_are_written() {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x)\nGCC");
    write("sys/class/infiniband/mlx5_1/ports/1/state", "4: ACTIVE\n");
    write("sys/class/infiniband/mlx5_1/ports/1/link_layer", "Ethernet\n");
    write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
    write("sys/module/nvidia_peermem/version", "1");
    fs::create_dir_all(root.path().join("proc/self/ns")).unwrap();
    symlink("pid:[4026531836]", root.path().join("proc/self/ns/pid")).unwrap();
    let host = Host::read(root.path());
    assert_eq!(host.kernel_module.as_deref(), Some("580.159.04"));
    let devices: Vec<_> = host.rdma.iter().map(|device| (device.name.as_str(), device.active())).collect();
    assert_eq!(devices, [("mlx5_0", false), ("mlx5_1", true)]);
    assert_eq!(host.rdma[1].ports[0].link_layer, "Ethernet");
    assert!(host.peermem);
    assert_eq!(host.pid_namespace, Some(PidNamespace { number: 4_026_531_836, of_host: true }));
}

#[test]
fn a_report_for_people_names_everything() {
    let report = Report::new(gpus(2, GpuLink::Nvlink), with_rdma("ACTIVE", true), Ok(vec!["GPU-1".to_owned()]));
    let text = render(&report);
    for wanted in [
        "can be shared on GPU-1",
        "CUDA 13.2",
        "2.28.9 in /lib/libnccl.so.2",
        "GPU-1",
        "NVLink",
        "mlx5_0: port 1 InfiniBand ACTIVE",
        "transport tcp",
    ] {
        assert!(text.contains(wanted), "{wanted}:\n{text}");
    }
    let hidden = NoSharing::PidNamespace { who: "the engine", detail: "its port is open".to_owned() };
    let text = render(&Report::new(gpus(1, GpuLink::Nvlink), empty_host(), Err(hidden)));
    assert!(text.contains("cannot be shared: the engine is in another PID namespace"), "{text}");
}
