//! An operator that is taken away: a second installation, for one namespace only, because what the first one injects into the pods of all
//! other tests is never made again (tests/e2e/prepare.sh says why).

use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use kube::api::{DeleteParams, ListParams};
use kube::{Api, Resource, ResourceExt};
use serde_json::json;

use super::standing::{all, with_more};
use crate::asks::{deliver, publish_to, served, train};
use crate::cluster::{Cluster, MINUTE, START, eventually};
use crate::fixtures::{simulated_vllm, trainer, weightsync, without_sidecar};
use crate::operator::{chart, helm, scale_controller};

const RELEASE: &str = "weightsync-second";
const PODS: [&str; 3] = ["trainer-0", "sim-0", "sim-1"];

async fn left<K>(cluster: &Cluster, found: &mut Vec<String>)
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let labelled = ListParams::default().labels(&format!("app.kubernetes.io/instance={RELEASE}"));
    let items = Api::<K>::all(cluster.client.clone()).list(&labelled).await.unwrap().items;
    found.extend(items.iter().map(|one| format!("{} {} {:?}", K::kind(&()), one.name_any(), one.finalizers())));
}

/// Everything that the second installation made and that is still there.
async fn left_behind(cluster: &Cluster) -> Vec<String> {
    let mut found = Vec::new();
    left::<Deployment>(cluster, &mut found).await;
    left::<Pod>(cluster, &mut found).await;
    left::<Service>(cluster, &mut found).await;
    left::<ServiceAccount>(cluster, &mut found).await;
    left::<Secret>(cluster, &mut found).await;
    left::<ConfigMap>(cluster, &mut found).await;
    left::<Role>(cluster, &mut found).await;
    left::<RoleBinding>(cluster, &mut found).await;
    left::<ClusterRole>(cluster, &mut found).await;
    left::<ClusterRoleBinding>(cluster, &mut found).await;
    left::<NetworkPolicy>(cluster, &mut found).await;
    left::<ValidatingAdmissionPolicy>(cluster, &mut found).await;
    left::<ValidatingAdmissionPolicyBinding>(cluster, &mut found).await;
    found
}

async fn uninstalled(cluster: &Cluster) {
    let watched = format!("watchNamespaces={{{}}}", cluster.namespace);
    let image = ["image.repository=docker.io/local/weightsync", "image.tag=test", "image.pullPolicy=Never"];
    let off = ["injection.enabled=false", "crds.enabled=false", "aggregateRoles=false", watched.as_str()];
    let policies = ["networkPolicy.controller.enabled=true", "networkPolicy.agents.enabled=true"];
    let chart = chart();
    let mut install = vec!["install", RELEASE, &chart, "--namespace", &cluster.namespace, "--wait", "--timeout", "120s"];
    for value in image.iter().chain(&off).chain(&policies) {
        install.extend(["--set", value]);
    }
    helm(&install).await;
    for pod in [trainer("trainer-0"), simulated_vllm("sim-0"), simulated_vllm("sim-1")] {
        // That of the first installation.
        let mut pod = without_sidecar(pod, 0);
        if pod["metadata"]["name"] != "trainer-0" {
            pod["spec"]["readinessGates"] = json!([{"conditionType": "weightsync.dev/ready"}]);
        }
        cluster.create_pod(pod).await;
    }
    let mut object = weightsync("run");
    object["spec"]["agent"] = json!({"launch": "Ephemeral"});
    cluster.apply(&object).await.unwrap();
    cluster.await_ready("trainer-0", START).await;
    cluster.await_group("run", 2, START).await;
    deliver(cluster, 1, &["sim-0", "sim-1"]).await;
    for pod in PODS {
        cluster.await_ready(pod, MINUTE).await;
    }
    let (before, weights) = (all(cluster, &PODS).await, served(cluster, "sim-0").await);

    helm(&["uninstall", RELEASE, "--namespace", &cluster.namespace, "--wait", "--timeout", "60s"]).await;
    eventually("nothing of the operator is left", MINUTE, || async {
        let left = left_behind(cluster).await;
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    // Pods serve on, and the agents that they have bring versions as before.
    assert_eq!(all(cluster, &PODS).await, before);
    assert_eq!(served(cluster, "sim-1").await, weights);
    train(cluster, "trainer-0").await;
    publish_to(cluster, "trainer-0", 2, 2).await;
    assert_eq!(all(cluster, &PODS).await, with_more(&before, 1));
    let now = served(cluster, "sim-0").await;
    assert_ne!(now, weights);
    assert_eq!(served(cluster, "sim-1").await, now);
    for pod in PODS {
        cluster.await_ready(pod, MINUTE).await;
    }
    // Object and pods can be deleted without anybody who would have to agree.
    cluster.delete_weightsync("run").await;
    for pod in PODS {
        cluster.api::<Pod>().delete(pod, &DeleteParams::default()).await.unwrap();
    }
    eventually("the pods are gone", START, || async {
        let pods = cluster.api::<Pod>().list(&ListParams::default()).await.map_err(|error| error.to_string())?.items;
        if pods.is_empty() { Ok(()) } else { Err(pods.iter().map(ResourceExt::name_any).collect::<Vec<_>>().join(", ")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uninstalled_operator_leaves_serving_pods_and_nothing_stuck() {
    Cluster::run_alone("uninstall", |cluster| async move {
        let cluster = std::sync::Arc::new(cluster);
        // The first installation looks at every namespace.
        scale_controller(&cluster, 0).await;
        let within = cluster.clone();
        let outcome = tokio::spawn(async move { uninstalled(&within).await }).await;
        if outcome.is_err() {
            cluster.tell_everything().await;
            helm(&["uninstall", RELEASE, "--namespace", &cluster.namespace, "--ignore-not-found", "--wait", "--timeout", "60s"]).await;
        }
        scale_controller(&cluster, 1).await;
        if let Err(error) = outcome {
            std::panic::resume_unwind(error.into_panic());
        }
    })
    .await;
}
