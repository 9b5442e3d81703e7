//! A label selector with limits. The type of Kubernetes itself has none on its lists and strings, so no cost could be given for rules.

use std::collections::BTreeMap;

use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Selects pods of the object's namespace by their labels. All requirements must hold. Of the pods found, only those with the label
/// `weightsync.dev/role` take part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.matchLabels) && self.matchLabels.size() > 0) || (has(self.matchExpressions) && self.matchExpressions.size() > 0)")
    .message("an empty selector would mean every pod: name at least one label in matchLabels or matchExpressions"))]
pub struct PodSelector {
    /// Labels with their value.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "match_labels")]
    pub match_labels: BTreeMap<String, String>,

    /// Requirements beyond a single value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub match_expressions: Vec<SelectorRequirement>,
}

/// One requirement of a selector.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)")
    .message("values must be given for In and NotIn, and not for Exists and DoesNotExist"))]
pub struct SelectorRequirement {
    /// The label.
    #[schemars(length(min = 1, max = 317))]
    pub key: String,

    /// What is asked of it: `In` (it has one of the values), `NotIn` (it is absent or has none of them), `Exists` or `DoesNotExist`.
    pub operator: SelectorOperator,

    /// Values, for `In` and `NotIn`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 63)))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub values: Vec<String>,
}

/// What a requirement asks of a label: `In` (it has one of the values), `NotIn` (it is absent or has none of them), `Exists`,
/// `DoesNotExist`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SelectorOperator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

fn match_labels(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 16,
        "additionalProperties": {"type": "string", "maxLength": 63},
    })
}
