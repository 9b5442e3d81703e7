//! The operator's certificate authority: one Secret in the operator's own namespace, created by the first controller, and its certificate
//! in a ConfigMap for the injection policy. Writes carry the resourceVersion that was read, so two controllers that start at once agree.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;

use super::calls::{ApiError, Calls};
use weightsync_net::identity::{Ca, IdentityError};

const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const PUBLISHED: &str = "ca.crt";
/// Two controllers that start at once conflict once.
const TRIES: usize = 3;

#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("{0}")]
    Api(String),
    #[error("the authority in Secret {secret} cannot be used: {source}")]
    Unusable { secret: String, source: IdentityError },
    #[error("Secret {0} cannot be written: other clients changed it at each try")]
    Contended(String),
}

impl From<ApiError> for AuthorityError {
    fn from(error: ApiError) -> Self {
        Self::Api(error.to_string())
    }
}

/// Reads the authority from Secret `NAME-ca`, or creates it; then publishes its certificate in the ConfigMap of that name.
pub(super) async fn load(client: &Client, calls: Calls, namespace: &str, name: &str) -> Result<Ca, AuthorityError> {
    let secret_name = format!("{name}-ca");
    let ca = read_or_make(&Api::namespaced(client.clone(), namespace), calls, &secret_name).await?;
    let published: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let patch = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": secret_name},
        "data": {PUBLISHED: ca.certificate_pem()},
    });
    let params = PatchParams::apply("weightsync-controller").force();
    calls
        .run(format!("publish the authority in ConfigMap {secret_name}"), published.patch(&secret_name, &params, &Patch::Apply(patch)))
        .await?;
    Ok(ca)
}

async fn read_or_make(secrets: &Api<Secret>, calls: Calls, name: &str) -> Result<Ca, AuthorityError> {
    let unusable = |source| AuthorityError::Unusable { secret: name.to_owned(), source };
    for _ in 0..TRIES {
        let mut secret = calls.run(format!("read Secret {name}"), secrets.get(name)).await?;
        let data = secret.data.get_or_insert_default();
        if let (Some(certificate), Some(key)) = (text(data, CERTIFICATE), text(data, KEY)) {
            return Ca::from_pem(&certificate, &key).map_err(unusable);
        }
        let ca = Ca::generate().map_err(unusable)?;
        data.insert(CERTIFICATE.to_owned(), ByteString(ca.certificate_pem().as_bytes().to_vec()));
        data.insert(KEY.to_owned(), ByteString(ca.key_pem().into_bytes()));
        match calls.run(format!("write Secret {name}"), secrets.replace(name, &PostParams::default(), &secret)).await {
            Ok(_) => {
                tracing::info!(secret = name, "created a certificate authority");
                return Ok(ca);
            }
            Err(error) if error.is_conflict() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(AuthorityError::Contended(name.to_owned()))
}

fn text(data: &BTreeMap<String, ByteString>, key: &str) -> Option<String> {
    let bytes = &data.get(key)?.0;
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(bytes).into_owned())
}
