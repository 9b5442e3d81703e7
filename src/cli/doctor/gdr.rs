//! The requirements of reads through NIXL (transport `GDR`) on this machine: each with what was found and what to change.
//!
//! Decides from facts alone. A machine without an RDMA device is not an error, except with `--require gdr`, which sets the exit code.

use std::path::Path;

use serde::Serialize;

use super::advice::{Advice, Way};
use super::found::{Found, Gpus};
use super::host::Host;
use weightsync_agent::rdma::{LOCKED, Rdma, nearest};
use weightsync_core::plan::show_bytes;
use weightsync_core::protocol::worker::FabricFacts;

/// One thing that the transport needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    /// The checked item.
    pub about: String,
    /// What was found.
    pub found: String,
    /// What to change; none where all is well.
    pub change: Option<String>,
    /// Whether the transport cannot be used before it is changed.
    pub needed: bool,
}

impl Check {
    fn good(about: impl Into<String>, found: impl Into<String>) -> Self {
        Self { about: about.into(), found: found.into(), change: None, needed: false }
    }

    fn lacks(about: &str, found: impl Into<String>, change: impl Into<String>) -> Self {
        Self { about: about.into(), found: found.into(), change: Some(change.into()), needed: true }
    }

    /// Slower without it, and usable.
    fn slower(about: &str, found: impl Into<String>, change: impl Into<String>) -> Self {
        Self { needed: false, ..Self::lacks(about, found, change) }
    }
}

/// All of them. `root` is `/` but in tests.
pub fn checks(nixl: &Found<FabricFacts>, gpus: &Gpus, host: &Host, root: &Path) -> Vec<Check> {
    let mut checks = library(nixl, gpus);
    checks.extend(devices(&host.rdma));
    checks.push(locked(host));
    if !gpus.gpus.is_empty() {
        checks.push(gpu_memory(host));
    }
    if host.rdma.iter().any(Rdma::active) {
        checks.extend(gpus.gpus.iter().map(|gpu| {
            let near = nearest(root, &host.rdma, &gpu.bus);
            let names: Vec<String> = near.into_iter().flat_map(Rdma::ucx_names).collect();
            Check::good(format!("nearest to {}", gpu.uuid), names.join(", "))
        }));
    }
    checks
}

/// What the transport would use, by the checks.
pub fn advice(checks: &[Check]) -> Advice {
    let unusable = checks.iter().find(|check| check.needed).map(|check| format!("{}: {}", check.about, check.found));
    let slower = checks.iter().find(|check| check.change.is_some() && !check.needed);
    let not_better = slower.map(|check| format!("{}: {}", check.about, check.found));
    let uses = if slower.is_some() { "RDMA reads, through host memory" } else { "RDMA reads by NIXL" };
    let ways = vec![Way { between: "all members", uses: uses.into(), not_better }];
    Advice { transport: "gdr", ways: if unusable.is_some() { Vec::new() } else { ways }, unusable }
}

fn library(nixl: &Found<FabricFacts>, gpus: &Gpus) -> Vec<Check> {
    let facts = match nixl.get() {
        Ok(facts) => facts,
        Err(why) => return vec![Check::lacks("NIXL", "it cannot be used", why)],
    };
    let version = facts.version.as_deref().unwrap_or("of unknown version");
    let mut checks = vec![
        Check::good("NIXL", format!("{version} in {}", facts.path)),
        Check::good("plugin", format!("{}, for {}", facts.plugin, facts.memory.join(" and "))),
    ];
    if let (Some(cuda), Some(gpu)) = (facts.cuda, gpus.gpus.first()) {
        let driver = gpu.driver / 1000;
        checks.push(if cuda == driver {
            Check::good("CUDA of NIXL", format!("{cuda}, as the driver's"))
        } else {
            let change = format!("install the Python package nixl-cu{driver}: this one may register no GPU memory");
            Check::slower("CUDA of NIXL", format!("{cuda}, the driver's is {driver}"), change)
        });
    }
    checks
}

fn devices(all: &[Rdma]) -> Vec<Check> {
    if all.is_empty() {
        let change = "mount one: an RDMA device plugin does, by a resource that the container requests; for a test without one set \
                      transport.allowTcp";
        return vec![Check::lacks("RDMA devices", "this process sees none", change)];
    }
    let listed = |devices: &[&Rdma]| devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", ");
    let active: Vec<&Rdma> = all.iter().filter(|device| device.active()).collect();
    if active.is_empty() {
        let found = format!("no port of {} is active", listed(&all.iter().collect::<Vec<_>>()));
        return vec![Check::lacks("RDMA devices", found, "bring a port up: `rdma link show` on the host says which are down")];
    }
    let ports = active.iter().flat_map(|device| {
        let ports = device.ports.iter().filter(|port| port.active());
        ports.map(|port| format!("{}:{} {} {}", device.name, port.number, port.link_layer, port.state))
    });
    let mut checks = vec![Check::good("RDMA devices", ports.collect::<Vec<_>>().join(", "))];
    let hidden: Vec<&Rdma> = active.iter().copied().filter(|device| device.file.is_none()).collect();
    checks.push(if hidden.is_empty() {
        let files: Vec<&str> = active.iter().filter_map(|device| device.file.as_deref()).collect();
        Check::good("device files", files.join(", "))
    } else {
        let change = "mount its file of /dev/infiniband into the container: an RDMA device plugin does";
        let found = format!("{} has none here", listed(&hidden));
        // Others may do.
        let check = Check::lacks("device files", found, change);
        Check { needed: hidden.len() == active.len(), ..check }
    });
    let roce = |device: &&Rdma| device.ports.iter().any(|port| port.active() && port.link_layer == "Ethernet" && port.gids == 0);
    let nameless: Vec<&Rdma> = active.iter().copied().filter(roce).collect();
    if !nameless.is_empty() {
        let found = format!("the GID table of {} is empty", listed(&nameless));
        let change = "put its network interface, with an IP address, into this network namespace: RoCE sends from such an address";
        let check = Check::lacks("RoCE addresses", found, change);
        checks.push(Check { needed: nameless.len() == active.len(), ..check });
    }
    checks
}

fn locked(host: &Host) -> Check {
    let about = "locked memory";
    match host.limits.locks_too_little {
        None => Check::good(about, host.limits.locked_bytes.map_or_else(|| "unlimited".to_owned(), |_| "allowed".to_owned())),
        Some(limit) => {
            let (limit, needed) = (show_bytes(limit), show_bytes(LOCKED));
            let found = format!("{limit} may be locked, and each device needs {needed} and the slots");
            let check = Check::lacks(about, found, "raise the limit (ulimit -l unlimited), or add the capability IPC_LOCK");
            // Nothing is locked where there is no device.
            Check { needed: host.rdma.iter().any(Rdma::active), ..check }
        }
    }
}

fn gpu_memory(host: &Host) -> Check {
    let about = "GPU memory by RDMA";
    if host.peermem {
        return Check::good(about, "nvidia_peermem is loaded");
    }
    if host.open_module {
        return Check::good(about, "as dma-buf, by the open kernel module (Linux 5.12 or newer)");
    }
    let change = "load nvidia_peermem on the node (modprobe nvidia_peermem), or use the open kernel module, which shares it as dma-buf";
    Check::slower(about, "neither nvidia_peermem nor the open kernel module is loaded", change)
}
