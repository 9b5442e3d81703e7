//! Fills an empty API server: namespaces, nodes, objects, pods, which KWOK makes ready as a kubelet would, and the tokens of their agents.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Secret, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::PostParams;
use kube::runtime::WatchStreamExt;
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::timeout;
use weightsync::api::{WeightSync, crd};
use weightsync_core::protocol::Role;
use weightsync_net::identity::Ca;

/// Requests to the API server at once.
const AT_ONCE: usize = 32;
/// KWOK makes one more pod ready within this long.
const SILENCE: Duration = Duration::from_secs(60);
/// Namespace of the controller.
pub const SYSTEM: &str = "weightsync-system";
/// Name of the installation.
pub const NAME: &str = "weightsync";
const ACCOUNT: &str = "agent";
const ENGINE_PORT: u16 = 8000;

/// How much there is.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    pub objects: usize,
    pub rollouts: usize,
    pub per_namespace: usize,
}

/// A pod and what its agent needs.
pub struct Place {
    /// Number of its object.
    pub object: usize,
    pub namespace: String,
    pub pod: String,
    pub uid: String,
    pub ip: IpAddr,
    pub role: Role,
    pub token: String,
}

impl Extent {
    pub fn pods(&self) -> usize {
        self.objects * (1 + self.rollouts)
    }

    fn namespace(&self, object: usize) -> String {
        format!("team-{:03}", object / self.per_namespace)
    }
}

pub fn object_name(object: usize) -> String {
    format!("run-{object:04}")
}

/// Makes everything; the pods of all objects.
pub async fn fill(client: &Client, extent: Extent, ca: &Ca) -> Result<Vec<Place>> {
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    crds.create(&PostParams::default(), &crd()?).await?;
    await_condition(crds, "weightsyncs.weightsync.dev", conditions::is_crd_established()).await?;
    let mut namespaces: Vec<String> = (0..extent.objects).map(|object| extent.namespace(object)).collect();
    namespaces.dedup();
    for name in namespaces.iter().map(String::as_str).chain([SYSTEM]) {
        create::<Namespace>(&Api::all(client.clone()), json!({"metadata": {"name": name}})).await?;
        create::<ServiceAccount>(&Api::namespaced(client.clone(), name), json!({"metadata": {"name": ACCOUNT}})).await?;
    }
    let secret = json!({
        "metadata": {"name": format!("{NAME}-ca")},
        "stringData": {"tls.crt": ca.certificate_pem(), "tls.key": ca.key_pem()},
    });
    create::<Secret>(&Api::namespaced(client.clone(), SYSTEM), secret).await?;

    let nodes = (0..extent.objects).map(|object| {
        let nodes: Api<Node> = Api::all(client.clone());
        let range = format!("127.{}.{}.0/24", 1 + object / 256, object % 256);
        async move { create(&nodes, json!({"metadata": {"name": node(object)}, "spec": {"podCIDR": range, "podCIDRs": [range]}})).await }
    });
    futures::stream::iter(nodes).buffer_unordered(AT_ONCE).try_collect::<Vec<Node>>().await?;
    let pods = (0..extent.pods()).map(|number| pod(client.clone(), extent, number));
    futures::stream::iter(pods).buffer_unordered(AT_ONCE).try_collect::<Vec<Pod>>().await?;
    let mut ready = ready(client, extent).await?;
    let places = (0..extent.pods()).filter_map(|number| ready.remove(&member(extent, number).1).map(|pod| (number, pod)));
    let places = places.map(|(number, pod)| place(client.clone(), extent, number, pod));
    let places = futures::stream::iter(places).buffer_unordered(AT_ONCE).try_collect().await?;
    let objects = (0..extent.objects).map(|object| {
        let objects: Api<WeightSync> = Api::namespaced(client.clone(), &extent.namespace(object));
        async move { create(&objects, weightsync(object)).await }
    });
    futures::stream::iter(objects).buffer_unordered(AT_ONCE).try_collect::<Vec<WeightSync>>().await?;
    Ok(places)
}

async fn create<K>(api: &Api<K>, object: Value) -> Result<K>
where
    K: kube::Resource + Clone + std::fmt::Debug + DeserializeOwned + serde::Serialize,
{
    Ok(api.create(&PostParams::default(), &serde_json::from_value(object)?).await?)
}

fn node(object: usize) -> String {
    format!("node-{object:04}")
}

fn weightsync(object: usize) -> Value {
    let group = object_name(object);
    json!({
        "apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync",
        "metadata": {"name": group},
        "spec": {
            "trainer": {"selector": {"matchLabels": {"run": group, "part": "trainer"}}},
            "rollouts": [{
                "name": "actors",
                "selector": {"matchLabels": {"run": group, "part": "actor"}},
                "engine": {"kind": "VLLM", "ports": [ENGINE_PORT]},
            }],
        },
    })
}

/// Name of a pod, and of its agent's part in the group.
fn member(extent: Extent, number: usize) -> (usize, String, Role) {
    let (object, member) = (number / (1 + extent.rollouts), number % (1 + extent.rollouts));
    match member {
        0 => (object, format!("{}-trainer-0", object_name(object)), Role::Source),
        _ => (object, format!("{}-actor-{}", object_name(object), member - 1), Role::Rollout),
    }
}

/// Makes one pod, on the node of its object.
async fn pod(client: Client, extent: Extent, number: usize) -> Result<Pod> {
    let (object, name, role) = member(extent, number);
    let (part, consent) = if role == Role::Source { ("trainer", "trainer") } else { ("actor", "rollout") };
    // As large as pods of this kind are: the controller keeps them all.
    let env: Vec<Value> = (0..20).map(|number| json!({"name": format!("SETTING_{number}"), "value": "a value as long as many"})).collect();
    let pod = json!({
        "metadata": {"name": name, "labels": {"run": object_name(object), "part": part, "weightsync.dev/role": consent}},
        "spec": {
            "serviceAccountName": ACCOUNT, "automountServiceAccountToken": false, "nodeName": node(object),
            "containers": [{
                "name": part, "image": "registry.example/engine:1", "args": ["serve", "/models/base", "--served-model-name=m"], "env": env,
                "ports": [{"containerPort": ENGINE_PORT}], "resources": {"limits": {"cpu": "8", "memory": "64Gi"}},
            }],
        },
    });
    create(&Api::namespaced(client, &extent.namespace(object)), pod).await
}

/// Waits until KWOK made every pod ready; their uids by name.
async fn ready(client: &Client, extent: Extent) -> Result<HashMap<String, String>> {
    let mut ready = HashMap::new();
    let mut seen = std::pin::pin!(watcher(Api::<Pod>::all(client.clone()), watcher::Config::default()).default_backoff().applied_objects());
    while ready.len() < extent.pods() {
        let next = timeout(SILENCE, seen.next()).await;
        let next = next.with_context(|| format!("{} of {} pods are ready, and KWOK does no more", ready.len(), extent.pods()))?;
        let Some(Ok(pod)) = next else { continue };
        let status = pod.status.clone().unwrap_or_default();
        let is_ready = status.conditions.iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True");
        if is_ready {
            ready.insert(pod.name_any(), pod.uid().unwrap_or_default());
        }
    }
    Ok(ready)
}

/// Has a token made for the agent of one pod.
async fn place(client: Client, extent: Extent, number: usize, uid: String) -> Result<Place> {
    let (object, pod, role) = member(extent, number);
    // Its own, because KWOK 0.8 gives two pods of a node that it makes ready at once the same address.
    let bytes = u32::try_from(number + 0x1_0000)?.to_be_bytes();
    let ip = IpAddr::from(Ipv4Addr::new(127, bytes[1], bytes[2], bytes[3]));
    let namespace = extent.namespace(object);
    let bound =
        BoundObjectReference { kind: Some("Pod".into()), api_version: Some("v1".into()), name: Some(pod.clone()), uid: Some(uid.clone()) };
    let spec =
        TokenRequestSpec { audiences: vec!["weightsync.dev".into()], bound_object_ref: Some(bound), expiration_seconds: Some(24 * 3600) };
    let request = TokenRequest { spec, ..TokenRequest::default() };
    let accounts: Api<ServiceAccount> = Api::namespaced(client, &namespace);
    let answer = accounts.create_token_request(ACCOUNT, &PostParams::default(), &request).await?;
    let token = answer.status.map(|status| status.token).unwrap_or_default();
    Ok(Place { object, namespace, pod, uid, ip, role, token })
}
