//! What the chart has sidecars request of device plugins.

use std::panic::AssertUnwindSafe;

use futures::FutureExt;
use serde_json::json;

use crate::cluster::{Cluster, MINUTE, eventually};
use crate::fixtures::simulated_vllm;
use crate::injection::would_be;
use crate::operator::{NAMESPACE, helm, upgrade};

#[tokio::test(flavor = "multi_thread")]
async fn sidecar_requests_resources_of_device_plugins() {
    Cluster::run_alone("injected-devices", |cluster| async move {
        upgrade(&["--set", r"injection.resources.limits.nvidia\.com/gpu=1,injection.resources.limits.rdma/hca=1"]).await;
        let asked = eventually("the policy of the upgrade holds", MINUTE, || async {
            let limits = would_be(&cluster, &simulated_vllm("any")).await["initContainers"][0]["resources"]["limits"].clone();
            if limits.is_null() { Err("no limits") } else { Ok(limits) }
        });
        // Other tests' pods are to be as before, whatever comes of this one.
        let asked = AssertUnwindSafe(asked).catch_unwind().await;
        helm(&["rollback", "weightsync", "--namespace", NAMESPACE, "--wait", "--timeout", "120s"]).await;
        eventually("the policy before it holds again", MINUTE, || async {
            let limits = would_be(&cluster, &simulated_vllm("any")).await["initContainers"][0]["resources"]["limits"].clone();
            if limits.is_null() { Ok(()) } else { Err(limits) }
        })
        .await;
        assert_eq!(asked.unwrap(), json!({"nvidia.com/gpu": "1", "rdma/hca": "1"}));
    })
    .await;
}
