//! Which transports and devices UCX may use, by an object and by what the host has. Decides nothing about groups.

use std::path::Path;

use crate::rdma::{self, DEVICES};
use weightsync_core::protocol::worker::UcxSettings;
use weightsync_core::protocol::{TransportPolicy, TransportWish};

/// What UCX may use between hosts and between GPUs of one host.
const RDMA: [&str; 6] = ["rc", "dc", "ud", "cuda_copy", "cuda_ipc", "self"];

/// What UCX may use by an object that can have reads through NIXL; none where it cannot. `devices` as in [`FabricSettings`].
pub(crate) fn wanted(policy: &TransportPolicy, devices: &[String]) -> Option<UcxSettings> {
    let wanted = match policy.wish {
        TransportWish::Gdr => true,
        TransportWish::Auto => has_rdma_device(),
        TransportWish::Tcp | TransportWish::Nccl => false,
    };
    let tls = RDMA.into_iter().chain(policy.allow_tcp.then_some("tcp")).map(str::to_owned).collect();
    wanted.then(|| UcxSettings { tls, devices: devices.to_vec() })
}

/// The settings of a worker on that GPU: where no devices were chosen, the nearest of several active ones. With TCP in the list all stay, since a list
/// of devices names the interfaces of TCP too. `root` is `/` but in tests.
pub(crate) fn near(ucx: &UcxSettings, gpu: &str, root: &Path) -> UcxSettings {
    let mut ucx = ucx.clone();
    if !ucx.devices.is_empty() || ucx.tls.iter().any(|name| name == "tcp") {
        return ucx;
    }
    let all = rdma::devices(root);
    let near = rdma::gpu_address(root, gpu).map(|address| rdma::nearest(root, &all, &address)).unwrap_or_default();
    if near.len() < all.iter().filter(|device| device.active()).count() {
        ucx.devices = near.into_iter().flat_map(rdma::Rdma::ucx_names).collect();
    }
    ucx
}

pub(super) fn has_rdma_device() -> bool {
    std::fs::read_dir(DEVICES).is_ok_and(|mut devices| devices.next().is_some_and(|device| device.is_ok()))
}
