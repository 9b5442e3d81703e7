//! Injection by table: which documents change, what is added, what is refused.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{InjectError, Options, Resources, inject};

fn options() -> Options {
    Options {
        image: "weightsync:1".into(),
        image_pull_policy: "Never".into(),
        controller_url: "https://weightsync.ws.svc:8443".into(),
        controller_ca: "PEM".into(),
        resources: Resources { requests: amounts(&[("cpu", "100m"), ("memory", "64Mi")]), ..Resources::default() },
        shared_memory: None,
        image_pull_secrets: Vec::new(),
    }
}

fn amounts(of: &[(&str, &str)]) -> BTreeMap<String, String> {
    of.iter().map(|(name, amount)| ((*name).to_owned(), (*amount).to_owned())).collect()
}

#[test]
fn limits_and_the_size_of_shared_memory_are_written() {
    let limited = Options {
        resources: Resources { requests: amounts(&[("cpu", "1")]), limits: amounts(&[("memory", "8Gi")]) },
        shared_memory: Some("16Gi".into()),
        ..options()
    };
    let mut sidecar = rollout();
    inject(&mut sidecar, &limited).unwrap();
    let mut wrapped = rollout();
    wrapped["metadata"]["annotations"] = json!({"weightsync.dev/inject": "wrap"});
    wrapped["spec"]["containers"][0]["command"] = json!(["serve"]);
    inject(&mut wrapped, &limited).unwrap();
    for document in [sidecar, wrapped] {
        let ours = &document["spec"]["initContainers"][0];
        assert_eq!(ours["resources"], json!({"requests": {"cpu": "1"}, "limits": {"memory": "8Gi"}}));
        assert_eq!(document["spec"]["volumes"][0]["emptyDir"], json!({"medium": "Memory", "sizeLimit": "16Gi"}));
    }
}

/// What `restricted` of Pod Security Standards wants of a container whose pod has no context of its own.
fn is_restricted(container: &Value) -> bool {
    let context = &container["securityContext"];
    context["runAsNonRoot"] == true
        && context["allowPrivilegeEscalation"] == false
        && context["capabilities"] == json!({"drop": ["ALL"]})
        && context["seccompProfile"]["type"] == "RuntimeDefault"
        && context.get("runAsUser").is_none()
}

#[test]
fn added_containers_are_restricted_whatever_the_pod_says() {
    let contexts =
        [Value::Null, json!({}), json!({"runAsUser": 1000, "fsGroup": 1}), json!({"runAsNonRoot": true}), json!({"runAsUser": null})];
    for context in contexts {
        let mut sidecar = rollout();
        sidecar["spec"]["securityContext"] = context;
        let mut wrapped = sidecar.clone();
        wrapped["metadata"]["annotations"] = json!({"weightsync.dev/inject": "wrap"});
        wrapped["spec"]["containers"][0]["command"] = json!(["serve"]);
        for document in [&mut sidecar, &mut wrapped] {
            inject(document, &options()).unwrap();
            assert!(is_restricted(&document["spec"]["initContainers"][0]), "{document:#}");
        }
    }
}

#[test]
fn agent_of_a_pod_that_runs_as_root_runs_as_root() {
    let mut document = rollout();
    document["spec"]["securityContext"] = json!({"runAsUser": 0});
    inject(&mut document, &options()).unwrap();
    let context = &document["spec"]["initContainers"][0]["securityContext"];
    assert_eq!((&context["runAsNonRoot"], &context["capabilities"]), (&json!(false), &json!({"drop": ["ALL"]})));
}

#[test]
fn pull_secrets_are_added_to_those_of_the_pod() {
    let with = Options { image_pull_secrets: vec!["own".into(), "registry".into()], ..options() };
    let mut document = rollout();
    document["spec"]["imagePullSecrets"] = json!([{"name": "own"}]);
    inject(&mut document, &with).unwrap();
    assert_eq!(document["spec"]["imagePullSecrets"], json!([{"name": "own"}, {"name": "registry"}]));
    let mut without = rollout();
    inject(&mut without, &options()).unwrap();
    assert!(without["spec"].get("imagePullSecrets").is_none());
}

fn pod(labels: &Value, spec: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "labels": labels}, "spec": spec})
}

fn rollout() -> Value {
    pod(&json!({"weightsync.dev/role": "rollout"}), &json!({"containers": [{"name": "engine"}]}))
}

#[test]
fn a_pod_that_opts_in_gets_sidecar_token_and_shared_memory() {
    let mut document = rollout();
    assert_eq!(inject(&mut document, &options()).unwrap().templates, 1);
    let spec = &document["spec"];
    assert_eq!(spec["initContainers"][0]["name"], "weightsync-agent");
    assert_eq!(spec["initContainers"][0]["restartPolicy"], "Always");
    assert_eq!(spec["containers"][0]["volumeMounts"], json!([{"name": "weightsync-shm", "mountPath": "/dev/shm"}]));
    assert_eq!(spec["volumes"][0], json!({"name": "weightsync-shm", "emptyDir": {"medium": "Memory"}}));
    assert_eq!(spec["volumes"][1]["projected"]["sources"][0]["serviceAccountToken"]["audience"], "weightsync.dev");
}

#[test]
fn who_may_publish_is_everybody_of_the_pod_but_not_of_the_host() {
    let users = |document: &Value| {
        let env = document["spec"]["initContainers"][0]["env"].as_array().unwrap().clone();
        env.into_iter().find(|entry| entry["name"] == "WEIGHTSYNC_TRAINER_UIDS").unwrap()["value"].clone()
    };
    let mut document = rollout();
    inject(&mut document, &options()).unwrap();
    assert_eq!(users(&document), "any");
    let mut on_host = rollout();
    on_host["spec"]["hostNetwork"] = json!(true);
    inject(&mut on_host, &options()).unwrap();
    assert_eq!(users(&on_host), "");
    let mut named = rollout();
    named["metadata"]["annotations"] = json!({"weightsync.dev/trainer-uids": "1000,1001"});
    inject(&mut named, &options()).unwrap();
    assert_eq!(users(&named), "1000,1001");
}

#[test]
fn time_after_which_unclaimed_pods_serve_is_a_number() {
    let mut document = rollout();
    document["metadata"]["annotations"] = json!({"weightsync.dev/serve-unclaimed-after-seconds": "60"});
    let mut spoiled = document.clone();
    inject(&mut document, &options()).unwrap();
    let env = document["spec"]["initContainers"][0]["env"].as_array().unwrap();
    assert!(env.contains(&json!({"name": "WEIGHTSYNC_SERVE_UNCLAIMED_AFTER_SECONDS", "value": "60"})));
    spoiled["metadata"]["annotations"]["weightsync.dev/serve-unclaimed-after-seconds"] = json!("1m");
    assert!(matches!(inject(&mut spoiled, &options()), Err(InjectError::BadSeconds { .. })));
}

#[test]
fn a_second_injection_changes_nothing() {
    let mut once = rollout();
    inject(&mut once, &options()).unwrap();
    let mut twice = once.clone();
    assert_eq!(inject(&mut twice, &options()).unwrap().templates, 0);
    assert_eq!(once, twice);
}

#[test]
fn a_pod_without_the_label_or_with_inject_false_stays_as_it_is() {
    let mut plain = pod(&json!({"app": "x"}), &json!({"containers": [{"name": "c"}]}));
    let before = plain.clone();
    assert_eq!(inject(&mut plain, &options()).unwrap().templates, 0);
    assert_eq!(plain, before);
    let mut declined = rollout();
    declined["metadata"]["annotations"] = json!({"weightsync.dev/inject": "false"});
    assert_eq!(inject(&mut declined, &options()).unwrap().templates, 0);
}

#[test]
fn an_own_shared_memory_volume_is_shared_and_not_replaced() {
    let spec = json!({
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
        "containers": [{"name": "helper"}, {"name": "engine", "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}]
    });
    let mut document = pod(&json!({"weightsync.dev/role": "rollout"}), &spec);
    document["metadata"]["annotations"] = json!({"weightsync.dev/container": "engine"});
    inject(&mut document, &options()).unwrap();
    let spec = &document["spec"];
    assert_eq!(spec["volumes"].as_array().unwrap().len(), 2);
    assert_eq!(spec["initContainers"][0]["volumeMounts"][0]["name"], "shm");
    assert_eq!(spec["containers"][1]["volumeMounts"].as_array().unwrap().len(), 1);
}

#[test]
fn templates_of_workloads_are_found() {
    let template = json!({"metadata": {"labels": {"weightsync.dev/role": "rollout"}}, "spec": {"containers": [{"name": "engine"}]}});
    let mut deployment = json!({"kind": "Deployment", "metadata": {"name": "d"}, "spec": {"template": template}});
    assert_eq!(inject(&mut deployment, &options()).unwrap().templates, 1);
    let mut lws = json!({"kind": "LeaderWorkerSet", "metadata": {"name": "l"},
        "spec": {"leaderWorkerTemplate": {"leaderTemplate": template, "workerTemplate": {"spec": {"containers": [{"name": "w"}]}}}}});
    assert_eq!(inject(&mut lws, &options()).unwrap().templates, 1);
    let mut list = json!({"kind": "List", "items": [rollout(), rollout()]});
    assert_eq!(inject(&mut list, &options()).unwrap().templates, 2);
}

#[test]
fn an_api_key_comes_from_a_secret_and_never_as_a_value() {
    let mut document = rollout();
    document["metadata"]["annotations"] = json!({"weightsync.dev/api-key-secret": "keys/engine"});
    inject(&mut document, &options()).unwrap();
    let env = document["spec"]["initContainers"][0]["env"].as_array().unwrap();
    let key = env.iter().find(|e| e["name"] == "WEIGHTSYNC_ENGINE_API_KEY").unwrap();
    assert_eq!(key["valueFrom"]["secretKeyRef"], json!({"name": "keys", "key": "engine"}));
}

#[test]
fn mistakes_are_refused_with_what_to_change() {
    let mut role = pod(&json!({"weightsync.dev/role": "actor"}), &json!({"containers": [{"name": "c"}]}));
    assert!(matches!(inject(&mut role, &options()), Err(InjectError::UnknownRole { role, .. }) if role == "actor"));
    let mut container = rollout();
    container["metadata"]["annotations"] = json!({"weightsync.dev/container": "engin"});
    let message = inject(&mut container, &options()).unwrap_err().to_string();
    assert!(message.contains("engin") && message.contains("engine"), "{message}");
    let mut key = rollout();
    key["metadata"]["annotations"] = json!({"weightsync.dev/api-key-secret": "keys"});
    assert!(matches!(inject(&mut key, &options()), Err(InjectError::BadKeyReference { .. })));
    let mut way = rollout();
    way["metadata"]["annotations"] = json!({"weightsync.dev/inject": "wrapped"});
    assert!(matches!(inject(&mut way, &options()), Err(InjectError::UnknownWay { value, .. }) if value == "wrapped"));
    let mut volumes = pod(&json!({"weightsync.dev/role": "rollout"}), &json!({"containers": [{"name": "c"}], "volumes": {}}));
    assert!(matches!(inject(&mut volumes, &options()), Err(InjectError::Malformed { .. })));
}

fn wrapped(container: &Value) -> Value {
    let mut pod = pod(&json!({"weightsync.dev/role": "rollout"}), &json!({"containers": [{"name": "helper"}, container]}));
    pod["metadata"]["annotations"] = json!({"weightsync.dev/inject": "wrap", "weightsync.dev/container": "engine"});
    pod
}

#[test]
fn wrapped_container_keeps_its_command_under_the_agent() {
    let mut document = wrapped(&json!({"name": "engine", "command": ["vllm", "serve"], "args": ["--model", "$(MODEL)"]}));
    assert_eq!(inject(&mut document, &options()).unwrap().templates, 1);
    let spec = &document["spec"];
    let engine = &spec["containers"][1];
    assert_eq!(engine["command"], json!(["/opt/weightsync/weightsync", "run", "--", "vllm", "serve"]));
    assert_eq!(engine["args"], json!(["--model", "$(MODEL)"]));
    assert_eq!(engine["readinessProbe"]["httpGet"], json!({"path": "/readyz", "port": 8473}));
    let mounts: Vec<_> = engine["volumeMounts"].as_array().unwrap().iter().map(|mount| mount["mountPath"].as_str().unwrap()).collect();
    assert_eq!(mounts, ["/dev/shm", "/var/run/weightsync", "/opt/weightsync"]);
    let init = &spec["initContainers"][0];
    assert_eq!((&init["name"], &init["restartPolicy"]), (&json!("weightsync-program"), &Value::Null));
    assert_eq!(init["command"], json!(["/weightsync", "install", "/opt/weightsync"]));
    assert_eq!(spec["containers"][0], json!({"name": "helper"}), "only the engine is touched");
    let once = document.clone();
    assert_eq!(inject(&mut document, &options()).unwrap().templates, 0);
    assert_eq!(document, once);
}

#[test]
fn what_a_wrapped_container_sets_itself_stays_as_it_is() {
    let env = json!([{"name": "POD_NAME", "value": "mine"}, {"name": "HOME", "value": "/tmp"}]);
    let probe = json!({"httpGet": {"path": "/ready", "port": 9000}});
    let mut document = wrapped(&json!({"name": "engine", "command": ["python"], "env": env, "readinessProbe": probe}));
    document["metadata"]["labels"]["weightsync.dev/role"] = json!("trainer");
    inject(&mut document, &options()).unwrap();
    let container = &document["spec"]["containers"][1];
    let names: Vec<_> = container["env"].as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap()).collect();
    assert_eq!(names.iter().filter(|name| **name == "POD_NAME").count(), 1);
    assert_eq!(&names[..3], ["POD_NAME", "HOME", "POD_NAMESPACE"]);
    assert_eq!(container["env"][0]["value"], "mine");
    assert_eq!(container["readinessProbe"], probe, "whether a trainer is ready is its own affair");
}

#[test]
fn container_with_image_command_is_refused_with_the_remedy() {
    for container in [json!({"name": "engine", "args": ["--port", "8000"]}), json!({"name": "engine", "command": []})] {
        let mut document = wrapped(&container);
        let message = inject(&mut document, &options()).unwrap_err().to_string();
        for word in ["container engine", "command: [vllm, serve]", "docker inspect", "weightsync.dev/inject"] {
            assert!(message.contains(word), "{word}: {message}");
        }
    }
}
