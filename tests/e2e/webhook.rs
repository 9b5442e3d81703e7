//! Injection by the controller's webhook, as on a cluster without MutatingAdmissionPolicy: a second installation, for one namespace, which the
//! policies of the first one leave out. Its pods equal those of `kubectl weightsync inject`, which equal the policy's (`injection.rs`).

use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{ApiResource, DynamicObject, ListParams, LogParams, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::cluster::{Cluster, MINUTE, eventually};
use super::fixtures::{IMAGE, asker, simulated_vllm, torch_trainer, wrapped};
use super::injection::{ask, by_hand};
use super::operator::{chart, helm};

const RELEASE: &str = "weightsync-webhook";

/// Has the policies of the first installation leave this namespace out. It is deleted with the test, so nothing has to be undone.
async fn without_policies(cluster: &Cluster) {
    let kind = GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", "MutatingAdmissionPolicyBinding");
    let bindings: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &ApiResource::from_gvk(&kind));
    let others = json!([{"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [cluster.namespace]}]);
    let patch = json!({"spec": {"matchResources": {"namespaceSelector": {"matchExpressions": others}}}});
    for binding in ["weightsync-inject", "weightsync-wrap"] {
        bindings.patch(binding, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }
    eventually("the policies leave the namespace out", MINUTE, || async {
        let made = ask(cluster, &simulated_vllm("any")).await.map_err(|error| error.to_string())?;
        if init_containers(&made).is_empty() { Ok(()) } else { Err("injected".to_owned()) }
    })
    .await;
}

async fn installed(cluster: &Cluster) {
    let watched = format!("watchNamespaces={{{}}}", cluster.namespace);
    let chart = chart();
    let mut install = vec!["install", RELEASE, &chart, "--namespace", &cluster.namespace, "--wait", "--timeout", "120s"];
    for value in [
        "injection.method=Webhook",
        "injection.imagePullSecrets[0].name=registry",
        "image.repository=docker.io/local/weightsync",
        "image.tag=test",
        "image.pullPolicy=Never",
        "networkPolicy.controller.enabled=true",
        "crds.enabled=false",
        "aggregateRoles=false",
        watched.as_str(),
    ] {
        install.extend(["--set", value]);
    }
    helm(&install).await;
}

fn init_containers(pod: &Pod) -> Vec<&str> {
    let containers = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    containers.map(|container| container.name.as_str()).collect()
}

/// Waits until the API server trusts the webhook: the controllers serve what helm made.
async fn await_webhook(cluster: &Cluster) {
    eventually("the webhook adds the sidecar", MINUTE, || async {
        let made = ask(cluster, &simulated_vllm("any")).await.map_err(|error| error.to_string())?;
        if init_containers(&made) == ["weightsync-agent"] { Ok(()) } else { Err(format!("{:?}", init_containers(&made))) }
    })
    .await;
}

async fn injected(cluster: &Cluster) {
    await_webhook(cluster).await;

    // Equal to what the plugin writes for this installation.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.crt");
    let authority = cluster.api::<ConfigMap>().get(&format!("{RELEASE}-ca")).await.unwrap().data.unwrap()["ca.crt"].clone();
    std::fs::write(&file, authority).unwrap();
    let url = format!("https://{RELEASE}.{}.svc:8443", cluster.namespace);
    let of_release = ["--image", IMAGE, "--controller-url", &url, "--ca-file", file.to_str().unwrap(), "--image-pull-secret", "registry"];
    let mut with_key = simulated_vllm("with-key");
    with_key["metadata"]["annotations"] = json!({"weightsync.dev/api-key-secret": "engine/key", "weightsync.dev/trainer-uids": "1000"});
    with_key["spec"]["imagePullSecrets"] = json!([{"name": "own"}]);
    let mut own_memory = wrapped(simulated_vllm("without-memory"));
    own_memory["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "host", "mountPath": "/host", "readOnly": true}]);
    for pod in [torch_trainer("trainer"), with_key, wrapped(torch_trainer("wrapped")), own_memory] {
        let name = &pod["metadata"]["name"];
        let (by_webhook, hand) = (ask(cluster, &pod).await.unwrap(), ask(cluster, &by_hand(&pod, &of_release).await).await.unwrap());
        assert!(!init_containers(&by_webhook).is_empty(), "{name}: an agent is added");
        assert_eq!(serde_json::to_value(by_webhook.spec).unwrap(), serde_json::to_value(hand.spec).unwrap(), "{name}");
    }

    // Pods that are really made, and one that does not take part.
    assert_eq!(init_containers(&cluster.create_pod(simulated_vllm("sidecar")).await), ["weightsync-agent"]);
    assert_eq!(init_containers(&cluster.create_pod(wrapped(simulated_vllm("wrapped"))).await), ["weightsync-program"]);
    let untouched = serde_json::to_value(cluster.create_pod(asker("http://127.0.0.1:1")).await.spec).unwrap();
    assert!(!untouched.to_string().contains("weightsync-agent") && untouched.get("imagePullSecrets").is_none(), "{untouched}");

    let mut in_image = wrapped(simulated_vllm("in-image"));
    in_image["spec"]["containers"][0].as_object_mut().unwrap().remove("command");
    let refused = ask(cluster, &in_image).await.expect_err("it is refused").to_string();
    for part in ["inject.weightsync.dev", "container engine cannot be wrapped", "command: [vllm, serve]"] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
}

/// The account of the controllers reads the configuration and changes none: asked of the API server, and tried.
async fn account_changes_no_configuration(cluster: &Cluster) {
    let reviews: Api<SubjectAccessReview> = Api::all(cluster.client.clone());
    let user = format!("system:serviceaccount:{}:{RELEASE}", cluster.namespace);
    for (verb, allowed) in [("get", true), ("patch", false), ("update", false), ("delete", false), ("create", false)] {
        let attributes = json!({"group": "admissionregistration.k8s.io", "resource": "mutatingwebhookconfigurations",
            "name": format!("{RELEASE}-inject"), "verb": verb});
        let review = json!({"metadata": {}, "spec": {"user": user, "resourceAttributes": attributes}});
        let review: SubjectAccessReview = serde_json::from_value(review).unwrap();
        let answer = reviews.create(&PostParams::default(), &review).await.unwrap();
        assert_eq!(answer.status.unwrap().allowed, allowed, "{verb}");
    }
}

/// Another client may remove the certificate. The controllers report it, write nothing, and an upgrade brings the same one back.
async fn certificate_is_brought_back_by_an_upgrade(cluster: &Cluster) {
    let configurations: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
    let name = format!("{RELEASE}-inject");
    let bundle = || async {
        let found: Value = serde_json::to_value(configurations.get(&name).await.unwrap()).unwrap();
        found["webhooks"][0]["clientConfig"]["caBundle"].clone()
    };
    let before = bundle().await;
    assert!(before.is_string(), "{before}");
    let without = json!({"webhooks": [{"name": "inject.weightsync.dev", "clientConfig": {"caBundle": null}}]});
    configurations.patch(&name, &PatchParams::default(), &Patch::Strategic(without)).await.unwrap();
    let controllers = ListParams::default().labels(&format!("app.kubernetes.io/instance={RELEASE}"));
    eventually("the controller reports it", MINUTE, || async {
        let pods = cluster.api::<Pod>().list(&controllers).await.map_err(|error| error.to_string())?;
        let pod = pods.items.first().ok_or("no controller")?.name_any();
        let log = cluster.api::<Pod>().logs(&pod, &LogParams::default()).await.map_err(|error| error.to_string())?;
        if log.contains("has no caBundle: run helm upgrade") { Ok(()) } else { Err("it is not in the log".to_owned()) }
    })
    .await;
    assert!(bundle().await.is_null(), "nothing writes it but helm");
    let chart = chart();
    helm(&["upgrade", RELEASE, &chart, "--namespace", &cluster.namespace, "--reuse-values", "--wait", "--timeout", "120s"]).await;
    assert_eq!(bundle().await, before, "the Secret was found, and kept");
    await_webhook(cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn webhook_injects_pods_where_no_policy_does() {
    Cluster::run("webhook", |cluster| async move {
        without_policies(&cluster).await;
        let namespace = cluster.namespace.clone();
        let outcome = tokio::spawn(async move {
            installed(&cluster).await;
            injected(&cluster).await;
            account_changes_no_configuration(&cluster).await;
            certificate_is_brought_back_by_an_upgrade(&cluster).await;
        })
        .await;
        // What it made for the whole cluster would prevent the next run.
        helm(&["uninstall", RELEASE, "--namespace", &namespace, "--ignore-not-found", "--wait", "--timeout", "60s"]).await;
        if let Err(error) = outcome {
            std::panic::resume_unwind(error.into_panic());
        }
    })
    .await;
}
