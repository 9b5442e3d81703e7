//! The CRD as it is installed: the output of the derive macro, without what Kubernetes does not accept in a schema, and with the rules of
//! each engine.
//!
//! The macro marks `Option` fields as `nullable: true`. That would accept `null` instead of a missing field, and turn off defaults.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Map, Value};

use super::{WeightSync, engine_kind};
use weightsync_engine::ENGINES;

/// The CRD. Use this one: `WeightSync::crd()` lacks the last steps.
pub fn crd() -> Result<CustomResourceDefinition, serde_json::Error> {
    let mut crd = serde_json::to_value(WeightSync::crd())?;
    if let Some(schema) = crd.pointer_mut("/spec/versions/0/schema/openAPIV3Schema") {
        tidy(schema);
        if let Some(Value::Array(rules)) = schema.pointer_mut("/properties/spec/x-kubernetes-validations") {
            rules.extend(engine_kind::rules(ENGINES).iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?);
        }
    }
    serde_json::from_value(crd)
}

pub fn schema() -> Result<Value, serde_json::Error> {
    let mut crd = serde_json::to_value(crd()?)?;
    whole_numbers(&mut crd);
    Ok(crd.pointer("/spec/versions/0/schema/openAPIV3Schema").cloned().unwrap_or_default())
}

/// The CRD as the YAML document in `crds/weightsync.dev_weightsyncs.yaml`.
pub fn crd_yaml() -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
    let mut crd = serde_json::to_value(crd()?)?;
    whole_numbers(&mut crd);
    let yaml = serde_saphyr::to_string(&crd)?;
    Ok(format!("# Written by `weightsync generate crds` from the types in src/api. Do not edit.\n{}\n", yaml.trim_end()))
}

/// Removes `nullable` in a schema and everything below it.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            // A property may be called `nullable`; then it is a schema, not a flag.
            if fields.get("nullable").is_some_and(Value::is_boolean) {
                fields.remove("nullable");
            }
            fields.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

/// Writes limits as `100` rather than `100.0`: Kubernetes' type for them is a float, but all limits here are integers.
fn whole_numbers(value: &mut Value) {
    match value {
        Value::Object(fields) => fields.values_mut().for_each(whole_numbers),
        Value::Array(items) => items.iter_mut().for_each(whole_numbers),
        Value::Number(number) if number.is_f64() => {
            // Printed without a fraction, and exact below 2^53, which no limit here exceeds.
            if let Some(whole) = number.as_f64().and_then(|number| format!("{number}").parse::<i64>().ok()) {
                *value = whole.into();
            }
        }
        _ => {}
    }
}

/// The part of `value` that an API server keeps: unknown fields are dropped.
#[cfg(test)]
pub fn prune(schema: &Value, value: &Value) -> Value {
    walk(schema, value, "", &mut |_| {})
}

/// Paths of fields that the schema does not have: typing errors, or fields of a newer version of the API.
pub fn unknown_fields(schema: &Value, value: &Value) -> Vec<String> {
    let mut unknown = Vec::new();
    walk(schema, value, "", &mut |path| unknown.push(path));
    unknown
}

fn walk(schema: &Value, value: &Value, path: &str, unknown: &mut dyn FnMut(String)) -> Value {
    let keep_all = schema.get("x-kubernetes-preserve-unknown-fields").and_then(Value::as_bool).unwrap_or(false);
    match value {
        Value::Object(fields) => {
            let properties = schema.get("properties").and_then(Value::as_object);
            let others = schema.get("additionalProperties").filter(|others| others.is_object());
            let mut kept = Map::new();
            for (name, value) in fields {
                let here = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                if let Some(schema) = properties.and_then(|properties| properties.get(name)).or(others) {
                    kept.insert(name.clone(), walk(schema, value, &here, unknown));
                } else if keep_all || (path.is_empty() && matches!(name.as_str(), "apiVersion" | "kind" | "metadata")) {
                    kept.insert(name.clone(), value.clone());
                } else {
                    unknown(here);
                }
            }
            Value::Object(kept)
        }
        Value::Array(items) => {
            let schema = schema.get("items").unwrap_or(&Value::Null);
            Value::Array(items.iter().enumerate().map(|(at, item)| walk(schema, item, &format!("{path}[{at}]"), unknown)).collect())
        }
        other => other.clone(),
    }
}
