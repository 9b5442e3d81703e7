//! The certificate by which the API server knows the webhook: read from the folder where the chart's Secret is mounted, and shown to clients
//! that ask for the Service's name.
//!
//! Decides when it is read again, and what is reported: whether the webhook's configuration trusts it. It never writes to the cluster: the
//! content of a webhook's configuration cannot be bounded by RBAC, so the controller's account has no right to change one.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use kube::{Api, Client};
use tokio::io::AsyncReadExt;
use tokio::time::sleep;

use super::super::calls::{ApiError, Calls};
use super::super::metrics::ControllerMetrics;
use weightsync_net::identity::{Identity, IdentityError, verifies};

/// Name of the one webhook in the chart's configuration.
const NAME: &str = "inject.weightsync.dev";
/// From one look to the next: the kubelet brings a changed Secret within a minute or two.
const PERIOD: Duration = Duration::from_secs(10);
/// Longest file that is read, in bytes.
const LONGEST: u64 = 64 << 10;
/// A certificate that ends sooner is reported: there is time to replace it before pods are refused.
const AHEAD: Duration = Duration::from_secs(30 * 24 * 3600);

/// Where the certificate is, for whom, and which configuration must trust it.
pub(in super::super) struct Served {
    /// Folder with `tls.crt` and `tls.key`.
    pub(in super::super) folder: PathBuf,
    /// The Service's name, by which the API server connects.
    pub(in super::super) name: String,
    /// Name of the MutatingWebhookConfiguration.
    pub(in super::super) configuration: String,
}

/// Why the API server does not trust the webhook, or soon will not.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum Untrusted {
    #[error("{path} cannot be read: {source}; the Secret with the webhook's certificate must have it: helm upgrade makes it")]
    Unread { path: String, source: std::io::Error },
    #[error("the webhook's certificate cannot be served: {0}; delete its Secret and run helm upgrade")]
    Unusable(#[source] IdentityError),
    #[error("{0}")]
    Unasked(String),
    #[error("{configuration} has no webhook {NAME}: run helm upgrade")]
    NoWebhook { configuration: String },
    #[error("{configuration} has no caBundle: run helm upgrade")]
    NoBundle { configuration: String },
    #[error("the caBundle of {configuration} does not trust the webhook's certificate: {source}; run helm upgrade")]
    Stale { configuration: String, source: IdentityError },
    #[error("the webhook's certificate ends within 30 days: {0}; delete its Secret and run helm upgrade")]
    EndsSoon(#[source] IdentityError),
}

/// Serves the certificate, and reports whether it is trusted. Runs until its task is dropped.
pub(in super::super) async fn keep(served: Served, identity: Identity, client: Client, calls: Calls, metrics: ControllerMetrics) {
    let configurations: Api<MutatingWebhookConfiguration> = Api::all(client);
    let (mut shown, mut said) = (String::new(), String::new());
    loop {
        let looked = served.look(&identity, &configurations, calls, &mut shown).await;
        metrics.webhook_trusted.set(i64::from(looked.is_ok()));
        let text = looked.map_or_else(|error| error.to_string(), |()| String::new());
        if text != said {
            if text.is_empty() {
                tracing::info!(configuration = served.configuration, "the API server trusts the webhook");
            } else {
                tracing::warn!(error = text, "pods with the label weightsync.dev/role may be refused until this works");
            }
            said = text;
        }
        sleep(PERIOD).await;
    }
}

impl Served {
    /// One look: serves what the folder has, and compares it with the configuration. `shown` is the chain that is served.
    async fn look(
        &self,
        identity: &Identity,
        configurations: &Api<MutatingWebhookConfiguration>,
        calls: Calls,
        shown: &mut String,
    ) -> Result<(), Untrusted> {
        let (chain, key) = (read(&self.folder.join("tls.crt")).await?, read(&self.folder.join("tls.key")).await?);
        if chain != *shown {
            identity.serve_as(&self.name, &chain, &key).map_err(Untrusted::Unusable)?;
            shown.clone_from(&chain);
        }
        let what = format!("read MutatingWebhookConfiguration {}", self.configuration);
        let found = calls.run(what, configurations.get(&self.configuration)).await;
        let found = found.map_err(|error: ApiError| Untrusted::Unasked(error.to_string()))?;
        judge(&found, &self.configuration, &chain, &self.name, SystemTime::now())
    }
}

/// Whether the API server, with this configuration, trusts that chain at that time.
pub(in super::super) fn judge(
    found: &MutatingWebhookConfiguration,
    configuration: &str,
    chain: &str,
    name: &str,
    now: SystemTime,
) -> Result<(), Untrusted> {
    let configuration = || format!("MutatingWebhookConfiguration {configuration}");
    let webhook = found.webhooks.iter().flatten().find(|webhook| webhook.name == NAME);
    let webhook = webhook.ok_or_else(|| Untrusted::NoWebhook { configuration: configuration() })?;
    let bundle = webhook.client_config.ca_bundle.as_ref().filter(|bundle| !bundle.0.is_empty());
    let bundle = bundle.ok_or_else(|| Untrusted::NoBundle { configuration: configuration() })?;
    let bundle = String::from_utf8_lossy(&bundle.0);
    verifies(&bundle, chain, name, now).map_err(|source| Untrusted::Stale { configuration: configuration(), source })?;
    verifies(&bundle, chain, name, now + AHEAD).map_err(Untrusted::EndsSoon)
}

async fn read(path: &Path) -> Result<String, Untrusted> {
    let read = async {
        let mut text = String::new();
        tokio::fs::File::open(path).await?.take(LONGEST).read_to_string(&mut text).await?;
        std::io::Result::Ok(text)
    };
    read.await.map_err(|source| Untrusted::Unread { path: path.display().to_string(), source })
}
