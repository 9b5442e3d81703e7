//! What the chart's admission policies say, of the controller's own acts and of pods: each rule evaluated as the rendered chart has it.

use k8s_openapi::api::core::v1::Pod;
use kube::core::cel::{VapEvaluator, VapExpression};
use serde_json::{Value, json};

use super::fixtures::pod;
use crate::api::SecretKey;
use crate::controller::ephemeral::{Recipe, container};

/// Messages of the rules of a policy that refuse a change of a pod.
fn refusals(policy: &str, subresource: &str, before: &Value, after: &Value) -> Vec<String> {
    let text = include_str!("../../../deploy/install.yaml");
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    let is_it = |one: &&Value| one["kind"] == "ValidatingAdmissionPolicy" && one["metadata"]["name"] == policy;
    let spec = &documents.iter().find(is_it).unwrap_or_else(|| panic!("no policy {policy}"))["spec"];
    let word = |value: &Value, field: &str| value[field].as_str().unwrap_or_default().to_owned();
    let variables: Vec<(String, String)> =
        spec["variables"].as_array().into_iter().flatten().map(|one| (word(one, "name"), word(one, "expression"))).collect();
    let evaluator = VapEvaluator::builder().object(after.clone()).old_object(before.clone()).build();
    let rules = spec["validations"].as_array().unwrap().iter();
    // Rules with optional fields cannot be evaluated here; those have end-to-end tests.
    let rules = rules.map(|rule| {
        let mut expression = word(rule, "expression").replace("request.subResource", &format!("'{subresource}'"));
        // The longer name first: one may begin with another. A variable may use those before it.
        let mut known: Vec<_> = variables.iter().rev().collect();
        known.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        for _ in 0..known.len() {
            for (name, value) in &known {
                expression = expression.replace(&format!("variables.{name}"), &format!("({value})"));
            }
        }
        // This evaluator renames keys as names of fields are renamed; the API server does not.
        for name in ["weightsync.dev/role", "weightsync.dev/api-key-secret"] {
            let renamed = name.replace('.', "__dot__").replace('-', "__dash__").replace('/', "__slash__");
            expression = expression.replace(&format!("'{name}'"), &format!("'{renamed}'"));
        }
        VapExpression { expression, message: Some(word(rule, "message")), message_expression: None }
    });
    let rules: Vec<VapExpression> = rules.filter(|rule| !rule.expression.contains(".?")).collect();
    assert!(!rules.is_empty());
    let results = evaluator.evaluate(&rules);
    results.into_iter().filter(|result| !result.passed).map(|result| result.message.unwrap_or_default()).collect()
}

fn target() -> Pod {
    pod("actor-0", |pod| {
        pod["metadata"]["annotations"] = json!({"weightsync.dev/api-key-secret": "keys/vllm"});
        pod["spec"]["containers"][0]["volumeMounts"] =
            json!([{"name": "shm", "mountPath": "/dev/shm"}, {"name": "data", "mountPath": "/data"}]);
        pod["spec"]["containers"][0]["securityContext"] =
            json!({"capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}});
        pod["status"]["containerStatuses"][0]["user"] = json!({"linux": {"uid": 1000, "gid": 2000, "supplementalGroups": []}});
    })
}

fn made() -> (Value, Value) {
    let target = target();
    let key = SecretKey { name: "keys".into(), key: "vllm".into() };
    let recipe = Recipe {
        name: "weightsync-agent-1".into(),
        target: "engine",
        image: "ghcr.io/weightsync/weightsync:0.1.0",
        pull_policy: "IfNotPresent",
        role: "rollout",
        controller_url: "https://weightsync.weightsync-system.svc:8443",
        controller_ca: "PEM",
        token: "once".into(),
        api_key: Some(&key),
    };
    let agent = serde_json::to_value(container(&target, recipe)).unwrap();
    (serde_json::to_value(&target).unwrap(), agent)
}

/// Refusals of the pod with an agent that was changed like this.
fn of_agent(change: impl FnOnce(&mut Value)) -> Vec<String> {
    let (before, mut agent) = made();
    change(&mut agent);
    let mut after = before.clone();
    after["spec"]["ephemeralContainers"] = json!([agent]);
    refusals("weightsync-fence", "ephemeralcontainers", &before, &after)
}

#[test]
fn fence_admits_the_agent_that_the_controller_makes() {
    assert_eq!(of_agent(|_| {}), Vec::<String>::new());
    let without_key = |agent: &mut Value| {
        agent["env"].as_array_mut().unwrap().retain(|entry| entry["name"] != "WEIGHTSYNC_ENGINE_API_KEY");
    };
    assert_eq!(of_agent(without_key), Vec::<String>::new());
}

#[test]
fn fence_refuses_an_agent_that_differs_in_any_field() {
    type Change = Box<dyn Fn(&mut Value)>;
    let set = |pointer: &'static str, value: Value| -> Change {
        Box::new(move |agent| {
            let (parent, field) = pointer.rsplit_once('/').unwrap();
            agent.pointer_mut(parent).unwrap()[field] = value.clone();
        })
    };
    let env = |entry: Value| -> Change { Box::new(move |agent| agent["env"].as_array_mut().unwrap().push(entry.clone())) };
    let secret = |name: &str, key: &str| json!({"secretKeyRef": {"name": name, "key": key}});
    let changes: Vec<(&str, Change, &str)> = vec![
        ("a shell", set("/command", json!(["/weightsync", "run", "--", "/proc/1/root/bin/sh"])), "nothing but its agent"),
        ("arguments", set("/args", json!(["--token-file", "/proc/1/environ"])), "nothing but its agent"),
        ("the image's own command", Box::new(|agent| _ = agent.as_object_mut().unwrap().remove("command")), "nothing but its agent"),
        ("all of a Secret", set("/envFrom", json!([{"secretRef": {"name": "any"}}])), "nothing but its agent"),
        ("a terminal", set("/stdin", json!(true)), "nothing but its agent"),
        ("an image", set("/image", json!("evil:1")), "its own image"),
        ("a name", set("/name", json!("weightsync-agent-x")), "weightsync-agent-N"),
        ("no target", set("/targetContainerName", json!("other")), "next to a container"),
        ("a variable", env(json!({"name": "LD_PRELOAD", "value": "/data/evil.so"})), "its own variables"),
        ("another Secret", env(json!({"name": "WEIGHTSYNC_ENGINE_API_KEY", "valueFrom": secret("prod", "password")})), "its own variables"),
        ("a Secret under another name", env(json!({"name": "WEIGHTSYNC_TOKEN", "valueFrom": secret("keys", "vllm")})), "its own variables"),
        (
            "a ConfigMap",
            env(json!({"name": "WEIGHTSYNC_TOKEN", "valueFrom": {"configMapKeyRef": {"name": "any", "key": "k"}}})),
            "its own variables",
        ),
        ("another volume", set("/volumeMounts", json!([{"name": "data", "mountPath": "/data"}])), "shared memory"),
        ("another volume as shared memory", set("/volumeMounts", json!([{"name": "data", "mountPath": "/dev/shm"}])), "shared memory"),
        ("root", set("/securityContext/runAsUser", json!(0)), "the user of its target"),
        ("root's group", set("/securityContext/runAsGroup", json!(0)), "the group of its target"),
        ("a capability", set("/securityContext/capabilities", json!({"add": ["SYS_ADMIN"], "drop": ["ALL"]})), "the capabilities"),
        ("capabilities that its target dropped", set("/securityContext/capabilities", json!({"add": ["IPC_LOCK"]})), "the capabilities"),
        ("privilege", set("/securityContext/privileged", json!(true)), "no privileged"),
        ("escalation", set("/securityContext/allowPrivilegeEscalation", json!(true)), "no privileged"),
        (
            "escalation by default",
            Box::new(|agent| _ = agent["securityContext"].as_object_mut().unwrap().remove("allowPrivilegeEscalation")),
            "no privileged",
        ),
        ("all of /proc", set("/securityContext/procMount", json!("Unmasked")), "no privileged"),
        ("no seccomp", set("/securityContext/seccompProfile", json!({"type": "Unconfined"})), "seccomp"),
        ("no context", Box::new(|agent| _ = agent.as_object_mut().unwrap().remove("securityContext")), "no privileged"),
    ];
    for (what, change, part) in changes {
        let refused = of_agent(change);
        assert!(refused.iter().any(|message| message.contains(part)), "{what}: {refused:?}");
    }
}

#[test]
fn fence_leaves_the_rest_of_a_pods_status_alone() {
    let before = made().0;
    let of_status = |change: &dyn Fn(&mut Value)| {
        let mut after = before.clone();
        change(&mut after);
        refusals("weightsync-fence", "status", &before, &after)
    };
    let gate = |pod: &mut Value| pod["status"]["conditions"] = json!([{"type": "weightsync.dev/ready", "status": "True"}]);
    assert_eq!(of_status(&gate), Vec::<String>::new());
    let refused: [(&str, Value); 7] = [
        ("phase", json!("Failed")),
        ("podIP", json!("10.0.0.1")),
        ("podIPs", json!([{"ip": "10.0.0.1"}])),
        ("containerStatuses", json!([])),
        ("initContainerStatuses", json!([{"name": "a"}])),
        ("ephemeralContainerStatuses", json!([{"name": "a"}])),
        ("resourceClaimStatuses", json!([{"name": "a"}])),
    ];
    for (field, value) in refused {
        let messages = of_status(&|pod| pod["status"][field] = value.clone());
        assert_eq!(messages, ["WeightSync leaves the rest of a pod's status alone"], "{field}");
    }
    let other = |pod: &mut Value| pod["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    assert_eq!(of_status(&other), ["WeightSync writes the condition weightsync.dev/ready only"]);
    let labels = |pod: &mut Value| pod["metadata"]["labels"]["weightsync.dev/role"] = json!("trainer");
    assert_eq!(of_status(&labels), ["WeightSync leaves a pod's labels, annotations and finalizers alone"]);
}

#[test]
fn pod_with_an_empty_ca_is_refused_until_there_is_one() {
    let of_ca = |list: &str, value: Option<&str>| {
        let mut pod = json!({"metadata": {"name": "a"}, "spec": {"containers": [{"name": "engine"}]}});
        let mut entry = json!({"name": "WEIGHTSYNC_CONTROLLER_CA"});
        if let Some(value) = value {
            entry["value"] = json!(value);
        }
        pod["spec"][list] = json!([{"name": "engine", "env": [{"name": "OTHER"}, entry]}]);
        refusals("weightsync-wrap", "", &Value::Null, &pod)
    };
    for list in ["containers", "initContainers"] {
        assert_eq!(of_ca(list, Some("-----BEGIN CERTIFICATE-----")), Vec::<String>::new());
        for empty in [Some(""), None] {
            assert!(of_ca(list, empty).iter().any(|message| message.contains("has not published its CA yet")), "{list} {empty:?}");
        }
    }
}
