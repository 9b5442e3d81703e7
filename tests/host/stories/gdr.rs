//! Reads through NIXL where something is missing. The other stories run over `gdr` too: `make gdr-test`.

use std::path::Path;

use serde_json::json;

use crate::world::{Actor, World};

/// F78, F83: TCP instead of the fast path, silently; UCX without InfiniBand.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a host without an RDMA device: make gdr-test"]
async fn gdr_without_an_rdma_device_is_refused_with_what_to_change() {
    let devices = Path::new("/sys/class/infiniband").read_dir().into_iter().flatten().count();
    assert_eq!(devices, 0, "this host has an RDMA device");
    let mut world = World::start_over(json!({"type": "GDR"}), [Actor::new()]).await;
    let message = world.reported("TransportUnavailable", "actor-0").await;
    assert!(message.contains("no RDMA device") && message.contains("transport.allowTcp"), "{message}");
}
