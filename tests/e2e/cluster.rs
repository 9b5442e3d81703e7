//! One namespace of the cluster for one test: apply, await, delete, and print everything when a wait fails.

use std::fmt::Debug;
use std::future::Future;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, LogParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::RwLock;
use tokio::task::JoinError;

use super::operator::scale_controller;
use super::policies::Enforced;

/// For what comes within seconds on an idle machine: tests share two cores.
pub const MINUTE: Duration = Duration::from_secs(60);
/// For pods that start, and what needs several of them.
pub const START: Duration = Duration::from_secs(300);

/// The cluster: tests share it, and one that changes it for all has it alone. Tests get it in the order in which they ask.
static WHOLE: RwLock<()> = RwLock::const_new(());

/// A namespace of its own, deleted when the test is over.
pub struct Cluster {
    pub client: Client,
    pub namespace: String,
}

impl Cluster {
    /// Connects and makes a fresh namespace whose name starts with `name`.
    pub async fn new(name: &str) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::try_default().await.expect("a kubeconfig: run `make e2e`, or export KUBECONFIG");
        let namespace = format!("{name}-{}", &uuid::Uuid::new_v4().to_string()[..6]);
        let object: Namespace = serde_json::from_value(json!({"metadata": {"name": namespace}})).unwrap();
        Api::all(client.clone()).create(&kube::api::PostParams::default(), &object).await.expect("a namespace can be made");
        // A pod is refused until the namespace has its default account.
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace);
        eventually("the namespace has its default account", MINUTE, || async {
            accounts.get("default").await.map(|_| ()).map_err(|error| error.to_string())
        })
        .await;
        Self { client, namespace }
    }

    /// Runs a test in a namespace of its own, next to others; when it fails, prints pods, events and logs before the namespace goes.
    pub async fn run<F, Fut>(name: &str, test: F)
    where
        F: FnOnce(Self) -> Fut,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let _shared = WHOLE.read().await;
        if let Err(error) = Self::within_namespace(name, test).await {
            std::panic::resume_unwind(error.into_panic());
        }
    }

    /// The same while no other test runs: for those that change the cluster or the operator of all. They stand in `alone/`, so that they run
    /// one after the other: each that runs between others makes all threads wait.
    pub async fn run_alone<F, Fut>(name: &str, test: F)
    where
        F: FnOnce(Self) -> Fut,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let _alone = WHOLE.write().await;
        if let Err(error) = Self::within_namespace(name, test).await {
            // It may have ended between two changes of the operator, which the next test needs.
            let client = Client::try_default().await.expect("a kubeconfig");
            let operator = Self { client, namespace: String::new() };
            if tokio::spawn(async move { scale_controller(&operator, 1).await }).await.is_err() {
                eprintln!("the controller is not as it was");
            }
            std::panic::resume_unwind(error.into_panic());
        }
    }

    async fn within_namespace<F, Fut>(name: &str, test: F) -> Result<(), JoinError>
    where
        F: FnOnce(Self) -> Fut,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let cluster = Self::new(name).await;
        let (client, namespace) = (cluster.client.clone(), cluster.namespace.clone());
        let policies = Enforced::begin(&client, &namespace).await;
        let outcome = tokio::spawn(test(cluster)).await;
        let after = Self { client: client.clone(), namespace: namespace.clone() };
        if outcome.is_err() {
            after.tell_everything().await;
        }
        policies.end().await;
        let _ = Api::<Namespace>::all(client).delete(&namespace, &DeleteParams::default().grace_period(0)).await;
        outcome
    }

    /// Typed access within the namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn weightsyncs(&self) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("weightsync.dev", "v1alpha1", "WeightSync");
        Api::namespaced_with(self.client.clone(), &self.namespace, &ApiResource::from_gvk_with_plural(&kind, "weightsyncs"))
    }

    /// Creates a pod.
    pub async fn create_pod(&self, pod: Value) -> Pod {
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        self.api::<Pod>().create(&kube::api::PostParams::default(), &pod).await.expect("the pod is accepted")
    }

    /// Applies any object of the namespace, as `kubectl apply --server-side` would.
    pub async fn apply(&self, object: &Value) -> Result<DynamicObject, kube::Error> {
        let (group, version) = object["apiVersion"].as_str().unwrap().rsplit_once('/').unwrap_or(("", "v1"));
        let kind = object["kind"].as_str().unwrap();
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
        api.patch(object["metadata"]["name"].as_str().unwrap(), &PatchParams::apply("e2e").force(), &Patch::Apply(object)).await
    }

    /// The status of a WeightSync; `null` before the first.
    pub async fn status(&self, name: &str) -> Value {
        let object = self.weightsyncs().get_opt(name).await.expect("the API server answers");
        object.map_or(Value::Null, |object| object.data["status"].clone())
    }

    /// Changes the spec of a WeightSync.
    pub async fn patch_weightsync(&self, name: &str, patch: &Value) -> Result<DynamicObject, kube::Error> {
        self.weightsyncs().patch(name, &PatchParams::default(), &Patch::Merge(patch)).await
    }

    /// Deletes a WeightSync and waits until it is gone: there is no finalizer that could hold it.
    pub async fn delete_weightsync(&self, name: &str) {
        self.weightsyncs().delete(name, &DeleteParams::default()).await.expect("the object can be deleted");
        eventually("the object is gone", MINUTE, || async {
            match self.weightsyncs().get_opt(name).await.unwrap() {
                None => Ok(()),
                Some(object) => Err(format!("still there: {:?}", object.finalizers())),
            }
        })
        .await;
    }

    /// Waits until the status of a WeightSync satisfies `accept`, which says what is missing.
    pub async fn await_status<T>(&self, name: &str, what: &str, timeout: Duration, accept: impl Fn(&Value) -> Result<T, String>) -> T {
        eventually(what, timeout, || async {
            let status = self.status(name).await;
            accept(&status).map_err(|missing| format!("{missing}; status: {status}"))
        })
        .await
    }

    /// Waits until a trainer of one rank and this many ready replicas of one rank each are one group.
    pub async fn await_group(&self, name: &str, replicas: u64, timeout: Duration) {
        self.await_status(name, &format!("a group of {replicas} replicas"), timeout, |status| {
            let grouped = status["replicas"]["ready"] == replicas && status["worldSize"] == replicas + 1;
            if grouped { Ok(()) } else { Err("not grouped".to_owned()) }
        })
        .await;
    }

    /// Waits for a version that is installed everywhere: `replicas.ready == replicas.total == ready`.
    pub async fn await_version(&self, name: &str, version: u64, ready: u64, timeout: Duration) -> Value {
        self.await_status(name, &format!("version {version} on {ready} replicas"), timeout, |status| {
            let is = (status["version"].as_u64(), status["replicas"]["ready"].as_u64());
            if is == (Some(version), Some(ready)) { Ok(status.clone()) } else { Err(format!("is {is:?}")) }
        })
        .await
    }

    /// Waits until a pod satisfies `accept`.
    pub async fn await_pod<T>(&self, name: &str, what: &str, timeout: Duration, accept: impl Fn(&Pod) -> Result<T, String>) -> T {
        eventually(what, timeout, || async {
            let pod = self.api::<Pod>().get_opt(name).await.map_err(|error| error.to_string())?;
            accept(&pod.ok_or("the pod does not exist")?)
        })
        .await
    }

    /// Waits until a pod is Ready.
    pub async fn await_ready(&self, name: &str, timeout: Duration) {
        let accept = |pod: &Pod| if is_ready(pod) { Ok(()) } else { Err(describe(pod)) };
        self.await_pod(name, &format!("pod {name} is Ready"), timeout, accept).await;
    }

    /// Waits until a pod is not Ready.
    pub async fn await_not_ready(&self, name: &str, timeout: Duration) {
        let accept = |pod: &Pod| if is_ready(pod) { Err(describe(pod)) } else { Ok(()) };
        self.await_pod(name, &format!("pod {name} is not Ready"), timeout, accept).await;
    }

    /// Waits until a pod does not exist any more.
    pub async fn await_gone(&self, name: &str, timeout: Duration) {
        eventually(&format!("pod {name} is gone"), timeout, || async {
            match self.api::<Pod>().get_opt(name).await.map_err(|error| error.to_string())? {
                None => Ok(()),
                Some(pod) => Err(describe(&pod)),
            }
        })
        .await;
    }

    /// Deletes a pod at once, as a lost node would.
    pub async fn force_delete(&self, name: &str) {
        self.api::<Pod>().delete(name, &DeleteParams::default().grace_period(0)).await.expect("the pod can be deleted");
    }

    /// Waits for an Event with one of these reasons whose note satisfies `accept`.
    pub async fn await_event(&self, reasons: &[&str], timeout: Duration, accept: impl Fn(&str) -> bool) -> String {
        eventually(&format!("an Event {reasons:?}"), timeout, || async {
            let events = self.api::<Event>().list(&ListParams::default()).await.map_err(|error| error.to_string())?;
            let notes: Vec<_> =
                events.items.iter().map(|e| (e.reason.clone().unwrap_or_default(), e.note.clone().unwrap_or_default())).collect();
            let found = notes.iter().find(|(reason, note)| reasons.contains(&reason.as_str()) && accept(note));
            found.map(|(_, note)| note.clone()).ok_or_else(|| format!("events: {notes:?}"))
        })
        .await
    }

    /// Prints what a person would look at first.
    pub async fn tell_everything(&self) {
        let pods = self.api::<Pod>().list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default();
        for pod in &pods {
            eprintln!("--- pod {}: {}", pod.name_any(), describe(pod));
            let spec = pod.spec.as_ref().unwrap();
            let init = spec.init_containers.iter().flatten().map(|c| c.name.clone());
            let ephemeral = spec.ephemeral_containers.iter().flatten().map(|c| c.name.clone());
            for container in spec.containers.iter().map(|c| c.name.clone()).chain(init).chain(ephemeral) {
                let params = LogParams { container: Some(container.clone()), tail_lines: Some(40), ..LogParams::default() };
                let logs = self.api::<Pod>().logs(&pod.name_any(), &params).await.unwrap_or_else(|error| error.to_string());
                eprintln!("--- logs {}/{container}\n{logs}", pod.name_any());
            }
        }
        for object in self.weightsyncs().list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default() {
            eprintln!("--- weightsync {}: {}", object.name_any(), serde_json::to_string_pretty(&object.data["status"]).unwrap());
        }
        for event in self.api::<Event>().list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default() {
            eprintln!(
                "--- event {} {}: {}",
                event.regarding.and_then(|r| r.name).unwrap_or_default(),
                event.reason.unwrap_or_default(),
                event.note.unwrap_or_default()
            );
        }
    }
}

/// Whether the pod's Ready condition is True.
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Phase, conditions and container states in one line.
pub fn describe(pod: &Pod) -> String {
    let Some(status) = &pod.status else { return "no status".into() };
    let conditions: Vec<_> = status.conditions.iter().flatten().map(|c| format!("{}={}", c.type_, c.status)).collect();
    let containers = status.container_statuses.iter().flatten().chain(status.init_container_statuses.iter().flatten());
    let containers = containers.chain(status.ephemeral_container_statuses.iter().flatten());
    let states: Vec<_> = containers.map(|c| format!("{} ready={} restarts={} {:?}", c.name, c.ready, c.restart_count, c.state)).collect();
    format!("{:?} {conditions:?} {states:?}", status.phase)
}

/// Asks until the answer is `Ok`; fails with the last refusal after `timeout`. Each question may take 10 s. It asks less often the longer
/// it waits: questions cost time on the cores that the answer waits for.
pub async fn eventually<T, E, F, Fut>(what: &str, timeout: Duration, mut ask: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, E>>,
    E: Debug,
{
    let start = Instant::now();
    loop {
        let refusal = match tokio::time::timeout(Duration::from_secs(10), ask()).await {
            Ok(Ok(answer)) => return answer,
            Ok(Err(refusal)) => format!("{refusal:?}"),
            Err(_) => "no answer within 10 s".to_owned(),
        };
        let waited = start.elapsed();
        assert!(waited < timeout, "not within {timeout:?}: {what}: {refusal}");
        tokio::time::sleep((waited / 20).clamp(Duration::from_millis(50), Duration::from_millis(250))).await;
    }
}
