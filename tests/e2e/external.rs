//! Pods whose own command starts the agent: `weightsync run -- COMMAND`, without sidecar or ephemeral container.

use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::{Value, json};

use super::asks::deliver;
use super::cluster::{Cluster, MINUTE, START};
use super::fixtures::{STATUS_PORT, simulated_vllm, trainer, weightsync};
use super::operator::operator;

/// A simulated engine under `weightsync run`, as docs/examples/external.yaml says it.
async fn engine_with_agent(cluster: &Cluster, name: &str) -> Value {
    let ca = operator(cluster).api::<ConfigMap>().get("weightsync-ca").await.unwrap().data.unwrap()["ca.crt"].clone();
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let mut pod = simulated_vllm(name);
    pod["metadata"]["annotations"] = json!({"weightsync.dev/inject": "false"});
    let token = json!({"serviceAccountToken": {"audience": "weightsync.dev", "expirationSeconds": 3600, "path": "token"}});
    pod["spec"]["volumes"].as_array_mut().unwrap().push(json!({"name": "token", "projected": {"sources": [token]}}));
    let container = &mut pod["spec"]["containers"][0];
    let engine = container["command"].as_array().unwrap().clone();
    container["command"] = json!(["/weightsync", "run", "--"]);
    container["command"].as_array_mut().unwrap().extend(engine);
    container["volumeMounts"].as_array_mut().unwrap().push(json!({"name": "token", "mountPath": "/var/run/weightsync", "readOnly": true}));
    container["readinessProbe"] = json!({"httpGet": {"path": "/readyz", "port": STATUS_PORT}, "periodSeconds": 1});
    container["env"] = json!([
        field("POD_NAME", "metadata.name"),
        field("POD_NAMESPACE", "metadata.namespace"),
        field("POD_UID", "metadata.uid"),
        field("POD_IP", "status.podIP"),
        {"name": "WEIGHTSYNC_ROLE", "value": "rollout"},
        {"name": "WEIGHTSYNC_CONTROLLER_URL", "value": "https://weightsync.weightsync-system.svc:8443"},
        {"name": "WEIGHTSYNC_CONTROLLER_CA", "value": ca}
    ]);
    pod
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_own_command_starts_the_agent_takes_part() {
    Cluster::run("external", |cluster| async move {
        cluster.create_pod(trainer("trainer-0")).await;
        cluster.create_pod(engine_with_agent(&cluster, "sim-own").await).await;
        cluster.create_pod(simulated_vllm("sim-side")).await;
        let mut object = weightsync("run");
        object["spec"]["agent"] = json!({"launch": "External"});
        cluster.apply(&object).await.unwrap();
        cluster.await_ready("trainer-0", START).await;
        cluster.await_group("run", 2, START).await;
        deliver(&cluster, 1, &["sim-own", "sim-side"]).await;
        cluster.await_ready("sim-own", MINUTE).await;
    })
    .await;
}
