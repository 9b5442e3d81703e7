//! How the plugin reaches a cluster: by the kubeconfig, with the namespace and context of the options. Every call has a deadline.

use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use k8s_openapi::NamespaceResourceScope;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt};

use crate::api::WeightSync;

pub const DEADLINE: Duration = Duration::from_secs(15);

/// Options of every command that uses a cluster; named as in kubectl.
#[derive(Debug, Clone, Args)]
pub struct ClusterArgs {
    /// Namespace. Default: that of the context.
    #[arg(short, long)]
    namespace: Option<String>,
    /// Context of the kubeconfig.
    #[arg(long)]
    context: Option<String>,
}

#[derive(Clone)]
pub struct Access {
    pub client: Client,
    /// The namespace of the option, or of the context.
    pub namespace: String,
}

impl Access {
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

impl ClusterArgs {
    pub async fn access(&self) -> anyhow::Result<Access> {
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        let config = match Kubeconfig::read() {
            Ok(kubeconfig) => Config::from_custom_kubeconfig(kubeconfig, &options).await.context("the kubeconfig cannot be used")?,
            Err(_) if self.context.is_none() => Config::infer().await.context("no cluster is configured: set KUBECONFIG")?,
            Err(error) => bail!("the kubeconfig cannot be read: {error}"),
        };
        let namespace = self.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).context("no client for this cluster")?;
        Ok(Access { client, namespace })
    }

    pub async fn weightsyncs(&self) -> anyhow::Result<Api<WeightSync>> {
        Ok(self.access().await?.api())
    }
}

/// The result of a call, within [`DEADLINE`]. `what` names the failed action in an error, and so the right that may be missing.
pub async fn within<T, E>(what: &str, call: impl Future<Output = Result<T, E>>) -> anyhow::Result<T>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let answer = tokio::time::timeout(DEADLINE, call).await.context("the cluster did not respond within 15 s")?;
    answer.with_context(|| what.to_owned())
}

/// One object: the named one, or the only one of the namespace.
pub async fn find(api: &Api<WeightSync>, name: Option<&str>) -> anyhow::Result<WeightSync> {
    if let Some(name) = name {
        let found = within(&format!("WeightSync {name} cannot be read"), api.get_opt(name)).await?;
        return found.with_context(|| format!("there is no WeightSync {name} in this namespace: kubectl get weightsyncs --all-namespaces"));
    }
    let list = within("WeightSync objects cannot be listed", api.list(&ListParams::default())).await?;
    let names: Vec<_> = list.items.iter().map(ResourceExt::name_any).collect();
    match names.as_slice() {
        [] => bail!("there is no WeightSync in this namespace: kubectl get weightsyncs --all-namespaces"),
        [_] => list.items.into_iter().next().context("the list is empty"),
        _ => bail!("name one of: {}", names.join(", ")),
    }
}
