//! Parts of the cluster itself that stop or are replaced: the API server, etcd, the kubelet, the operator. Versions flow, no engine is
//! restarted, and nothing is sent twice. Simulated engines.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, ResourceExt};

use super::standing::{all, metrics, sum, with_more};
use crate::asks::{Published, deliver, flow, halt, served, trainer_pid};
use crate::cluster::{Cluster, MINUTE, START, describe, eventually, is_ready};
use crate::faults::group;
use crate::fixtures::{TRAINER_PORT, simulated_vllm};
use crate::http::request;
use crate::node::{Frozen, on_node, process, program, send};
use crate::operator::{NAMESPACE, controllers, operator, scale_controller, upgrade};

const PODS: [&str; 3] = ["trainer-0", "sim-0", "sim-1"];
const CONTROLLER_STATUS: u16 = 8080;

/// Waits until the API server answers that it is well.
async fn await_api_server(cluster: &Cluster) {
    eventually("the API server is well", START, || async {
        let request = http::Request::get("/readyz").body(Vec::new()).unwrap();
        cluster.client.request_text(request).await.map_err(|error| error.to_string())
    })
    .await;
}

/// Waits until anyone who lives by a lease took it again: Kubernetes' own controllers, which other tests need, and ours.
async fn await_leaders(cluster: &Cluster) {
    let now = Timestamp::now();
    for (namespace, name) in [("kube-system", "kube-controller-manager"), ("kube-system", "kube-scheduler"), (NAMESPACE, "weightsync")] {
        let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), namespace);
        eventually(&format!("{name} leads"), START, || async {
            let spec = leases.get(name).await.map_err(|error| error.to_string())?.spec.unwrap_or_default();
            if spec.renew_time.as_ref().is_some_and(|renewed| renewed.0 > now) { Ok(()) } else { Err(format!("{spec:?}")) }
        })
        .await;
    }
    eventually("the controller is ready", START, || async {
        let found = controllers(cluster).await;
        if found.iter().any(is_ready) { Ok(()) } else { Err(found.iter().map(describe).collect::<Vec<_>>().join("; ")) }
    })
    .await;
}

/// Each version was installed by every replica at its first attempt.
fn all_installed(published: &[Published], replicas: usize) {
    let bad: Vec<_> = published.iter().filter(|one| one.error.is_some() || one.installed.len() != replicas).collect();
    assert!(bad.is_empty(), "{bad:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_flow_while_the_api_server_is_frozen() {
    Cluster::run_alone("api-server", |cluster| async move {
        group(&cluster, 2).await;
        let before = all(&cluster, &PODS).await;
        let pid = trainer_pid(&cluster, "trainer-0").await;
        flow(&cluster, "trainer-0", 2).await;
        let stopped = Frozen::new(&program("kube-apiserver").await, 30).await;
        let asked = tokio::time::timeout(Duration::from_secs(5), cluster.client.apiserver_version()).await;
        assert!(!matches!(asked, Ok(Ok(_))), "the API server answers");
        let (from, until) = stopped.ended(START).await;
        assert!(until - from >= 29.0, "stopped from {from} until {until}");
        await_api_server(&cluster).await;
        await_leaders(&cluster).await;
        let published = halt(&cluster, "trainer-0").await;
        all_installed(&published, 2);
        let meanwhile = published.iter().filter(|one| one.began > from && one.ended < until).count();
        assert!(meanwhile >= 10, "{meanwhile} versions while the API server stood still: {published:?}");
        cluster.await_version("run", published.last().unwrap().version, 2, START).await;
        assert_eq!(all(&cluster, &PODS).await, with_more(&before, u64::try_from(published.len()).unwrap()));
        assert_eq!(trainer_pid(&cluster, "trainer-0").await, pid);
        assert_eq!(served(&cluster, "sim-0").await, served(&cluster, "sim-1").await);
    })
    .await;
}

/// Waits until another process than `before` runs under this name, and the node and our pods are well by its word.
async fn await_another(cluster: &Cluster, name: &str, before: &str) {
    eventually(&format!("another {name}"), START, || async {
        let now = on_node(&["sh", "-c", &format!("pgrep -o -x {name} || true")]).await;
        if now.is_empty() || now == before { Err(now) } else { Ok(()) }
    })
    .await;
    await_api_server(cluster).await;
    let now = Timestamp::now();
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "kube-node-lease");
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    eventually("the kubelet tells of its node", START, || async {
        let renewed = leases.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
        let renewed = renewed.items.iter().all(|lease| {
            let spec = lease.spec.as_ref();
            spec.and_then(|spec| spec.renew_time.as_ref()).is_some_and(|renewed| renewed.0 > now)
        });
        let nodes = nodes.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
        let ready = nodes.items.iter().all(|node| {
            let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
            conditions.clone().any(|condition| condition.type_ == "Ready" && condition.status == "True")
        });
        if renewed && ready { Ok(()) } else { Err(format!("renewed {renewed}, ready {ready}")) }
    })
    .await;
    for pod in PODS {
        cluster.await_ready(pod, START).await;
    }
    // A kubelet that just started knows its pods a little later than it reports its node.
    eventually("the kubelet forwards to the trainer", START, || async {
        request(cluster, "trainer-0", TRAINER_PORT, "GET", "/health", None, Duration::from_secs(5)).await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_of_etcd_or_kubelet_restarts_no_engine() {
    Cluster::run_alone("node-parts", |cluster| async move {
        group(&cluster, 2).await;
        let before = all(&cluster, &PODS).await;
        let etcd = program("etcd").await;
        send(&etcd, "KILL").await;
        await_another(&cluster, "etcd", &etcd).await;
        deliver(&cluster, 2, &["sim-0", "sim-1"]).await;
        assert_eq!(all(&cluster, &PODS).await, with_more(&before, 1), "after etcd");

        let kubelet = program("kubelet").await;
        on_node(&["systemctl", "restart", "kubelet"]).await;
        await_another(&cluster, "kubelet", &kubelet).await;
        deliver(&cluster, 3, &["sim-0", "sim-1"]).await;
        assert_eq!(all(&cluster, &PODS).await, with_more(&before, 2), "after the kubelet");
        await_leaders(&cluster).await;
    })
    .await;
}

/// Who holds the operator's lease, and how often it went from one to another.
async fn holder(cluster: &Cluster) -> (String, i32) {
    let lease = operator(cluster).api::<Lease>().get("weightsync").await.unwrap().spec.unwrap();
    (lease.holder_identity.unwrap_or_default(), lease.lease_transitions.unwrap_or_default())
}

async fn leads(cluster: &Cluster, pod: &str) -> bool {
    sum(&metrics(&operator(cluster), pod, CONTROLLER_STATUS).await, "weightsync_leader") == 1
}

#[tokio::test(flavor = "multi_thread")]
async fn frozen_leader_that_lost_its_lease_acts_no_more() {
    Cluster::run_alone("lost-lease", |cluster| async move {
        scale_controller(&cluster, 2).await;
        group(&cluster, 2).await;
        let before = all(&cluster, &PODS).await;
        let (first, terms) = holder(&cluster).await;
        let restarts = |pods: &[Pod]| {
            let of_first = pods.iter().find(|pod| pod.name_any() == first);
            of_first.and_then(|pod| Some(pod.status.as_ref()?.container_statuses.as_ref()?.first()?.restart_count)).unwrap_or(0)
        };
        let restarted = restarts(&controllers(&cluster).await);
        let stopped = Frozen::new(&process(&operator(&cluster), &first, "controller").await, 60).await;
        let second = eventually("the other one takes the lease", MINUTE, || async {
            let (now, _) = holder(&cluster).await;
            if now == first || now.is_empty() { Err(now) } else { Ok(now) }
        })
        .await;
        stopped.thaw().await;
        // Both run now, and the first has not been informed: it must find out before it does anything.
        cluster.create_pod(simulated_vllm("sim-2")).await;
        cluster.await_version("run", 1, 3, START).await;
        eventually("the first one ended and waits for the lease", START, || async {
            let pods = controllers(&cluster).await;
            let ready = pods.len() == 2 && pods.iter().all(is_ready);
            if ready && restarts(&pods) > restarted { Ok(()) } else { Err(pods.iter().map(describe).collect::<Vec<_>>().join("; ")) }
        })
        .await;
        assert_eq!(holder(&cluster).await, (second.clone(), terms + 1), "the lease changed hands once");
        assert!(leads(&cluster, &second).await && !leads(&cluster, &first).await, "one leads");
        // One epoch for the one pod that came, reported by the one that leads, and no one was sent what it has.
        let epoch = before["trainer-0"].epoch + 1;
        let mut expected = before.clone();
        for one in expected.values_mut() {
            one.epoch = epoch;
        }
        let mut now = all(&cluster, &PODS).await;
        // Anyone who feeds the joiner has a part in that; engines that have the version do not.
        now.get_mut("trainer-0").unwrap().updates = expected["trainer-0"].updates;
        assert_eq!(now, expected);
        let reported = cluster.api::<Event>().list(&ListParams::default()).await.unwrap().items;
        let formed: Vec<_> = reported.iter().filter(|event| event.reason.as_deref() == Some("GroupFormed")).collect();
        let of_epoch = |event: &&&Event| event.note.as_deref().is_some_and(|note| note.starts_with(&format!("epoch {epoch}:")));
        let by: Vec<_> = formed.iter().filter(of_epoch).map(|event| event.reporting_instance.as_deref()).collect();
        assert_eq!(by, [Some(second.as_str())], "{formed:?}");
        let newest = formed.iter().max_by_key(|event| event.event_time.clone()).unwrap();
        assert_eq!(newest.reporting_instance.as_deref(), Some(second.as_str()), "{newest:?}");
        deliver(&cluster, 2, &["sim-0", "sim-1", "sim-2"]).await;
        scale_controller(&cluster, 1).await;
        await_leaders(&cluster).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operator_upgrade_restarts_no_engine_and_resends_nothing() {
    Cluster::run_alone("upgrade", |cluster| async move {
        group(&cluster, 2).await;
        let before = all(&cluster, &PODS).await;
        let old: Vec<_> = controllers(&cluster).await.iter().map(ResourceExt::name_any).collect();
        flow(&cluster, "trainer-0", 2).await;
        // Another pod template: the controller's pod is replaced.
        upgrade(&["--set-string", &format!("podAnnotations.e2e={}", cluster.namespace)]).await;
        eventually("another controller leads", START, || async {
            let (holder, _) = holder(&cluster).await;
            let pods: Vec<_> = controllers(&cluster).await.iter().map(ResourceExt::name_any).collect();
            if old.contains(&holder) || !pods.contains(&holder) { Err(format!("{holder} of {pods:?}")) } else { Ok(()) }
        })
        .await;
        await_leaders(&cluster).await;
        let published = halt(&cluster, "trainer-0").await;
        all_installed(&published, 2);
        cluster.await_version("run", published.last().unwrap().version, 2, START).await;
        assert_eq!(all(&cluster, &PODS).await, with_more(&before, u64::try_from(published.len()).unwrap()));
        // It leads in earnest: a replica that comes is let in and fed.
        cluster.create_pod(simulated_vllm("sim-2")).await;
        cluster.await_version("run", published.last().unwrap().version, 3, START).await;
        for pod in ["sim-1", "sim-2"] {
            assert_eq!(served(&cluster, pod).await, served(&cluster, "sim-0").await, "{pod}");
        }
    })
    .await;
}
