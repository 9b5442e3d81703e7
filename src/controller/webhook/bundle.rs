//! Writes the authority's certificate into the webhook's configuration, where the API server looks for it.
//!
//! Decides when to write: whenever the configuration has another one, or none. It never creates the configuration, and changes no other
//! field.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::super::calls::{ApiError, Calls};
use weightsync_net::backoff::Backoff;

/// Name of the one webhook in the chart's configuration.
pub(in super::super) const NAME: &str = "inject.weightsync.dev";
/// From one look at the configuration to the next: an upgrade of the chart may have removed the certificate.
const PERIOD: Duration = Duration::from_secs(10);

/// Keeps the certificate (PEM) in the configuration of this name. Runs until its task is dropped.
pub(in super::super) async fn keep_bundle(client: Client, calls: Calls, configuration: String, ca_pem: String) {
    let configurations: Api<MutatingWebhookConfiguration> = Api::all(client);
    // helm makes the configuration after the Deployment.
    let mut backoff = Backoff::new(Duration::from_millis(500), PERIOD);
    loop {
        let wait = match write(&configurations, calls, &configuration, &ca_pem).await {
            Ok(written) => {
                if written {
                    tracing::info!(configuration, "wrote the authority into the webhook's configuration");
                }
                backoff.succeeded();
                PERIOD
            }
            Err(error) => {
                tracing::warn!(%error, "pods with the label weightsync.dev/role may be refused until this works");
                backoff.failed()
            }
        };
        sleep(wait).await;
    }
}

/// Whether a write was needed.
async fn write(api: &Api<MutatingWebhookConfiguration>, calls: Calls, name: &str, ca_pem: &str) -> Result<bool, ApiError> {
    let found = calls.run(format!("read MutatingWebhookConfiguration {name}"), api.get(name)).await?;
    let Some(patch) = change(&found, ca_pem) else { return Ok(false) };
    let (parameters, patch) = (PatchParams::default(), Patch::Strategic(patch));
    let what = format!("write the authority into MutatingWebhookConfiguration {name}");
    calls.run(what, api.patch(name, &parameters, &patch)).await?;
    Ok(true)
}

/// The patch that a configuration needs. It holds for the version that was read only: a patch of a webhook that is gone would add half of one.
pub(super) fn change(found: &MutatingWebhookConfiguration, ca_pem: &str) -> Option<Value> {
    let webhook = found.webhooks.iter().flatten().find(|webhook| webhook.name == NAME)?;
    if webhook.client_config.ca_bundle == Some(ByteString(ca_pem.as_bytes().to_vec())) {
        return None;
    }
    Some(json!({
        "metadata": {"resourceVersion": found.metadata.resource_version},
        "webhooks": [{"name": NAME, "clientConfig": {"caBundle": STANDARD.encode(ca_pem)}}],
    }))
}
