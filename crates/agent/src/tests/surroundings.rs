//! What is read of the kernel's files, from made-up ones and from the real ones of this process.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::surroundings::Surroundings;
use weightsync_core::plan::{Neighbour, sharing};

const HEAD: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

fn process(root: &Path, pid: &str, namespace: u64, environment: &str, socket: Option<u64>) {
    let folder = root.join("proc").join(pid);
    fs::create_dir_all(folder.join("ns")).unwrap();
    fs::create_dir_all(folder.join("fd")).unwrap();
    symlink(format!("pid:[{namespace}]"), folder.join("ns/pid")).unwrap();
    fs::write(folder.join("environ"), environment).unwrap();
    if let Some(inode) = socket {
        symlink(format!("socket:[{inode}]"), folder.join("fd/3")).unwrap();
    }
}

/// A container whose network has a listener on port 8000 (socket 77), and a connection from it.
fn container(root: &Path) {
    fs::create_dir_all(root.join("proc/net")).unwrap();
    fs::create_dir_all(root.join("dev/shm")).unwrap();
    let listens = "   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 77 1 0 100 0 0 10 0\n";
    let talks = "   1: 0100007F:1F41 0100007F:1F40 01 00000000:00000000 00:00000000 00000000     0        0 78 1 0 20 4 30 10 -1\n";
    fs::write(root.join("proc/net/tcp"), format!("{HEAD}{listens}{talks}")).unwrap();
    process(root, "self", 4, "A=B\0NVIDIA_VISIBLE_DEVICES=void\0", None);
}

#[test]
fn process_of_a_port_is_found_by_its_socket() {
    let root = tempfile::tempdir().unwrap();
    container(root.path());
    let here = Surroundings::at(root.path());
    assert_eq!(here.listener(8000), Neighbour::Hidden, "no one here has the socket");
    assert_eq!(here.listener(8001), Neighbour::Unknown, "a connection is no listener");
    assert_eq!(here.listener(9), Neighbour::Unknown);
    process(root.path(), "12", 4, "PYTORCH_CUDA_ALLOC_CONF=x\0CUDA_VISIBLE_DEVICES=GPU-1\0API_KEY=secret\0", Some(77));
    let Neighbour::Seen(engine) = here.listener(8000) else { panic!("not seen") };
    assert_eq!((engine.pid_namespace, engine.cuda_visible_devices.as_deref()), (Some(4), Some("GPU-1")));
    assert_eq!(engine.allocator.as_deref(), Some("x"));
    assert!(!format!("{engine:?}").contains("secret"), "only what is named is read");
    assert_eq!(here.peer(12), Neighbour::Seen(engine));
    assert_eq!((here.peer(0), here.peer(13)), (Neighbour::Hidden, Neighbour::Unknown));
}

#[test]
fn devices_and_variables_of_the_container_are_read() {
    let root = tempfile::tempdir().unwrap();
    container(root.path());
    let here = Surroundings::at(root.path());
    let facts = here.facts(Ok(Vec::new()), here.child());
    assert_eq!((facts.gpu_files.len(), facts.control_file), (0, false));
    assert!(facts.shm_bytes.is_some());
    let reason = sharing(&facts).gpus.unwrap_err().to_string();
    assert!(reason.contains("NVIDIA_VISIBLE_DEVICES is \"void\""), "{reason}");
    for name in ["nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"] {
        fs::write(root.path().join("dev").join(name), "").unwrap();
    }
    let facts = here.facts(Ok(Vec::new()), here.child());
    assert_eq!((facts.gpu_files, facts.control_file), (vec!["nvidia0".to_owned(), "nvidia11".to_owned()], true));
}

#[test]
fn the_real_files_of_this_process_are_understood() {
    let here = Surroundings::of_this_process();
    assert!(here.own().pid_namespace.is_some());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let Neighbour::Seen(found) = here.listener(listener.local_addr().unwrap().port()) else { panic!("this process listens") };
    assert_eq!(found.pid_namespace, here.own().pid_namespace);
}
