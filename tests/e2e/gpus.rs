//! Groups over NCCL whose members are pods: by containers that run below the agent (`Wrap`), and by sidecars; and pods that cannot take part,
//! named with what is wrong. GPUs, driver and NCCL are stand-ins (tests/fakegpu), handed out by a stand-in for NVIDIA's device plugin (gpus.py).
//! Each pod has a GPU memory of its own, so bytes between pods travel by the pods' addresses, through the chart's network policies.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{ListParams, LogParams};
use serde_json::{Value, json};

use super::asks::{deliver, publish, served, train};
use super::cluster::{Cluster, MINUTE, START};
use super::fixtures::{simulated_vllm, torch_trainer, trainer, weightsync, wrapped};
use super::injection::would_be;
use super::node::{on_node, process, send};

/// Where the device plugin puts the libraries.
const DRIVER: &str = "/usr/local/nvidia/lib64";
const NCCL: &str = "/usr/local/nvidia/nccl/libnccl.so.2";
/// Where the stand-in keeps the memory of GPUs: each pod has a volume there, which its containers share.
const GPU_FOLDER: &str = "/dev/shm/gpu";
/// The last of sixteen GPUs of a node; the device plugin has the others.
const SHOWN_GPU: &str = "GPU-fa4e0000-0000-4000-8000-00000000000f";

/// Sets a variable of a container.
fn set(container: &mut Value, name: &str, variable: Value) {
    let mut all = container["env"].as_array().cloned().unwrap_or_default();
    all.retain(|one| one["name"] != name);
    all.push(json!({"name": name}));
    all.last_mut().unwrap().as_object_mut().unwrap().extend(variable.as_object().unwrap().clone());
    container["env"] = json!(all);
}

/// Names the folders of its GPU's libraries to a container, as images for GPUs do by themselves.
fn finds_libraries(container: &mut Value) {
    let own = if container["image"].as_str().unwrap().contains("engine") { ":/host/python/lib" } else { "" };
    set(container, "LD_LIBRARY_PATH", json!({"value": format!("{DRIVER}{own}")}));
    set(container, "WEIGHTSYNC_NCCL", json!({"value": NCCL}));
    // Also for a simulated engine, which opens memory of its GPU there.
    set(container, "FAKEGPU_DIR", json!({"value": GPU_FOLDER}));
    // NCCL itself looks for an interface.
    set(container, "FAKEGPU_NCCL_ADDRESS", json!({"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}));
}

/// Gives a container a GPU.
fn on_gpu(container: &mut Value) {
    finds_libraries(container);
    container["resources"]["limits"]["nvidia.com/gpu"] = json!("1");
}

/// The pod with a GPU for its container, which runs below the agent.
fn wrapped_on_gpu(mut pod: Value) -> Value {
    on_gpu(&mut pod["spec"]["containers"][0]);
    wrapped(pod)
}

/// The pod with a sidecar that has a GPU of its own.
async fn sidecar_on_gpu(cluster: &Cluster, mut pod: Value) -> Value {
    pod["spec"] = would_be(cluster, &pod).await;
    on_gpu(&mut pod["spec"]["initContainers"][0]);
    pod
}

/// The pod with a sidecar, both on one GPU that the container runtime shows without a device plugin, and in one PID namespace.
async fn sidecar_on_shown_gpu(cluster: &Cluster, mut pod: Value) -> Value {
    pod["spec"]["shareProcessNamespace"] = json!(true);
    pod["spec"] = would_be(cluster, &pod).await;
    pod["spec"]["volumes"].as_array_mut().unwrap().push(json!({"name": "driver", "hostPath": {"path": "/host/share/gpus"}}));
    // For the model's configuration: a model that may be quantised is not handed over within a GPU.
    let mounts = pod["spec"]["initContainers"][0]["volumeMounts"].as_array_mut().unwrap();
    mounts.push(json!({"name": "host", "mountPath": "/host", "readOnly": true}));
    for container in ["/initContainers/0", "/containers/0"] {
        let container = pod["spec"].pointer_mut(container).unwrap();
        finds_libraries(container);
        set(container, "FAKEGPU_COUNT", json!({"value": "16"}));
        set(container, "NVIDIA_VISIBLE_DEVICES", json!({"value": SHOWN_GPU}));
        let mounts = container["volumeMounts"].as_array_mut().unwrap();
        mounts.push(json!({"name": "driver", "mountPath": "/usr/local/nvidia", "readOnly": true}));
    }
    pod
}

/// An object whose weights travel by NCCL or not at all.
fn over_nccl(launch: &str) -> Value {
    let mut object = weightsync("run");
    object["spec"]["transport"] = json!({"type": "NCCL", "bucketMiB": 1});
    object["spec"]["agent"] = json!({"launch": launch});
    object
}

/// Waits for a group of these many rollouts over NCCL that is later than `after`; answers its number and why it is so.
async fn group_after(cluster: &Cluster, after: u64, rollouts: u64) -> (u64, String) {
    cluster
        .await_status("run", "a group over NCCL", START, |status| {
            let (epoch, transport) = (status["epoch"].as_u64().unwrap_or(0), &status["transport"]);
            // The number is written before the agents hear of it; the condition follows when the group stands.
            let stands = format!("epoch {epoch} with {} ranks", rollouts + 1);
            let mut conditions = status["conditions"].as_array().into_iter().flatten();
            let stands = conditions.any(|one| one["message"].as_str().is_some_and(|message| message.starts_with(&stands)));
            if epoch > after && stands && status["replicas"]["ready"] == rollouts && transport["name"] == "nccl" {
                Ok((epoch, transport["reason"].as_str().unwrap_or_default().to_owned()))
            } else {
                Err(format!("epoch {epoch}"))
            }
        })
        .await
}

/// Kills the process that the agent in this container drives its GPU with.
async fn kill_worker(cluster: &Cluster, pod: &str, container: &str) {
    let agent = process(cluster, pod, container).await;
    let workers = on_node(&["pgrep", "-P", &agent, "-f", " worker$"]).await;
    let worker = workers.lines().next().unwrap_or_else(|| panic!("{pod}/{container} has no worker")).to_owned();
    send(&worker, "KILL").await;
}

/// Whether an agent has put a version into files because it could not hand it over within the GPU's memory.
async fn used_files(cluster: &Cluster, pod: &str, container: &str) -> bool {
    let params = LogParams { container: Some(container.to_owned()), ..LogParams::default() };
    cluster.api::<Pod>().logs(pod, &params).await.unwrap().contains("is put into files")
}

/// No rule of the driver or of NCCL was broken: the stand-in prints those, and agents log what it prints.
async fn no_rule_is_broken(cluster: &Cluster) {
    for pod in cluster.api::<Pod>().list(&ListParams::default()).await.unwrap() {
        let spec = pod.spec.as_ref().unwrap();
        for container in spec.containers.iter().chain(spec.init_containers.iter().flatten()) {
            let params = LogParams { container: Some(container.name.clone()), ..LogParams::default() };
            let log = cluster.api::<Pod>().logs(&pod.name_any(), &params).await.unwrap_or_default();
            let broken: Vec<_> = log.lines().filter(|line| line.contains("fakegpu[")).collect();
            assert!(broken.is_empty(), "{}: {broken:?}", pod.name_any());
        }
    }
}

/// Waits until a member is out for that reason; answers the message.
async fn left_out(cluster: &Cluster, pod: &str, reason: &str) -> String {
    cluster
        .await_status("run", &format!("{pod} is left out"), START, |status| {
            let mut members = status["members"].as_array().into_iter().flatten();
            let member = members.find(|member| member["pods"] == json!([pod])).cloned().unwrap_or_default();
            let message = member["message"].as_str().unwrap_or_default().to_owned();
            // After some attempts it waits longer and longer, and the reason stands in the message.
            let so = member["reason"] == reason || message.starts_with(&format!("{reason}: "));
            if so { Ok(message) } else { Err(member.to_string()) }
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn wrapped_nccl_group_outlives_workers_and_pods() {
    Cluster::run("gpus-wrap", |cluster| async move {
        cluster.create_pod(wrapped_on_gpu(torch_trainer("trainer-0"))).await;
        for name in ["sim-0", "sim-1"] {
            cluster.create_pod(wrapped_on_gpu(simulated_vllm(name))).await;
        }
        cluster.apply(&over_nccl("Wrap")).await.unwrap();
        cluster.await_ready("trainer-0", START).await;
        let (epoch, reason) = group_after(&cluster, 0, 2).await;
        assert!(!reason.contains("cannot be shared"), "{reason}");
        deliver(&cluster, 1, &["sim-0", "sim-1"]).await;

        assert!(!used_files(&cluster, "sim-0", "engine").await);

        kill_worker(&cluster, "sim-1", "engine").await;
        cluster.await_event(&["GpuWorkerLost"], MINUTE, |note| note.contains("sim-1")).await;
        let (epoch, _) = group_after(&cluster, epoch, 2).await;
        deliver(&cluster, 2, &["sim-0", "sim-1"]).await;

        cluster.force_delete("sim-1").await;
        cluster.await_gone("sim-1", MINUTE).await;
        cluster.create_pod(wrapped_on_gpu(simulated_vllm("sim-1"))).await;
        group_after(&cluster, epoch, 2).await;
        cluster.await_ready("sim-1", MINUTE).await;
        assert_eq!(served(&cluster, "sim-1").await, served(&cluster, "sim-0").await, "it was fed version 2");
        deliver(&cluster, 3, &["sim-0", "sim-1"]).await;
        no_rule_is_broken(&cluster).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sidecars_with_gpus_form_an_nccl_group_and_heal() {
    Cluster::run("gpus-sidecar", |cluster| async move {
        let source = sidecar_on_gpu(&cluster, trainer("trainer-0")).await;
        let together = sidecar_on_shown_gpu(&cluster, simulated_vllm("sim-0")).await;
        // A sidecar whose GPU is not the engine's, in a PID namespace of its own: weights pass to the engine by the host.
        let apart = sidecar_on_gpu(&cluster, simulated_vllm("sim-1")).await;
        for pod in [source, together, apart] {
            cluster.create_pod(pod).await;
        }
        cluster.apply(&over_nccl("Sidecar")).await.unwrap();
        cluster.await_ready("trainer-0", START).await;
        let (epoch, reason) = group_after(&cluster, 0, 2).await;
        for word in ["cannot be shared with the engine of actors/sim-1:", "another PID namespace", "shareProcessNamespace: true"] {
            assert!(reason.contains(word), "{word}: {reason}");
        }
        deliver(&cluster, 1, &["sim-0", "sim-1"]).await;
        assert!(!used_files(&cluster, "sim-0", "weightsync-agent").await && used_files(&cluster, "sim-1", "weightsync-agent").await);
        kill_worker(&cluster, "sim-0", "weightsync-agent").await;
        cluster.await_event(&["GpuWorkerLost"], MINUTE, |note| note.contains("sim-0")).await;
        group_after(&cluster, epoch, 2).await;
        deliver(&cluster, 2, &["sim-0", "sim-1"]).await;
        no_rule_is_broken(&cluster).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_without_usable_nccl_are_named_with_remedies() {
    Cluster::run("gpus-broken", |cluster| async move {
        let without_gpu = wrapped(simulated_vllm("without-gpu"));
        let mut without_library = wrapped_on_gpu(simulated_vllm("without-library"));
        set(&mut without_library["spec"]["containers"][0], "WEIGHTSYNC_NCCL", json!({"value": "/nowhere/libnccl.so.2"}));
        let mut older = wrapped_on_gpu(simulated_vllm("older-library"));
        set(&mut older["spec"]["containers"][0], "FAKEGPU_NCCL_VERSION", json!({"value": "22703"}));
        let mut newer_cuda = wrapped_on_gpu(simulated_vllm("newer-cuda"));
        set(&mut newer_cuda["spec"]["containers"][0], "FAKEGPU_NCCL_CUDA", json!({"value": "14"}));
        // Its engine gets weights by the host; the GPU's own memory is elsewhere.
        let mut little_memory = simulated_vllm("little-memory");
        little_memory["spec"]["volumes"][1]["emptyDir"]["sizeLimit"] = json!("2Mi");
        let mut little_memory = sidecar_on_gpu(&cluster, little_memory).await;
        let sidecar = &mut little_memory["spec"]["initContainers"][0];
        set(sidecar, "FAKEGPU_DIR", json!({"value": "/tmp/gpu"}));
        sidecar["volumeMounts"].as_array_mut().unwrap().push(json!({"name": "tmp", "mountPath": "/tmp"}));
        for pod in [wrapped_on_gpu(trainer("trainer-0")), without_gpu, without_library, older, newer_cuda, little_memory] {
            cluster.create_pod(pod).await;
        }
        cluster.create_pod(wrapped_on_gpu(simulated_vllm("sim-0"))).await;
        cluster.apply(&over_nccl("Sidecar")).await.unwrap();
        cluster.await_ready("trainer-0", START).await;
        let unavailable = "TransportUnavailable";
        let cases: [(&str, &str, &[&str]); 4] = [
            ("without-gpu", unavailable, &["no GPU is in the agent's container (no /dev/nvidia0)", "device plugin"]),
            ("without-library", unavailable, &["/nowhere/libnccl.so.2", "nvidia-nccl-cu", "WEIGHTSYNC_NCCL"]),
            ("older-library", unavailable, &["its NCCL is 2.27.3, that of trainer/trainer-0 is 2.28.9", "must agree in the minor version"]),
            ("newer-cuda", "PeerUnreachable", &["CUDA driver version is insufficient", "as the driver's CUDA is"]),
        ];
        for (pod, reason, words) in cases {
            let why = left_out(&cluster, pod, reason).await;
            for word in words {
                assert!(why.contains(word), "{pod}: {word}: {why}");
            }
        }
        // The others get the version; the one that lacks room for it says so, with both numbers.
        train(&cluster, "trainer-0").await;
        let (status, answer) = publish(&cluster, "trainer-0", 1, 0.0).await;
        assert_eq!((status, &answer["installed"]), (200, &json!(["actors/sim-0"])), "{answer}");
        let why = answer["behind"]["actors/little-memory"].as_str().unwrap_or_default().to_owned();
        assert!(why.contains("bytes are needed in /dev/shm") && why.contains("are free"), "{answer}");
        let named = |note: &str| note.contains("actors/little-memory: ") && note.contains("bytes are needed in /dev/shm");
        cluster.await_event(&["UpdateFailed", "MemberFailed"], MINUTE, named).await;
        no_rule_is_broken(&cluster).await;
    })
    .await;
}
