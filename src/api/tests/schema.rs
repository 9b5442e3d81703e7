//! The schema as Kubernetes wants it, and the files that are made from it.

use std::fs;
use std::path::Path;

use kube::core::cel::{ScopeContext, WarningKind, analyze_rule, compile_schema};
use serde_json::Value;

use crate::api::{crd, crd_yaml, schema};

fn each(path: &str, schema: &Value, check: &mut dyn FnMut(&str, &Value)) {
    check(path, schema);
    for (name, field) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        each(&format!("{path}.{name}"), field, check);
    }
    if let Some(items) = schema.get("items") {
        each(&format!("{path}[]"), items, check);
    }
    if let Some(values) = schema.get("additionalProperties").filter(|values| values.is_object()) {
        each(&format!("{path}{{}}"), values, check);
    }
}

#[test]
fn schema_has_no_null_float_or_unsigned_number() {
    let mut wrong = Vec::new();
    each("", &schema().unwrap(), &mut |path, schema| {
        for forbidden in ["nullable", "oneOf", "anyOf", "allOf", "not", "$ref", "x-kubernetes-preserve-unknown-fields"] {
            if schema.get(forbidden).is_some() {
                wrong.push(format!("{path} has {forbidden}"));
            }
        }
        let kind = schema.get("type").and_then(Value::as_str);
        if kind == Some("number") || (kind.is_none() && schema.get("x-kubernetes-int-or-string").is_none()) {
            wrong.push(format!("{path} has the type {kind:?}"));
        }
        if let Some(format) = schema.get("format").and_then(Value::as_str)
            && !["int32", "int64", "date-time"].contains(&format)
        {
            wrong.push(format!("{path} has the format {format}"));
        }
        if path.rsplit('.').next() == Some("phase") || path.to_lowercase().contains("duration") {
            wrong.push(format!("{path}: say the unit in the name, and a condition rather than a phase"));
        }
    });
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn every_list_map_string_and_number_of_the_spec_has_limits() {
    let mut wrong = Vec::new();
    each("", &schema().unwrap(), &mut |path, schema| {
        let has = |key: &str| schema.get(key).is_some();
        let missing = match schema.get("type").and_then(Value::as_str) {
            Some("array") => !has("maxItems") || !has("x-kubernetes-list-type"),
            Some("string") => !has("maxLength") && !has("enum") && !has("format"),
            Some("object") => has("additionalProperties") && !has("maxProperties"),
            Some("integer") => path.starts_with(".spec") && !(has("minimum") && has("maximum")),
            _ => false,
        };
        if missing {
            wrong.push(path.to_owned());
        }
    });
    assert_eq!(wrong, Vec::<String>::new(), "fields without limits");
}

#[test]
fn lists_of_objects_are_merged_by_key_and_the_keys_are_required() {
    let atomic = [".spec.trainer.selector.matchExpressions", ".spec.rollouts[].selector.matchExpressions"];
    let mut seen = 0;
    each("", &schema().unwrap(), &mut |path, schema| {
        if schema.pointer("/items/type").and_then(Value::as_str) == Some("object") && !atomic.contains(&path) {
            seen += 1;
            assert_eq!(schema["x-kubernetes-list-type"], "map", "{path}");
            for key in schema["x-kubernetes-list-map-keys"].as_array().unwrap() {
                assert!(schema["items"]["required"].as_array().unwrap().contains(key), "{path}: {key} is not required");
            }
        }
    });
    assert_eq!(seen, 6, "rollouts, conditions, members, phases, edges, devices");
}

#[test]
fn every_field_is_described() {
    let mut wrong = Vec::new();
    each("", &schema().unwrap(), &mut |path, schema| {
        let described = schema.get("description").and_then(Value::as_str).is_some_and(|text| text.len() > 3);
        let scalar_item = (path.ends_with("[]") || path.ends_with("{}")) && schema.get("type").and_then(Value::as_str) != Some("object");
        if !described && !scalar_item {
            wrong.push(path.to_owned());
        }
    });
    assert_eq!(wrong, Vec::<String>::new(), "fields without a description");
}

#[test]
fn rules_use_api_server_data_within_its_budget() {
    let root = schema().unwrap();
    let mut rules = 0;
    each("", &root, &mut |path, schema| {
        for rule in schema.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten() {
            rules += 1;
            let text = rule["rule"].as_str().unwrap();
            let compiled = compile_schema(schema);
            assert!(!compiled.has_errors(), "{path}: {:?}", compiled.compilation_errors());
            let warnings = analyze_rule(text, &compiled, ScopeContext::CrdValidation);
            // The analysis takes the variables of `all(p, ...)` for free ones; ours are single letters.
            let bound = |message: &str| ["'n'", "'m'", "'p'"].iter().any(|name| message.starts_with(&format!("variable {name}")));
            let warnings: Vec<_> = warnings
                .into_iter()
                .filter(|warning| warning.kind != WarningKind::MissingBounds)
                .filter(|warning| warning.kind != WarningKind::WrongScope || !bound(&warning.message))
                .collect();
            assert!(warnings.is_empty(), "{path}: {warnings:?}");
            assert!(cost(text, path, &root) < 10_000_000, "{path}: {text} costs {}", cost(text, path, &root));
        }
    });
    assert!(rules > 15, "{rules} rules were looked at");
}

/// What the API server reckons, roughly: a rule is counted as often as the lists above it may be long; each round of a loop costs about
/// six, and a comparison of strings a tenth of their bytes, four a character. (Its budget for one rule is 10 million; 100 names of 253
/// characters in 16 pools are beyond it.)
fn cost(rule: &str, path: &str, root: &Value) -> u64 {
    let mut times = 1;
    let mut schema = root;
    for part in path.split('.').skip(1) {
        schema = &schema["properties"][part.trim_end_matches("[]")];
        if part.ends_with("[]") {
            times *= schema["maxItems"].as_u64().unwrap();
            schema = &schema["items"];
        }
    }
    let mut round = 6;
    for field in ["names", "rollouts"] {
        let list = &schema["properties"][field];
        // `self.names.all(...)` goes through the list once; `has` and `size` do not.
        for one in ["all(", "exists_one("] {
            let loops = rule.matches(&format!("self.{field}.{one}")).count();
            times *= list["maxItems"].as_u64().unwrap_or(1).pow(u32::try_from(loops).unwrap());
            round += loops as u64 * list["items"]["maxLength"].as_u64().unwrap_or(0) * 4 / 10;
        }
    }
    times * round
}

#[test]
fn the_crd_shows_what_users_look_for() {
    let crd = crd().unwrap();
    assert_eq!(crd.metadata.name.as_deref(), Some("weightsyncs.weightsync.dev"));
    let names = &crd.spec.names;
    assert_eq!(names.short_names.as_deref(), Some(&["ws".to_owned()][..]));
    assert_eq!(names.categories.as_deref(), Some(&["weightsync".to_owned()][..]));
    let version = &crd.spec.versions[0];
    let columns: Vec<&str> = version.additional_printer_columns.iter().flatten().map(|column| column.name.as_str()).collect();
    assert_eq!(columns, ["Replicas", "Epoch", "World", "Version", "Transport", "Ready", "Reason", "Source", "Suspended", "Age"]);
    assert!(version.subresources.as_ref().is_some_and(|subresources| subresources.status.is_some()));
}

#[test]
fn every_printer_column_reads_a_field_that_is_there() {
    let root = schema().unwrap();
    for column in crd().unwrap().spec.versions[0].additional_printer_columns.iter().flatten() {
        let path = column.json_path.trim_start_matches('.');
        if path.starts_with("metadata.") {
            continue;
        }
        let mut schema = &root;
        for part in path.replace("[?(@.type==\"Ready\")]", "[]").split('.') {
            schema = &schema["properties"][part.trim_end_matches("[]")];
            if part.ends_with("[]") {
                schema = &schema["items"];
            }
        }
        assert!(schema.get("type").is_some(), "{} reads {}", column.name, column.json_path);
    }
}

#[test]
fn the_crd_in_the_repository_is_the_one_that_the_types_give() {
    let made = crd_yaml().unwrap();
    for path in ["crds/weightsync.dev_weightsyncs.yaml", "charts/weightsync/files/crd.yaml"] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        assert!(fs::symlink_metadata(&file).unwrap().is_file(), "{path} is a link: a chart from Git would lack its CRD");
        assert!(fs::read_to_string(&file).unwrap() == made, "{path} is stale: make generate");
    }
    let read: Value = serde_saphyr::from_str(&made).unwrap();
    let typed: k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition =
        serde_json::from_value(read).unwrap();
    assert_eq!(typed, crd().unwrap(), "what is written reads back as the same");
}
