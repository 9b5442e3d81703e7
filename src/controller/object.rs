//! One `WeightSync` from a watch: parsed, or the known parts of one that cannot be parsed.
//!
//! It never fails for the content of an object: one that cannot be parsed must not stop the watch of all others, and must not lose its
//! status.

use std::borrow::Cow;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::api::WeightSync;

/// The known parts of an object that cannot be parsed.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Unreadable {
    pub(super) metadata: ObjectMeta,
    /// The cause in words.
    pub(super) error: String,
    /// Its status as stored: a write keeps all of it.
    pub(super) status: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Object(pub(super) Result<WeightSync, Unreadable>);

impl Object {
    /// Term of the leader that wrote its epoch last.
    pub(super) fn term(&self) -> Option<u64> {
        match &self.0 {
            Ok(readable) => readable.status.as_ref().and_then(|status| u64::try_from(status.term?).ok()),
            Err(unreadable) => unreadable.status.get("term").and_then(Value::as_u64),
        }
    }
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let stored = Value::deserialize(deserializer)?;
        let error = match WeightSync::deserialize(&stored) {
            Ok(readable) => return Ok(Self(Ok(readable))),
            Err(error) => error.to_string(),
        };
        let metadata = stored.get("metadata").map(ObjectMeta::deserialize).transpose().map_err(serde::de::Error::custom)?;
        let status = stored.get("status").and_then(Value::as_object).cloned().unwrap_or_default();
        Ok(Self(Err(Unreadable { metadata: metadata.unwrap_or_default(), error, status })))
    }
}

/// Required by kube's trait bounds; watches only read objects.
impl Serialize for Object {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            Ok(readable) => readable.serialize(serializer),
            Err(unreadable) => unreadable.metadata.serialize(serializer),
        }
    }
}

impl Resource for Object {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        WeightSync::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        WeightSync::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        WeightSync::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        WeightSync::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        match &self.0 {
            Ok(readable) => &readable.metadata,
            Err(unreadable) => &unreadable.metadata,
        }
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match &mut self.0 {
            Ok(readable) => &mut readable.metadata,
            Err(unreadable) => &mut unreadable.metadata,
        }
    }
}
