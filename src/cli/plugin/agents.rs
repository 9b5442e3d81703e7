//! Finds agents and controllers: the pods of an object, the container with the agent, and the operator's pods.
//!
//! Pure except for its list calls.

use std::collections::BTreeSet;

use anyhow::{Context, bail};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};

use super::cluster::{Access, within};
use crate::api::WeightSync;
use crate::inject::{AGENT_CONTAINER, ROLE_LABEL};

/// Port of the controller's status pages.
pub(super) const CONTROLLER_STATUS: u16 = 8080;

/// Name of the container with a pod's agent; `None` if no known one exists.
pub(super) fn agent_of(pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    if spec.init_containers.iter().flatten().any(|container| container.name == AGENT_CONTAINER) {
        return Some(AGENT_CONTAINER.to_owned());
    }
    // `Wrap`, and `External`: the container's own command starts the agent.
    let runs = spec.containers.iter().find(|container| {
        let mut command = container.command.iter().flatten();
        let program = command.next().and_then(|program| program.rsplit('/').next());
        program == Some("weightsync") && command.next().is_some_and(|verb| verb == "run" || verb == "agent")
    });
    if let Some(container) = runs {
        return Some(container.name.clone());
    }
    // The last one: those before it have ended.
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| &container.name);
    ephemeral.rev().find(|name| name.starts_with(AGENT_CONTAINER)).cloned()
}

/// Pods of an object, the trainer's first, by status; pods that opted in and are in no status yet do not belong to it.
pub(super) fn pods_of(object: &WeightSync) -> Vec<String> {
    let members = object.status.iter().flat_map(|status| &status.members);
    let mut seen = BTreeSet::new();
    members.flat_map(|member| member.pods.iter().cloned()).filter(|pod| seen.insert(pod.clone())).collect()
}

/// Pods that opted in, by name.
pub(super) async fn opted_in(access: &Access) -> anyhow::Result<Vec<Pod>> {
    let list = access.api::<Pod>();
    let pods = within("pods cannot be listed", list.list(&ListParams::default().labels(ROLE_LABEL))).await?;
    Ok(pods.items)
}

/// The operator's Deployment in a cluster.
pub(super) struct Operator {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) deployment: Deployment,
}

/// Finds the operator; `wanted` is its namespace, if the user gave it.
pub(super) async fn operator(client: &Client, wanted: Option<&str>) -> anyhow::Result<Operator> {
    let deployments: Api<Deployment> = match wanted {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    let ours = ListParams::default().labels("app.kubernetes.io/name=weightsync");
    let what = "deployments cannot be listed (--operator-namespace lists one namespace only)";
    let mut found = within(what, deployments.list(&ours)).await?.items;
    let deployment = match (found.pop(), found.len()) {
        (None, _) => bail!("no installation found: no Deployment has the label app.kubernetes.io/name=weightsync"),
        (Some(one), 0) => one,
        (Some(_), more) => bail!("{} installations found: choose one with --operator-namespace", more + 1),
    };
    let (name, namespace) = (deployment.name_any(), deployment.namespace().unwrap_or_default());
    Ok(Operator { namespace, name, deployment })
}

impl Operator {
    pub(super) async fn pods(&self, client: &Client) -> anyhow::Result<Vec<Pod>> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), &self.namespace);
        let labels = "app.kubernetes.io/name=weightsync,app.kubernetes.io/component=controller";
        Ok(within("the controller's pods cannot be listed", pods.list(&ListParams::default().labels(labels))).await?.items)
    }

    pub(super) async fn leader(&self, client: &Client) -> anyhow::Result<String> {
        let leases: Api<Lease> = Api::namespaced(client.clone(), &self.namespace);
        let lease = within("the lease cannot be read", leases.get(&self.name)).await?;
        let holder = lease.spec.and_then(|spec| spec.holder_identity).filter(|holder| !holder.is_empty());
        holder.with_context(|| format!("no controller leads: kubectl -n {} logs deployment/{}", self.namespace, self.name))
    }
}

#[cfg(test)]
mod tests;
