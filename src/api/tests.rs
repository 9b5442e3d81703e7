//! Tests of the resource: its schema, its rules in both forms, its conversions, and the examples of the documentation.

mod convert;
mod examples;
mod hostile;
mod pods;
mod pruning;
mod rules;
mod schema;

use serde_json::{Value, json};

/// The least that a user must say.
pub(super) fn least() -> Value {
    json!({
        "apiVersion": "weightsync.dev/v1alpha1",
        "kind": "WeightSync",
        "metadata": {"name": "grpo", "namespace": "rl"},
        "spec": {
            "trainer": {"selector": {"matchLabels": {"app": "trainer"}}},
            "rollouts": [{"name": "actors", "selector": {"matchLabels": {"app": "actor"}}, "engine": {"kind": "VLLM"}}],
        },
    })
}
