//! Injection: adds the agent to pods and manifests, as a sidecar or as the parent of the container's own command.
//!
//! `kubectl weightsync inject` and the controller's webhook use it. Decides which documents hold a pod template that opts in (label
//! `weightsync.dev/role`) and what is added; the lines are those of the chart's injection policies. It never calls a cluster and never
//! changes anything else in a document.

mod lines;
mod sidecar;
mod wrap;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::api::CONTAINER_ANNOTATION;
pub use weightsync_agent::command::{PROBE_PORT, STATUS_PORT};
pub use weightsync_core::plan::ROLE_LABEL;

pub const AGENT_CONTAINER: &str = "weightsync-agent";
/// Name of the init container that copies the program into a wrapped pod, and of the volume that it copies to.
pub const PROGRAM_CONTAINER: &str = "weightsync-program";
/// Annotation `SECRET/KEY` of the engine's API key.
pub const API_KEY_ANNOTATION: &str = "weightsync.dev/api-key-secret";

/// Annotation with the users that may publish in addition to the agent's own: ids separated by commas, or `any`.
pub const USERS_ANNOTATION: &str = "weightsync.dev/trainer-uids";

/// Annotation with the seconds after which a pod that no operator claims becomes ready; without it, it never does.
pub const SERVE_UNCLAIMED_ANNOTATION: &str = "weightsync.dev/serve-unclaimed-after-seconds";

/// Annotation that chooses how the agent is added: `sidecar` (default), `wrap` or `false`.
pub const HOW_ANNOTATION: &str = "weightsync.dev/inject";

/// Facts of the installation that the injected lines contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    pub image: String,
    pub image_pull_policy: String,
    /// URL of the controller's enrolment service.
    pub controller_url: String,
    /// PEM of the CA that the controller's certificate is checked with.
    pub controller_ca: String,
    /// Requests and limits of the added containers.
    pub resources: Resources,
    /// Limit of the volume at /dev/shm that a pod gets.
    pub shared_memory: Option<String>,
    /// Names of Secrets for pulling the image, added to those that a pod has.
    pub image_pull_secrets: Vec<String>,
}

/// Amounts by the names of their resources, as a container has them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Resources {
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, String>,
}

/// The pod's settings in labels and annotations.
struct Wishes<'a> {
    role: &'a str,
    api_key: Option<&'a (String, String)>,
    users: Option<&'a str>,
    serve_unclaimed_after: Option<u32>,
}

/// Why a document cannot be changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InjectError {
    #[error("{what}: label {ROLE_LABEL} is \"{role}\"; it must be trainer or rollout")]
    UnknownRole { what: String, role: String },
    #[error("{what}: annotation {CONTAINER_ANNOTATION} names \"{container}\", but the containers are {present:?}")]
    UnknownContainer { what: String, container: String, present: Vec<String> },
    #[error("{what}: annotation {API_KEY_ANNOTATION} must be SECRET/KEY, not \"{value}\"")]
    BadKeyReference { what: String, value: String },
    #[error("{what}: annotation {SERVE_UNCLAIMED_ANNOTATION} must be a number of seconds, not \"{value}\"")]
    BadSeconds { what: String, value: String },
    #[error("{what}: annotation {HOW_ANNOTATION} is \"{value}\"; it must be sidecar, wrap or false")]
    UnknownWay { what: String, value: String },
    #[error(
        "{what}: container {container} cannot be wrapped: its command stands in its image only. Write the Entrypoint that `docker inspect \
         IMAGE` shows into the template, as `command: [vllm, serve]` for instance (and its Cmd as args, where the template has none); args \
         stay as they are. Or leave the annotation {HOW_ANNOTATION}: wrap out, for a sidecar"
    )]
    NoCommand { what: String, container: String },
    #[error("{what}: {field} is not what Kubernetes expects there")]
    Malformed { what: String, field: &'static str },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injected {
    /// `Kind/name` of the document.
    pub what: String,
    /// Pod templates that got the agent.
    pub templates: usize,
}

/// Adds the agent to every pod template of `document` that opts in and does not have it yet.
pub fn inject(document: &mut Value, options: &Options) -> Result<Injected, InjectError> {
    let what = describe(document);
    let mut templates = 0;
    if document.get("kind").and_then(Value::as_str) == Some("List") {
        if let Some(items) = document.get_mut("items").and_then(Value::as_array_mut) {
            for item in items {
                templates += inject(item, options)?.templates;
            }
        }
    } else {
        walk(document, options, &what, &mut templates)?;
    }
    Ok(Injected { what, templates })
}

/// A pod template is any object with `metadata` and `spec.containers`: this finds those of Deployments, StatefulSets, Jobs,
/// LeaderWorkerSets (`leaderTemplate`, `workerTemplate`), RayClusters and kinds that do not exist yet.
fn walk(value: &mut Value, options: &Options, what: &str, templates: &mut usize) -> Result<(), InjectError> {
    match value {
        Value::Object(object) => {
            if object.get("spec").and_then(|spec| spec.get("containers")).is_some_and(Value::is_array) {
                *templates += usize::from(inject_pod(object, options, what)?);
                return Ok(());
            }
            for (key, inner) in object.iter_mut() {
                if key != "metadata" && key != "status" {
                    walk(inner, options, what, templates)?;
                }
            }
            Ok(())
        }
        Value::Array(items) => items.iter_mut().try_for_each(|item| walk(item, options, what, templates)),
        _ => Ok(()),
    }
}

fn inject_pod(pod: &mut Map<String, Value>, options: &Options, what: &str) -> Result<bool, InjectError> {
    let text = |section: &str, key: &str| {
        pod.get("metadata").and_then(|m| m.get(section)).and_then(|s| s.get(key)).and_then(Value::as_str).map(str::to_owned)
    };
    let Some(role) = text("labels", ROLE_LABEL) else { return Ok(false) };
    if role != "trainer" && role != "rollout" {
        return Err(InjectError::UnknownRole { what: what.into(), role });
    }
    let wraps = match text("annotations", HOW_ANNOTATION).as_deref() {
        Some("false") => return Ok(false),
        None | Some("true" | "sidecar") => false,
        Some("wrap") => true,
        Some(value) => return Err(InjectError::UnknownWay { what: what.into(), value: value.into() }),
    };
    let wanted = text("annotations", CONTAINER_ANNOTATION);
    let key = match text("annotations", API_KEY_ANNOTATION) {
        None => None,
        Some(value) => match value.split_once('/') {
            Some((secret, key)) if !secret.is_empty() && !key.is_empty() => Some((secret.to_owned(), key.to_owned())),
            _ => return Err(InjectError::BadKeyReference { what: what.into(), value }),
        },
    };
    let users = text("annotations", USERS_ANNOTATION);
    let serve_unclaimed_after = match text("annotations", SERVE_UNCLAIMED_ANNOTATION) {
        None => None,
        Some(value) => Some(value.parse().map_err(|_| InjectError::BadSeconds { what: what.into(), value })?),
    };
    let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) else {
        return Err(InjectError::Malformed { what: what.into(), field: "spec" });
    };
    if names(spec, "initContainers").iter().any(|name| name == AGENT_CONTAINER || name == PROGRAM_CONTAINER) {
        return Ok(false);
    }
    let present = names(spec, "containers");
    let Some(target) = wanted.or_else(|| present.first().cloned()) else {
        return Err(InjectError::Malformed { what: what.into(), field: "spec.containers" });
    };
    if !present.contains(&target) {
        return Err(InjectError::UnknownContainer { what: what.into(), container: target, present });
    }
    let wishes = Wishes { role: &role, api_key: key.as_ref(), users: users.as_deref(), serve_unclaimed_after };
    let added = if wraps {
        wrap::add(spec, &target, &wishes, options)
    } else {
        sidecar::add(spec, &target, &wishes, options).map_err(wrap::WrapError::Malformed)
    };
    added.map_err(|error| match error {
        wrap::WrapError::NoCommand => InjectError::NoCommand { what: what.into(), container: target },
        wrap::WrapError::Malformed(field) => InjectError::Malformed { what: what.into(), field },
    })?;
    Ok(true)
}

fn on_host(spec: &Map<String, Value>) -> bool {
    spec.get("hostNetwork").and_then(Value::as_bool) == Some(true)
}

fn names(spec: &Map<String, Value>, list: &str) -> Vec<String> {
    let items = spec.get(list).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    items.iter().filter_map(|item| item.get("name").and_then(Value::as_str)).map(str::to_owned).collect()
}

fn describe(document: &Value) -> String {
    let kind = document.get("kind").and_then(Value::as_str).unwrap_or("document without a kind");
    let name = document.get("metadata").and_then(|m| m.get("name").or_else(|| m.get("generateName"))).and_then(Value::as_str);
    format!("{kind}/{}", name.unwrap_or("?"))
}

#[cfg(test)]
mod tests;
