//! A label selector with limits. Kubernetes' own type has no limits on its lists and strings, so the API server could not bound the cost of
//! CEL rules.

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
    /// Labels with their required value, such as `app: actor`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "match_labels")]
    pub match_labels: BTreeMap<String, String>,

    /// Requirements that are not a single value.
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

    /// The condition: `In` (it has one of the values), `NotIn` (it is absent or has none of them), `Exists` or `DoesNotExist`.
    pub operator: SelectorOperator,

    /// Values, for `In` and `NotIn`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 63)))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub values: Vec<String>,
}

/// The condition of a requirement: `In` (it has one of the values), `NotIn` (it is absent or has none of them), `Exists`, `DoesNotExist`.
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
