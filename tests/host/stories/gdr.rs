//! Reads through NIXL where something is missing. The other stories run over `gdr` too: `make gdr-test`.

use std::path::Path;

use serde_json::json;

use crate::world::{Actor, World};

/// F78, F83: TCP instead of the fast path, silently; UCX without InfiniBand.
#[tokio::test(flavor = "multi_thread")]
async fn gdr_without_an_rdma_device_is_refused_with_what_to_change() {
    if Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut devices| devices.next().is_some()) {
        println!("not run: this host has an RDMA device");
        return;
    }
    let mut world = World::start_over(json!({"type": "GDR"}), [Actor::new()]).await;
    let message = world.reported("TransportUnavailable", "actor-0").await;
    assert!(message.contains("no RDMA device") && message.contains("transport.allowTcp"), "{message}");
}
