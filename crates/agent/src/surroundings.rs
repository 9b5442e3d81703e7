//! What an agent can see of GPUs and of the process next to it: device files, shared memory, namespaces, and the variables that steer CUDA.
//!
//! Reads the kernel's files and decides nothing: [`sharing`](weightsync_core::plan::sharing) does. Of another process's environment it takes the few
//! variables that it names, and never shows others.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use weightsync_core::plan::{Neighbour, ProcessView, SharingFacts};
use weightsync_core::protocol::worker::GpuFacts;

/// State `TCP_LISTEN` in `/proc/net/tcp`.
const LISTENING: &str = "0A";

/// The kernel's files, as this process sees them.
#[derive(Debug, Clone)]
pub struct Surroundings {
    root: PathBuf,
}

#[allow(missing_docs)]
impl Surroundings {
    pub fn of_this_process() -> Self {
        Self::at(Path::new("/"))
    }

    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Everything that the verdict needs. `gpus` is what a worker found, `neighbour` who is next to the agent.
    pub fn facts(&self, gpus: Result<Vec<GpuFacts>, String>, neighbour: Neighbour) -> SharingFacts {
        let devices = names(&self.root.join("dev"));
        let is_gpu = |name: &&String| name.strip_prefix("nvidia").is_some_and(|number| number.parse::<u32>().is_ok());
        SharingFacts {
            gpu_files: devices.iter().filter(is_gpu).cloned().collect(),
            control_file: devices.iter().any(|name| name == "nvidiactl"),
            shm_bytes: self.shm_bytes(),
            gpus,
            agent: self.own(),
            neighbour,
        }
    }

    pub fn own(&self) -> ProcessView {
        self.process("self").unwrap_or_default()
    }

    /// Who is next to an agent that started its command itself.
    pub fn child(&self) -> Neighbour {
        Neighbour::Child(self.own())
    }

    /// Another process, by its number here (a socket's peer credentials say it). A number of 0 is a process that this namespace cannot see.
    pub fn peer(&self, pid: i32) -> Neighbour {
        match pid {
            0 => Neighbour::Hidden,
            pid => self.process(&pid.to_string()).map_or(Neighbour::Unknown, Neighbour::Seen),
        }
    }

    /// Anyone who listens on a TCP port of this network namespace.
    pub fn listener(&self, port: u16) -> Neighbour {
        let sockets = self.listening(port);
        if sockets.is_empty() {
            return Neighbour::Unknown;
        }
        let mut closed = false;
        for pid in names(&self.root.join("proc")).into_iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) {
            let descriptors = match fs::read_dir(self.root.join("proc").join(&pid).join("fd")) {
                Ok(descriptors) => descriptors,
                Err(error) => {
                    closed |= error.kind() == ErrorKind::PermissionDenied;
                    continue;
                }
            };
            let links = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
            if links.filter_map(|link| link.to_str().map(str::to_owned)).any(|link| sockets.contains(&link)) {
                return self.process(&pid).map_or(Neighbour::Unknown, Neighbour::Seen);
            }
        }
        // A process that does not let itself be looked at may be the one.
        if closed { Neighbour::Unknown } else { Neighbour::Hidden }
    }

    fn process(&self, pid: &str) -> Option<ProcessView> {
        let folder = self.root.join("proc").join(pid);
        let namespace = fs::read_link(folder.join("ns/pid")).ok();
        let number = namespace.as_ref().and_then(|link| link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok());
        let environment = fs::read(folder.join("environ")).ok();
        if number.is_none() && environment.is_none() {
            return None;
        }
        let environment = environment.unwrap_or_default();
        let variable = |name: &str| {
            let value = environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
            Some(String::from_utf8_lossy(value).into_owned())
        };
        Some(ProcessView {
            pid_namespace: number,
            nvidia_visible_devices: variable("NVIDIA_VISIBLE_DEVICES"),
            driver_capabilities: variable("NVIDIA_DRIVER_CAPABILITIES"),
            cuda_visible_devices: variable("CUDA_VISIBLE_DEVICES"),
            allocator: variable("PYTORCH_ALLOC_CONF").or_else(|| variable("PYTORCH_CUDA_ALLOC_CONF")),
        })
    }

    /// `socket:[INODE]` of everything that listens on the port (proc(5), proc_net_tcp.rst: the address is the second field, the state the
    /// fourth, the inode the tenth).
    fn listening(&self, port: u16) -> BTreeSet<String> {
        let wanted = format!(":{port:04X}");
        let texts = ["tcp", "tcp6"].map(|name| fs::read_to_string(self.root.join("proc/net").join(name)).unwrap_or_default());
        let socket = |line: &str| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (address, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
            (address.ends_with(&wanted) && *state == LISTENING).then(|| format!("socket:[{inode}]"))
        };
        texts.iter().flat_map(|text| text.lines().skip(1)).filter_map(socket).collect()
    }

    fn shm_bytes(&self) -> Option<u64> {
        let found = rustix::fs::statvfs(self.root.join("dev/shm")).ok()?;
        Some(found.f_blocks.saturating_mul(found.f_frsize))
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}
