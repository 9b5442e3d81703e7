use std::os::unix::fs::symlink;

use super::*;

pub(crate) fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A device `name` at a PCI path below `sys/devices`, with one active port.
pub(crate) fn plug(root: &Path, name: &str, pci: &str, number: u32) {
    let device = root.join("sys/devices").join(pci);
    let port = format!("sys/devices/{pci}/infiniband/{name}/ports/1");
    write(root, &format!("{port}/state"), "4: ACTIVE\n");
    write(root, &format!("{port}/link_layer"), "Ethernet\n");
    write(root, &format!("{port}/gids/0"), "fe80:0000:0000:0000:0000:0000:0000:0001\n");
    write(root, &format!("{port}/gids/1"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
    fs::create_dir_all(device.join(format!("infiniband_verbs/uverbs{number}"))).unwrap();
    symlink(&device, device.join(format!("infiniband/{name}/device"))).unwrap();
    fs::create_dir_all(root.join("sys/class/infiniband")).unwrap();
    symlink(device.join(format!("infiniband/{name}")), root.join("sys/class/infiniband").join(name)).unwrap();
}

/// A GPU at a PCI path, whose UUID is `GPU-` and its address.
pub(crate) fn put_gpu(root: &Path, pci: &str) {
    let device = root.join("sys/devices").join(pci);
    fs::create_dir_all(&device).unwrap();
    fs::create_dir_all(root.join("sys/bus/pci/devices")).unwrap();
    let address = device.file_name().unwrap().to_str().unwrap();
    symlink(&device, root.join("sys/bus/pci/devices").join(address)).unwrap();
    let said = format!("Model: \t\t Test\nGPU UUID: \t GPU-{address}\nBus Type: \t PCIe\n");
    write(root, &format!("proc/driver/nvidia/gpus/{address}/information"), &said);
}

fn names(devices: &[&Rdma]) -> Vec<String> {
    devices.iter().map(|device| device.name.clone()).collect()
}

#[test]
fn devices_are_read_with_ports_addresses_and_file() {
    let root = tempfile::tempdir().unwrap();
    plug(root.path(), "mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
    let found = devices(root.path());
    let [device] = found.as_slice() else { panic!("{found:?}") };
    let port = RdmaPort { number: 1, state: "ACTIVE".into(), link_layer: "Ethernet".into(), gids: 1 };
    assert_eq!((device.name.as_str(), &device.ports, &device.file), ("mlx5_0", &vec![port], &None));
    assert_eq!(device.ucx_names().collect::<Vec<_>>(), ["mlx5_0:1"]);
    write(root.path(), "dev/infiniband/uverbs0", "");
    assert_eq!(devices(root.path())[0].file.as_deref(), Some("/dev/infiniband/uverbs0"));
}

#[test]
fn the_file_of_a_software_device_is_found_by_class() {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n");
    write(root.path(), "sys/class/infiniband_verbs/uverbs3/ibdev", "rxe0\n");
    write(root.path(), "dev/infiniband/uverbs3", "");
    assert_eq!(devices(root.path())[0].file.as_deref(), Some("/dev/infiniband/uverbs3"));
}

#[test]
fn nearest_is_who_shares_the_longest_pci_path() {
    let root = tempfile::tempdir().unwrap();
    plug(root.path(), "mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
    plug(root.path(), "mlx5_1", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
    plug(root.path(), "mlx5_2", "pci0000:80/0000:80:01.0/0000:82:00.0", 2);
    put_gpu(root.path(), "pci0000:00/0000:00:01.0/0000:0a:00.0");
    put_gpu(root.path(), "pci0000:80/0000:80:01.0/0000:8a:00.0");
    put_gpu(root.path(), "pci0000:c0/0000:c0:01.0/0000:ca:00.0");
    let found = devices(root.path());
    let near = |gpu: &str| names(&nearest(root.path(), &found, gpu));
    // The driver writes capitals, the kernel does not.
    assert_eq!(near("0000:0A:00.0"), ["mlx5_0"]);
    assert_eq!(near("0000:8a:00.0"), ["mlx5_1", "mlx5_2"]);
    // None is nearer than another, or the GPU is not there.
    assert_eq!(near("0000:ca:00.0").len(), 3);
    assert_eq!(near("0000:ff:00.0").len(), 3);
}

#[test]
fn a_device_that_is_down_is_never_the_nearest() {
    let root = tempfile::tempdir().unwrap();
    plug(root.path(), "mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
    plug(root.path(), "mlx5_1", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
    put_gpu(root.path(), "pci0000:00/0000:00:01.0/0000:0a:00.0");
    write(root.path(), "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
    assert_eq!(names(&nearest(root.path(), &devices(root.path()), "0000:0a:00.0")), ["mlx5_1"]);
}

#[test]
fn little_lockable_memory_is_enough_with_ipc_lock() {
    let status = |capabilities: &str| format!("Name:\tweightsync\nCapInh:\t0000000000004000\nCapEff:\t{capabilities}\n");
    let (none, ipc_lock) = (status("00000000a80425fb"), status("00000000a80465fb"));
    assert_eq!(locks_too_little(Some(8 << 20), &none), Some(8 << 20));
    assert_eq!(locks_too_little(Some(8 << 20), &ipc_lock), None);
    assert_eq!((locks_too_little(None, &none), locks_too_little(Some(LOCKED), &none)), (None, None));
}

#[test]
fn device_without_file_or_active_port_is_not_usable() {
    let root = tempfile::tempdir().unwrap();
    plug(root.path(), "mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
    plug(root.path(), "mlx5_1", "pci0000:00/0000:00:02.0/0000:02:00.0", 1);
    assert!(usable(root.path()).is_empty(), "the files are not mounted");
    write(root.path(), "dev/infiniband/uverbs0", "");
    write(root.path(), "dev/infiniband/uverbs1", "");
    assert_eq!(usable(root.path()), ["mlx5_0", "mlx5_1"]);
    write(root.path(), "sys/devices/pci0000:00/0000:00:02.0/0000:02:00.0/infiniband/mlx5_1/ports/1/state", "1: DOWN\n");
    assert_eq!(usable(root.path()), ["mlx5_0"]);
}
