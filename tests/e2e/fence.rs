//! The admission fence around the controller's own account: what a stolen account could try, tried as that account. Nothing is really made:
//! every request is a dry run, which admission judges like any other.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Config};
use serde_json::{Value, json};

use super::cluster::{Cluster, START};
use super::fixtures::simulated_vllm;
use super::operator::{NAMESPACE, operator};

/// A client that speaks as the controller's account.
async fn as_the_controller() -> Client {
    let mut config = Config::infer().await.expect("a kubeconfig");
    config.auth_info.impersonate = Some(format!("system:serviceaccount:{NAMESPACE}:weightsync"));
    config.auth_info.impersonate_groups = Some(vec!["system:serviceaccounts".into(), "system:authenticated".into()]);
    Client::try_from(config).unwrap()
}

/// The agent that the controller would add.
fn agent(image: &str) -> Value {
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    json!({
        "name": "weightsync-agent-1", "image": image, "imagePullPolicy": "Never", "command": ["/weightsync", "agent"],
        "targetContainerName": "engine",
        "env": [
            field("POD_NAME", "metadata.name"), field("POD_NAMESPACE", "metadata.namespace"),
            field("POD_UID", "metadata.uid"), field("POD_IP", "status.podIP"),
            {"name": "WEIGHTSYNC_ROLE", "value": "rollout"}, {"name": "WEIGHTSYNC_TOKEN", "value": "wst1-none"},
        ],
        "securityContext": {"allowPrivilegeEscalation": false},
    })
}

async fn add(pods: &Api<Pod>, pod: &str, agent: &Value) -> Result<Pod, kube::Error> {
    let dry = PatchParams { dry_run: true, ..PatchParams::default() };
    pods.patch_ephemeral_containers(pod, &dry, &Patch::Strategic(json!({"spec": {"ephemeralContainers": [agent]}}))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn account_of_the_controller_adds_its_agent_and_nothing_else() {
    Cluster::run("fence", |cluster| async move {
        cluster.create_pod(simulated_vllm("sim-0")).await;
        cluster
            .await_pod("sim-0", "it runs", START, |pod| {
                let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
                if phase.as_deref() == Some("Running") { Ok(()) } else { Err(format!("{phase:?}")) }
            })
            .await;
        let deployment = operator(&cluster).api::<Deployment>().get("weightsync").await.unwrap();
        let image = deployment.spec.unwrap().template.spec.unwrap().containers[0].image.clone().unwrap();
        let pods: Api<Pod> = Api::namespaced(as_the_controller().await, &cluster.namespace);
        add(&pods, "sim-0", &agent(&image)).await.expect("the agent itself is admitted");

        let with = |change: &dyn Fn(&mut Value)| {
            let mut agent = agent(&image);
            change(&mut agent);
            agent
        };
        let secret = json!({"name": "WEIGHTSYNC_ENGINE_API_KEY", "valueFrom": {"secretKeyRef": {"name": "any", "key": "k"}}});
        let tries: Vec<(&str, Value)> = vec![
            ("another image", with(&|agent| agent["image"] = json!("docker.io/library/busybox:1"))),
            ("another name", with(&|agent| agent["name"] = json!("debugger"))),
            ("a shell of the target", with(&|agent| agent["command"] = json!(["/weightsync", "run", "--", "/proc/1/root/bin/sh"]))),
            ("arguments", with(&|agent| agent["args"] = json!(["--help"]))),
            ("a preloaded library", with(&|agent| agent["env"][5] = json!({"name": "LD_PRELOAD", "value": "/dev/shm/evil.so"}))),
            ("a Secret that the pod does not name", with(&|agent| agent["env"][5] = secret.clone())),
            ("all of a Secret", with(&|agent| agent["envFrom"] = json!([{"secretRef": {"name": "any"}}]))),
            ("root", with(&|agent| agent["securityContext"]["runAsUser"] = json!(0))),
            ("a capability", with(&|agent| agent["securityContext"]["capabilities"] = json!({"add": ["SYS_ADMIN"]}))),
            ("privilege", with(&|agent| agent["securityContext"] = json!({"privileged": true}))),
            ("escalation by default", with(&|agent| agent["securityContext"] = json!({}))),
        ];
        for (what, agent) in tries {
            let refused = add(&pods, "sim-0", &agent).await.err().unwrap_or_else(|| panic!("{what} was admitted")).to_string();
            assert!(refused.contains("WeightSync "), "{what}: refused by another rule: {refused}");
        }

        let dry = PatchParams { dry_run: true, ..PatchParams::default() };
        for status in [
            json!({"phase": "Failed"}),
            json!({"podIPs": [{"ip": "10.9.9.9"}], "podIP": "10.9.9.9"}),
            json!({"conditions": [{"type": "Ready", "status": "False"}]}),
        ] {
            let patch = Patch::Merge(json!({"status": status}));
            let refused = pods.patch_status("sim-0", &dry, &patch).await.err().unwrap_or_else(|| panic!("{status} was admitted"));
            assert!(refused.to_string().contains("WeightSync "), "{status}: {refused}");
        }
        let gate = json!({"status": {"conditions": [{"type": "weightsync.dev/ready", "status": "True"}]}});
        pods.patch_status("sim-0", &dry, &Patch::Strategic(gate)).await.expect("the gate is admitted");
    })
    .await;
}
