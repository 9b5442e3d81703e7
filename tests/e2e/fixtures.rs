//! The pods and objects that tests are made of: simulated engines, real vLLM servers, trainers with torch and without, WeightSync objects.
//!
//! Images and folders are those of the test fixture (tests/cluster/README.md): `engine:test` is a Python with vLLM and torch, made of links
//! into `/host`, and `/host/share` holds checkpoints, scripts and packages.

use serde_json::{Value, json};

#[path = "../engine/processor.rs"]
mod processor;

/// Image of the product as the test fixture loads it.
pub const IMAGE: &str = "docker.io/local/weightsync:test";
/// `weightsync-dev`, for simulated engines.
const DEV_IMAGE: &str = "docker.io/local/weightsync-dev:test";
/// Image with Python, vLLM and torch.
const ENGINE_IMAGE: &str = "docker.io/local/engine:test";
/// Port of engines.
pub const ENGINE_PORT: u16 = 8000;
/// Port of the trainer's own little server.
pub const TRAINER_PORT: u16 = 9000;
/// Port of the asker's list of answers.
pub const ASKER_PORT: u16 = 9100;
/// Port of an agent's readiness, metrics and roster.
pub const STATUS_PORT: u16 = 8472;
/// The checkpoint that every engine starts with.
pub const BASE_MODEL: &str = "/host/share/models/base";
/// A folder of the node that pods may write to, for checkpoints that a fresh engine starts from.
pub const SCRATCH: &str = "/var/lib/weightsync-e2e";

/// What a sidecar requests of a CPU: `prepare.sh` sets it.
pub const SIDECAR_CPU: &str = "10m";

/// A pod of one container; with a role it takes part, and is selected by the label `group`. It requests a little of a CPU: a pod that
/// requests none gets next to nothing while servers of another test start.
fn pod(name: &str, role: Option<&str>, mut container: Value) -> Value {
    container["imagePullPolicy"] = json!("Never");
    container["resources"] = json!({"requests": {"cpu": "10m"}});
    container["volumeMounts"] = json!([
        {"name": "host", "mountPath": "/host", "readOnly": true},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "scratch", "mountPath": SCRATCH},
        {"name": "tmp", "mountPath": "/tmp"}
    ]);
    let mut labels = json!({"app": name});
    if let Some(role) = role {
        labels["weightsync.dev/role"] = json!(role);
        labels["group"] = json!(role);
    }
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
            "containers": [container],
            "volumes": [
                {"name": "host", "hostPath": {"path": "/host"}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
                {"name": "scratch", "hostPath": {"path": SCRATCH, "type": "DirectoryOrCreate"}},
                {"name": "tmp", "emptyDir": {}}
            ]
        }
    })
}

/// A real vLLM server on CPU that starts with `model`; two of them, a trainer and the cluster fit on two cores.
pub fn vllm(name: &str, role: Option<&str>, model: &str) -> Value {
    let args = ["serve", model, "--served-model-name=m", "--port=8000", "--dtype=bfloat16", "--enforce-eager", "--max-model-len=512"];
    let limits = ["--max-num-seqs=4", "--num-gpu-blocks-override=128", "--enable-prefix-caching"];
    // One process less to start: the worker lives in the engine's own.
    let args = [args.as_slice(), limits.as_slice(), &["--distributed-executor-backend=uni"]].concat();
    let container = json!({
        "name": "engine", "image": ENGINE_IMAGE, "command": ["vllm"], "args": args,
        "env": env(&[[
            ("VLLM_SERVER_DEV_MODE", "1"), ("VLLM_TARGET_DEVICE", "cpu"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
            ("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("DO_NOT_TRACK", "1"),
            // vLLM lets `uni` be chosen on CPU only with the first; `prepare.sh` puts what it knows of the model's class into that folder.
            ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_CACHE_ROOT", "/host/share/vllm")
        ].as_slice(), processor::environment()].concat()),
        "ports": [{"containerPort": ENGINE_PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": ENGINE_PORT}, "periodSeconds": 2, "timeoutSeconds": 5}
    });
    pod(name, role, container)
}

/// A torch process that trains a small model and publishes when asked (`tests/e2e/trainer.py`).
pub fn torch_trainer(name: &str) -> Value {
    trainer_with(name, &[])
}

/// The same without torch: it trains numpy arrays, and starts in a tenth of the time.
pub fn trainer(name: &str) -> Value {
    trainer_with(name, &["--numpy"])
}

fn trainer_with(name: &str, more: &[&str]) -> Value {
    let port = TRAINER_PORT.to_string();
    let command = ["python", "-u", "/host/share/e2e/trainer.py", "--model", BASE_MODEL, "--port", &port];
    let command = [command.as_slice(), more].concat();
    let container = json!({
        "name": "trainer", "image": ENGINE_IMAGE,
        "command": command,
        "env": env(&[("PYTHONPATH", "/host/share/python"), ("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")]),
        "ports": [{"containerPort": TRAINER_PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": TRAINER_PORT}, "periodSeconds": 1}
    });
    pod(name, Some("trainer"), container)
}

/// A pod that asks a URL for completions all the time (`tests/e2e/asker.py`).
pub fn asker(url: &str) -> Value {
    let container = json!({
        "name": "asker", "image": ENGINE_IMAGE,
        "command": ["python", "-u", "/host/share/e2e/asker.py", "--url", url, "--port", ASKER_PORT.to_string()],
        "ports": [{"containerPort": ASKER_PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": ASKER_PORT}, "periodSeconds": 1}
    });
    pod("asker", None, container)
}

/// A pod with Ray, whose actors start simulated engines and register them (`tests/e2e/actors.py`). It is ready once Ray runs.
pub fn actors(name: &str) -> Value {
    let container = json!({
        "name": "actors", "image": ENGINE_IMAGE,
        "command": ["python", "-u", "/host/share/e2e/actors.py", "--port", TRAINER_PORT.to_string()],
        "env": env(&[("PYTHONPATH", "/host/share/python:/host/share/ray"), ("RAY_USAGE_STATS_ENABLED", "0")]),
        "ports": [{"containerPort": TRAINER_PORT}],
        "startupProbe": {"httpGet": {"path": "/health", "port": TRAINER_PORT}, "periodSeconds": 1, "failureThreshold": 90}
    });
    pod(name, Some("rollout"), container)
}

/// A simulated engine of `weightsync-dev`: starts in milliseconds, keeps vLLM's rules, computes what it serves.
pub fn simulated_vllm(name: &str) -> Value {
    let command = ["/weightsync-dev", "simulate-engine", "--engine", "vllm", "--host", "0.0.0.0", "--port", "8000", "--model", BASE_MODEL];
    let container = json!({
        "name": "engine", "image": DEV_IMAGE, "command": command,
        "ports": [{"containerPort": ENGINE_PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": ENGINE_PORT}, "periodSeconds": 1}
    });
    pod(name, Some("rollout"), container)
}

/// The same pod, asking that nothing be injected; its containers run as that user.
pub fn without_sidecar(mut pod: Value, user: i64) -> Value {
    pod["metadata"]["annotations"] = json!({"weightsync.dev/inject": "false"});
    pod["spec"]["securityContext"] = json!({"runAsUser": user, "runAsGroup": user});
    pod
}

/// A rollout that lies (`crates/testkit/examples/liar.rs`), with the settings and the token that a sidecar would have.
pub fn liar(name: &str, sidecar: &Value) -> Value {
    let container = json!({"name": "liar", "image": ENGINE_IMAGE, "command": ["/host/share/e2e/liar"], "env": sidecar["env"]});
    let mut pod = without_sidecar(pod(name, Some("rollout"), container), 0);
    let token = json!({"serviceAccountToken": {"audience": "weightsync.dev", "path": "token", "expirationSeconds": 3600}});
    pod["spec"]["volumes"].as_array_mut().unwrap().push(json!({"name": "token", "projected": {"sources": [token]}}));
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array_mut().unwrap();
    mounts.push(json!({"name": "token", "mountPath": "/var/run/weightsync", "readOnly": true}));
    pod
}

/// The same pod, asking that its container's command be started by the agent.
pub fn wrapped(mut pod: Value) -> Value {
    pod["metadata"]["annotations"] = json!({"weightsync.dev/inject": "wrap"});
    pod
}

fn env(pairs: &[(&str, &str)]) -> Value {
    pairs.iter().map(|(name, value)| json!({"name": name, "value": value})).collect()
}

/// A WeightSync of one trainer and one pool of vLLM pods, over pods of this namespace.
pub fn weightsync(name: &str) -> Value {
    json!({
        "apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync",
        "metadata": {"name": name},
        "spec": {
            "trainer": {"selector": {"matchLabels": {"group": "trainer"}}},
            "rollouts": [{"name": "actors", "selector": {"matchLabels": {"group": "rollout"}}, "engine": {"kind": "VLLM", "ports": [ENGINE_PORT]}}],
            // A server that ended is found within two seconds; one that is late on a busy machine is not given up.
            "health": {"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 2}
        }
    })
}
