use std::fs;
use std::os::unix::fs::symlink;

use super::advice::{Advice, advise, notes};
use super::facts::{Facts, Report};
use super::found::{Found, Gpus};
use super::gdr::{self, Check};
use super::host::{Host, PidNamespace};
use super::show::render;
use weightsync_agent::rdma::{Rdma, RdmaPort};
use weightsync_core::plan::NoSharing;
use weightsync_core::protocol::worker::{FabricFacts, GpuFacts, GpuLink, NcclFacts};

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
    let port = RdmaPort { number: 1, state: state.into(), link_layer: "InfiniBand".into(), gids: 1 };
    let file = Some("/dev/infiniband/uverbs0".into());
    let mut host = Host { rdma: vec![Rdma { name: "mlx5_0".into(), ports: vec![port], file, path: None }], peermem, ..empty_host() };
    host.limits.locks_too_little = None;
    host
}

fn nixl(cuda: u32) -> Found<FabricFacts> {
    Found::Found(FabricFacts {
        path: "/lib/libnixl_capi.so".into(),
        version: Some("1.5.1".into()),
        cuda: Some(cuda),
        plugin: "UCX".into(),
        memory: vec!["DRAM".into(), "VRAM".into()],
        parameters: std::collections::BTreeMap::new(),
        gpu_memory: Ok(()),
    })
}

fn reported(gpus: Gpus, host: Host, shared: Result<Vec<String>, NoSharing>) -> Report {
    Report::new(Facts { gpus, nixl: nixl(13), host, shared }, std::path::Path::new("/nowhere"))
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
    // The report has nothing on GPUs where there are none.
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
    assert_eq!((host.kernel_module.as_deref(), host.open_module), (Some("580.159.04"), true));
    let devices: Vec<_> = host.rdma.iter().map(|device| (device.name.as_str(), device.active())).collect();
    assert_eq!(devices, [("mlx5_0", false), ("mlx5_1", true)]);
    assert_eq!(host.rdma[1].ports[0].link_layer, "Ethernet");
    assert!(host.peermem);
    assert_eq!(host.pid_namespace, Some(PidNamespace { number: 4_026_531_836, of_host: true }));
}

/// What is to be changed, by what was looked at.
fn changes(nixl: &Found<FabricFacts>, gpus: &Gpus, host: &Host) -> Vec<(String, bool)> {
    let checks = gdr::checks(nixl, gpus, host, std::path::Path::new("/nowhere"));
    checks.into_iter().filter(|check| check.change.is_some()).map(|Check { about, needed, .. }| (about, needed)).collect()
}

#[test]
fn what_gdr_lacks_is_named_and_what_is_needed_of_it() {
    let gpus = gpus(1, GpuLink::Nvlink);
    let good = || with_rdma("ACTIVE", true);
    let with = |change: &dyn Fn(&mut Host)| {
        let mut host = good();
        change(&mut host);
        host
    };
    let roce =
        |host: &mut Host| host.rdma[0].ports[0] = RdmaPort { link_layer: "Ethernet".into(), gids: 0, ..host.rdma[0].ports[0].clone() };
    let cases = [
        (nixl(13), good(), None),
        (Found::Missing("install nixl-cu13".into()), good(), Some(("NIXL", true))),
        (nixl(12), good(), Some(("CUDA of NIXL", false))),
        (nixl(13), with(&|host| host.rdma.clear()), Some(("RDMA devices", true))),
        (nixl(13), with_rdma("DOWN", true), Some(("RDMA devices", true))),
        (nixl(13), with(&|host| host.rdma[0].file = None), Some(("device files", true))),
        (nixl(13), with(&roce), Some(("RoCE addresses", true))),
        (nixl(13), with(&|host| host.limits.locks_too_little = Some(8 << 20)), Some(("locked memory", true))),
        (nixl(13), with_rdma("ACTIVE", false), Some(("GPU memory by RDMA", false))),
        (nixl(13), Host { open_module: true, ..with_rdma("ACTIVE", false) }, None),
    ];
    for (nixl, host, wanted) in cases {
        let wanted: Vec<_> = wanted.iter().map(|(about, needed)| ((*about).to_owned(), *needed)).collect();
        assert_eq!(changes(&nixl, &gpus, &host), wanted, "{host:?}");
        let advice = gdr::advice(&gdr::checks(&nixl, &gpus, &host, std::path::Path::new("/nowhere")));
        assert_eq!(advice.unusable.is_some(), wanted.iter().any(|(_, needed)| *needed), "{advice:?}");
    }
}

#[test]
fn a_report_for_people_names_everything() {
    let report = reported(gpus(2, GpuLink::Nvlink), with_rdma("ACTIVE", true), Ok(vec!["GPU-1".to_owned()]));
    let text = render(&report);
    for wanted in [
        "can be shared on GPU-1",
        "CUDA 13.2",
        "2.28.9 in /lib/libnccl.so.2",
        "GPU-1",
        "NVLink",
        "mlx5_0: port 1 InfiniBand ACTIVE",
        "transport gdr\n  all members: RDMA reads by NIXL",
        "transport tcp",
        "1.5.1 in /lib/libnixl_capi.so",
        "UCX, for DRAM and VRAM",
        "mlx5_0:1 InfiniBand ACTIVE",
    ] {
        assert!(text.contains(wanted), "{wanted}:\n{text}");
    }
    let hidden = NoSharing::PidNamespace { who: "the engine", detail: "its port is open".to_owned() };
    let text = render(&reported(gpus(1, GpuLink::Nvlink), empty_host(), Err(hidden)));
    assert!(text.contains("cannot be shared: the engine is in another PID namespace"), "{text}");
}
