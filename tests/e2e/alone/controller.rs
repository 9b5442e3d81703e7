//! A controller that is away or is replaced. Simulated engines.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::json;

use crate::asks::{between_20_and_80_percent, deliver, faults, publish, served};
use crate::cluster::{Cluster, MINUTE, START};
use crate::faults::group;
use crate::operator::{controllers, operator, scale_controller};

#[tokio::test(flavor = "multi_thread")]
async fn restarted_engine_is_unready_until_fed_without_controller() {
    Cluster::run_alone("engine-restart", |cluster| async move {
        group(&cluster, 2).await;
        let expected = served(&cluster, "sim-0").await;
        scale_controller(&cluster, 0).await;
        let crash = json!({"rules": [{"path": "/health", "times": 1, "fault": {"kind": "crash"}}]});
        faults(&cluster, "sim-1", &crash).await;
        cluster.await_not_ready("sim-1", MINUTE).await;
        // Fed by the source, which needs no controller.
        cluster.await_ready("sim-1", START).await;
        assert_eq!(served(&cluster, "sim-1").await, expected);
        scale_controller(&cluster, 1).await;
        cluster.await_version("run", 1, 2, START).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn update_ends_while_controller_restarts_in_one_epoch() {
    Cluster::run_alone("controller-kill", |cluster| async move {
        group(&cluster, 2).await;
        let epoch = cluster.status("run").await["epoch"].clone();
        let update = async { publish(&cluster, "trainer-0", 2, 0.2).await };
        let kill = async {
            between_20_and_80_percent(&cluster, "sim-0").await;
            let pods = operator(&cluster).api::<Pod>();
            for pod in controllers(&cluster).await {
                pods.delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await.unwrap();
            }
        };
        let ((status, answer), ()) = tokio::join!(update, kill);
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["installed"].as_array().map(Vec::len), Some(2), "{answer}");
        deliver(&cluster, 3, &["sim-0", "sim-1"]).await;
        let status = cluster.await_version("run", 3, 2, START).await;
        assert_eq!(status["epoch"], epoch, "the new controller disturbed nothing");
    })
    .await;
}
