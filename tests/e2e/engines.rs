//! The main road: a torch trainer that trains, real vLLM servers that serve, versions that arrive proven, rollouts that are lost and replaced
//! while users ask through a Service.

use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};

use super::asks::{between_20_and_80_percent, completion, completion_with_cache, publish_to, save, train, trainer_pid};
use super::cluster::{Cluster, START, is_ready};
use super::fixtures::{BASE_MODEL, SCRATCH, torch_trainer, vllm, weightsync};
use super::service::{Users, now};

/// Servers start in minutes on a machine whose cores build something else.
const SERVERS: Duration = Duration::from_secs(900);

/// A trainer and two real servers, grouped.
async fn group(cluster: &Cluster) {
    cluster.create_pod(torch_trainer("trainer-0")).await;
    for name in ["vllm-0", "vllm-1"] {
        cluster.create_pod(vllm(name, Some("rollout"), BASE_MODEL)).await;
    }
    let mut object = weightsync("run");
    // The patience of anyone who says nothing: a trainer, two servers and a third that starts share two cores.
    object["spec"]["health"] = serde_json::json!({});
    cluster.apply(&object).await.unwrap();
    for name in ["trainer-0", "vllm-0", "vllm-1"] {
        cluster.await_ready(name, SERVERS).await;
    }
    cluster.await_group("run", 2, START).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn real_trainers_versions_equal_fresh_servers_under_faults() {
    Cluster::run("versions", |cluster| async move {
        group(&cluster).await;
        let pid = trainer_pid(&cluster, "trainer-0").await;
        // What it leaves in the prefix cache must not be found after an update.
        let mut before = completion_with_cache(&cluster, "vllm-0").await;
        for version in 1..=3 {
            train(&cluster, "trainer-0").await;
            publish_to(&cluster, "trainer-0", version, 2).await;
            let status = cluster.await_version("run", version, 2, START).await;
            assert_eq!(status["replicas"]["display"], "2/2");
            assert_eq!(status["transport"]["name"], "tcp");
            let now = completion_with_cache(&cluster, "vllm-0").await;
            assert_eq!(now, completion(&cluster, "vllm-1").await, "both servers serve version {version}");
            assert_ne!(now, before, "version {version} differs from the one before");
            before = now;
        }
        equals_a_fresh_server(&cluster, 3, &before).await;
        kubectl_shows(&cluster).await;
        let mut users = Users::begin(&cluster, 3).await;
        lose_a_rollout_in_the_middle(&cluster, &mut users).await;
        let version = replace_a_rollout_while_versions_go_on(&cluster, &mut users).await;
        scale_up_while_versions_go_on(&cluster, &mut users, version).await;
        let answered = users.end(&cluster).await;
        println!("{answered} answers through the Service, each of a version that was allowed");
        assert_eq!(trainer_pid(&cluster, "trainer-0").await, pid, "the trainer noticed nothing");
    })
    .await;
}

/// A server started on the checkpoint that the trainer saved answers the same, to the last digit.
async fn equals_a_fresh_server(cluster: &Cluster, version: u64, served: &str) {
    let (path, name) = (format!("{SCRATCH}/{}-{version}", cluster.namespace), format!("fresh-{version}"));
    save(cluster, "trainer-0", &path).await;
    cluster.create_pod(vllm(&name, None, &path)).await;
    cluster.await_ready(&name, SERVERS).await;
    assert_eq!(completion(cluster, &name).await, served, "version {version} is served as by a fresh server");
    cluster.force_delete(&name).await;
}

/// What a person sees, and waits for.
async fn kubectl_shows(cluster: &Cluster) {
    let kubectl = |arguments: &[&str]| {
        let mut command = tokio::process::Command::new("kubectl");
        command.arg("-n").arg(&cluster.namespace).args(arguments).kill_on_drop(true);
        async move { tokio::time::timeout(START, command.output()).await.unwrap().unwrap() }
    };
    let shown = kubectl(&["get", "ws", "run"]).await;
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    let row: Vec<_> = text.lines().nth(1).unwrap_or_default().split_whitespace().collect();
    assert_eq!(row.first(), Some(&"run"), "{text}");
    assert_eq!((row.get(1), row.get(3), row.get(4), row.get(5)), (Some(&"2/2"), Some(&"3"), Some(&"3"), Some(&"tcp")), "{text}");
    let waited = kubectl(&["wait", "--for=condition=Ready", "ws/run", "--timeout=30s"]).await;
    assert!(waited.status.success(), "{}", String::from_utf8_lossy(&waited.stderr));
}

/// One rollout dies in the middle of an update, and is replaced.
async fn lose_a_rollout_in_the_middle(cluster: &Cluster, users: &mut Users) {
    let loss = async {
        let percent = between_20_and_80_percent(cluster, "vllm-1").await;
        let taken = now();
        cluster.force_delete("vllm-1").await;
        (percent, taken)
    };
    let (answer, (percent, taken)) = tokio::join!(users.publish(cluster, 4, 0.3), loss);
    users.taken_away(taken);
    assert!((20.0..=80.0).contains(&percent));
    assert_eq!(answer["installed"], serde_json::json!(["actors/vllm-0"]), "the survivor gets the version");
    cluster.await_version("run", 4, 1, START).await;
    // Whether the agent's silence or the pod's end is seen first, the pod and the cause are named.
    cluster.await_event(&["AgentLost", "MemberLeft"], START, |note| note.contains("vllm-1")).await;

    cluster.create_pod(vllm("vllm-1", Some("rollout"), BASE_MODEL)).await;
    // Never ready before it holds the current version.
    cluster.await_ready("vllm-1", SERVERS).await;
    let both = async { (completion(cluster, "vllm-1").await, completion(cluster, "vllm-0").await) };
    let (replacement, survivor) = users.resting(cluster, both).await;
    assert_eq!(replacement, survivor, "the replacement serves what the survivor serves");
    cluster.await_version("run", 4, 2, START).await;
}

/// The other rollout is deleted as any pod is; versions go on until its replacement serves with them.
/// Returns the last version.
async fn replace_a_rollout_while_versions_go_on(cluster: &Cluster, users: &mut Users) -> u64 {
    users.taken_away(now());
    cluster.api::<Pod>().delete("vllm-0", &DeleteParams::default()).await.unwrap();
    cluster.await_gone("vllm-0", START).await;
    cluster.create_pod(vllm("vllm-0", Some("rollout"), BASE_MODEL)).await;
    let begun = Instant::now();
    let mut version = 4;
    while !is_ready(&cluster.api::<Pod>().get("vllm-0").await.unwrap()) {
        assert!(begun.elapsed() < 2 * SERVERS, "vllm-0 is not ready after {version} versions");
        version += 1;
        users.publish(cluster, version, 0.0).await;
    }
    users.publish(cluster, version + 1, 0.0).await;
    cluster.await_version("run", version + 1, 2, START).await;
    version + 1
}

/// Two servers become four by the scale of a Deployment, as an autoscaler sets it. No new server answers before it was fed.
async fn scale_up_while_versions_go_on(cluster: &Cluster, users: &mut Users, version: u64) {
    let pod = vllm("more", Some("rollout"), BASE_MODEL);
    let deployment = serde_json::json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "more"},
        "spec": {
            "replicas": 0, "selector": {"matchLabels": {"app": "more"}},
            "template": {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]}
        }
    });
    cluster.apply(&deployment).await.unwrap();
    let scale = Patch::Merge(serde_json::json!({"spec": {"replicas": 2}}));
    cluster.api::<Deployment>().patch_scale("more", &PatchParams::default(), &scale).await.unwrap();
    let more = ListParams::default().labels("app=more");
    let ready = || async { cluster.api::<Pod>().list(&more).await.unwrap().items.into_iter().filter(is_ready).collect::<Vec<_>>() };
    let (begun, mut version) = (Instant::now(), version);
    let pods = loop {
        let pods = ready().await;
        if pods.len() == 2 {
            break pods;
        }
        assert!(begun.elapsed() < 2 * SERVERS, "{} of 2 more servers are ready after {version} versions", pods.len());
        version += 1;
        users.publish(cluster, version, 0.0).await;
    };
    let answer = users.publish(cluster, version + 1, 0.0).await;
    assert_eq!(answer["installed"].as_array().map(Vec::len), Some(4), "{answer}");
    cluster.await_version("run", version + 1, 4, START).await;
    let alike = async {
        let first = completion(cluster, "vllm-0").await;
        for pod in &pods {
            assert_eq!(completion(cluster, &pod.name_any()).await, first, "{} serves what vllm-0 serves", pod.name_any());
        }
    };
    users.resting(cluster, alike).await;
}
