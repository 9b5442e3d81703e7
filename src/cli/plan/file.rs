//! Reads manifests: WeightSync objects, pods, and workloads that would create pods. Other kinds are ignored.

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use super::super::manifests;
use super::expand;
use crate::api::{WeightSync, not_ready, pod_facts, read_document};
use weightsync_core::plan::{PodFacts, PodPhase};

#[derive(Default)]
pub(super) struct Manifests {
    pub(super) objects: Vec<Read>,
    pods: Vec<Pod>,
}

pub(super) struct Read {
    pub(super) object: WeightSync,
    pub(super) namespace: String,
    /// Fields that the API does not have.
    pub(super) unknown: Vec<String>,
}

impl Manifests {
    /// Reads files, folders, or standard input.
    pub(super) fn read(&mut self, paths: &[PathBuf]) -> anyhow::Result<()> {
        for (path, text) in manifests::read(paths)? {
            self.parse(&text).with_context(|| format!("{} cannot be parsed", path.display()))?;
        }
        Ok(())
    }

    pub(super) fn parse(&mut self, text: &str) -> anyhow::Result<()> {
        let documents: Vec<Value> = serde_saphyr::from_multiple(text).map_err(|error| anyhow!("{error}"))?;
        documents.into_iter().try_for_each(|document| self.take(document))
    }

    fn take(&mut self, document: Value) -> anyhow::Result<()> {
        let kind = document.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
        if kind == "WeightSync" {
            return self.take_object(&document);
        }
        if kind.ends_with("List") {
            let items = document.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
            return items.into_iter().try_for_each(|item| self.take(item));
        }
        let name = document.pointer("/metadata/name").and_then(Value::as_str).unwrap_or("without a name").to_owned();
        self.pods.extend(expand::pods(&kind, document).with_context(|| format!("{kind} {name}"))?);
        Ok(())
    }

    fn take_object(&mut self, document: &Value) -> anyhow::Result<()> {
        let (object, unknown) = read_document(document)?;
        let namespace = object.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
        self.objects.push(Read { object, namespace, unknown });
        Ok(())
    }

    /// The pods of a namespace. A pod without status is planned as if it ran and were ready.
    pub(super) fn pods(&self, namespace: &str) -> Vec<PodFacts> {
        let here = self.pods.iter().filter(|pod| pod.metadata.namespace.as_deref().unwrap_or("default") == namespace);
        here.map(|pod| {
            if pod.status.is_some() {
                return pod_facts(pod, not_ready(pod));
            }
            let mut facts = pod_facts(pod, None);
            facts.phase = PodPhase::Running;
            if facts.uid.is_empty() {
                facts.uid = format!("{namespace}/{}", facts.name);
            }
            facts
        })
        .collect()
    }
}
