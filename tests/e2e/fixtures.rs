//! The pods and objects that tests are made of: simulated engines, real vLLM servers, a torch trainer, WeightSync objects.
//!
//! Paths are those that a node of the test bed has: `/host/share` (checkpoints, scripts, packages, read-only), the virtual environment and
//! the system folders its Python needs. `tests/cluster/up.sh` writes them to `$WEIGHTSYNC_SHARE/pods.json`.

use serde_json::{Value, json};

/// Image of the product as the test bed loads it.
pub const IMAGE: &str = "docker.io/local/weightsync:test";
/// Port of engines.
pub const ENGINE_PORT: u16 = 8000;
/// Port of the trainer's own little server.
pub const TRAINER_PORT: u16 = 9000;
/// Port of an agent's readiness, metrics and roster.
pub const STATUS_PORT: u16 = 8472;
/// The checkpoint that every engine starts with.
pub const BASE_MODEL: &str = "/host/share/models/base";
/// A folder of the node that pods of one test may write to, for checkpoints that a fresh engine starts from.
pub const SCRATCH: &str = "/var/lib/weightsync-e2e";

/// What the test bed says about running its Python in a pod: mounts and environment.
pub struct PodBed {
    volumes: Vec<Value>,
    mounts: Vec<Value>,
    python: String,
}

impl PodBed {
    /// Reads what `up.sh` wrote.
    pub fn read() -> Self {
        let share = std::env::var("WEIGHTSYNC_SHARE").expect("WEIGHTSYNC_SHARE: run `make e2e`, or source tests/cluster/env.sh");
        let file = std::path::Path::new(&share).join("pods.json");
        let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}: run tests/cluster/up.sh", file.display()));
        let bed: Value = serde_json::from_str(&text).unwrap();
        let folders: Vec<&str> = bed["folders"].as_array().unwrap().iter().map(|folder| folder.as_str().unwrap()).collect();
        let named = |index: usize| format!("host-{index}");
        let volume = |(index, folder): (usize, &&str)| json!({"name": named(index), "hostPath": {"path": folder}});
        let mount = |(index, folder): (usize, &&str)| json!({"name": named(index), "mountPath": folder, "readOnly": true});
        let mut volumes: Vec<Value> = folders.iter().enumerate().map(volume).collect();
        let mut mounts: Vec<Value> = folders.iter().enumerate().map(mount).collect();
        volumes.push(json!({"name": "scratch", "hostPath": {"path": SCRATCH, "type": "DirectoryOrCreate"}}));
        mounts.push(json!({"name": "scratch", "mountPath": SCRATCH}));
        volumes.push(json!({"name": "tmp", "emptyDir": {}}));
        mounts.push(json!({"name": "tmp", "mountPath": "/tmp"}));
        Self { volumes, mounts, python: bed["python"].as_str().unwrap().to_owned() }
    }

    fn pod(&self, name: &str, role: Option<&str>, container: Value) -> Value {
        let mut container = container;
        container["volumeMounts"] = json!(self.mounts);
        let mut labels = json!({"app": name, "e2e": "true"});
        if let Some(role) = role {
            labels["weightsync.dev/role"] = json!(role);
            labels["group"] = json!(role);
        }
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {"terminationGracePeriodSeconds": 1, "automountServiceAccountToken": false, "containers": [container], "volumes": self.volumes}
        })
    }

    /// A real vLLM server on CPU that starts with `model`.
    pub fn vllm(&self, name: &str, role: Option<&str>, model: &str) -> Value {
        let args = ["-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", "m", "--port", "8000", "--enforce-eager"];
        let limits = ["--max-model-len", "512", "--max-num-seqs", "4", "--dtype", "bfloat16", "--enable-prefix-caching"];
        let command = [[self.python.as_str()].as_slice(), args.as_slice(), limits.as_slice()].concat();
        let container = json!({
            "name": "engine", "image": "docker.io/local/toolbox:1", "imagePullPolicy": "Never",
            "command": command,
            "env": env(&[
                ("HOME", "/tmp"), ("USER", "root"), ("VLLM_SERVER_DEV_MODE", "1"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_TARGET_DEVICE", "cpu"),
                ("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("DO_NOT_TRACK", "1")
            ]),
            "ports": [{"containerPort": ENGINE_PORT}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": ENGINE_PORT}, "periodSeconds": 2}
        });
        self.pod(name, role, container)
    }

    /// A torch process that trains a small model and publishes when asked (`tests/e2e/trainer.py`).
    pub fn torch_trainer(&self, name: &str) -> Value {
        let container = json!({
            "name": "trainer", "image": "docker.io/local/toolbox:1", "imagePullPolicy": "Never",
            "command": [self.python, "/host/share/e2e/trainer.py", "--model", BASE_MODEL, "--port", TRAINER_PORT.to_string()],
            "env": env(&[("HOME", "/tmp"), ("USER", "root"), ("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("PYTHONPATH", "/host/share/python")]),
            "ports": [{"containerPort": TRAINER_PORT}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": TRAINER_PORT}, "periodSeconds": 1}
        });
        self.pod(name, Some("trainer"), container)
    }

    /// An engine simulator of the product's own image: starts in milliseconds, keeps vLLM's rules, computes what it serves.
    pub fn simulated_vllm(&self, name: &str) -> Value {
        let container = json!({
            "name": "engine", "image": IMAGE, "imagePullPolicy": "Never",
            "command": ["/weightsync", "simulate-engine", "--engine", "vllm", "--host", "0.0.0.0", "--port", ENGINE_PORT.to_string(), "--model", BASE_MODEL],
            "ports": [{"containerPort": ENGINE_PORT}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": ENGINE_PORT}, "periodSeconds": 1}
        });
        self.pod(name, Some("rollout"), container)
    }
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
            "rollouts": [{"name": "actors", "selector": {"matchLabels": {"group": "rollout"}}, "engine": {"vllm": {"ports": [ENGINE_PORT]}}}],
            "health": {"periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 2, "successThreshold": 2}
        }
    })
}
