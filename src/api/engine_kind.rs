//! The kind of an engine in the resource: one of the engines that [`weightsync_engine`] describes.
//!
//! Decides the names in the schema, and the rules for policies that an engine cannot keep, in CEL and in code. It must never name an engine:
//! a new one needs no change here.

use std::fmt;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::ValidationRule;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Delivery, KvCache, Pause, WeightSyncSpec};
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};
use weightsync_engine::{ENGINES, EngineDescriptor, Limit};

/// The kind of an engine.
#[derive(Clone, Copy)]
pub struct EngineKind(&'static EngineDescriptor);

impl EngineKind {
    /// The name in the agents' protocol, on command lines and in metrics.
    pub const fn name(self) -> &'static str {
        self.0.kind
    }

    /// The port on which its server listens unless it is given another one.
    pub fn port(self) -> i32 {
        self.0.port.into()
    }
}

impl From<&'static EngineDescriptor> for EngineKind {
    fn from(engine: &'static EngineDescriptor) -> Self {
        Self(engine)
    }
}

impl PartialEq for EngineKind {
    fn eq(&self, other: &Self) -> bool {
        self.0.api_kind == other.0.api_kind
    }
}

impl Eq for EngineKind {}

impl fmt::Debug for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.api_kind)
    }
}

impl Serialize for EngineKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.api_kind)
    }
}

impl<'de> Deserialize<'de> for EngineKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let kind = String::deserialize(deserializer)?;
        let found = ENGINES.iter().find(|engine| engine.api_kind == kind);
        found
            .map(|engine| Self(engine))
            .ok_or_else(|| D::Error::custom(format!("there is no engine {kind}: use one of {}", kinds(ENGINES).join(", "))))
    }
}

impl JsonSchema for EngineKind {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "EngineKind".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "enum": kinds(ENGINES)})
    }
}

fn kinds(engines: &[&EngineDescriptor]) -> Vec<&'static str> {
    engines.iter().map(|engine| engine.api_kind).collect()
}

/// The description of `engine.kind`: each kind, and what it needs.
pub(super) fn described() -> String {
    let each: Vec<String> = ENGINES.iter().map(|engine| format!("`{}`: {}.", engine.api_kind, engine.needs)).collect();
    format!("The kind of engine. {}", each.join(" "))
}

/// The description of `engine.ports`, with each default.
pub(super) fn ports_described() -> String {
    let each: Vec<String> = ENGINES.iter().map(|engine| format!("`{}` {}", engine.api_kind, engine.port)).collect();
    format!(
        "Ports of engines in the pod (at most 16); each is a separate replica. Default: the default port of the engine's kind ({}).",
        each.join(", ")
    )
}

/// The CEL rules of a spec for the policies that these engines cannot keep.
pub(super) fn rules(engines: &[&EngineDescriptor]) -> Vec<ValidationRule> {
    let of = |engine: &&EngineDescriptor| {
        let kind = engine.api_kind;
        engine.limits.iter().map(move |limit| rule(kind, limit)).collect::<Vec<_>>()
    };
    engines.iter().flat_map(of).collect()
}

fn rule(kind: &str, limit: &Limit) -> ValidationRule {
    let named = |name: String| format!("'{name}'");
    let pauses = [Pause::Keep, Pause::Drain, Pause::Abort, Pause::AbortAwake, Pause::External];
    let pauses: Vec<String> = pauses
        .into_iter()
        .filter(|pause| limit.pauses.contains(&PausePolicy::from(*pause)))
        .map(|pause| named(format!("{pause:?}")))
        .collect();
    let caches = [KvCache::Keep, KvCache::Reset];
    let kept: Vec<String> = caches
        .into_iter()
        .filter(|cache| limit.kv_caches.contains(&KvCachePolicy::from(*cache)))
        .map(|cache| named(format!("{cache:?}")))
        .collect();
    let mut keeps = format!("self.update.pause in [{}]", pauses.join(", "));
    if kept.len() < caches.len() {
        keeps = format!("({keeps} && self.update.kvCache in [{}])", kept.join(", "));
    }
    let delivered = if limit.in_groups { "self.delivery != 'Engine' || " } else { "" };
    ValidationRule {
        rule: format!("{delivered}{keeps} || !self.rollouts.exists(p, p.engine.kind == '{kind}')"),
        message: Some(limit.message()),
        ..ValidationRule::default()
    }
}

/// The messages of the same rules that a spec breaks.
pub(super) fn broken(spec: &WeightSyncSpec) -> Vec<String> {
    let (pause, kv_cache) = (PausePolicy::from(spec.update.pause), KvCachePolicy::from(spec.update.kv_cache));
    let mut engines: Vec<&EngineDescriptor> = Vec::new();
    for pool in &spec.rollouts {
        if engines.iter().all(|known| known.api_kind != pool.engine.kind.0.api_kind) {
            engines.push(pool.engine.kind.0);
        }
    }
    let counts = |limit: &&Limit| !limit.in_groups || spec.delivery == Delivery::Engine;
    engines
        .into_iter()
        .flat_map(|engine| engine.limits.iter().filter(counts))
        .filter(|limit| !limit.allows(pause, kv_cache))
        .map(Limit::message)
        .collect()
}

#[cfg(test)]
mod tests;
