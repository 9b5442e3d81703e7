//! Renders the API reference from the schema of the CRD: one table an object, nothing written by hand.

use std::fmt::Write;

use serde_json::Value;

use crate::api::{ConditionType, GROUP, VERSION};
use weightsync_core::protocol::Reason;

pub(super) fn render(schema: &Value) -> String {
    let mut page = Page { text: String::new(), waiting: Vec::new() };
    page.line("<!-- Written by `weightsync generate api-reference` from the types in src/api. Do not edit. -->");
    page.line("# API reference\n");
    page.line(&format!("Kind `WeightSync`, short name `ws`, group `{GROUP}`, version `{VERSION}`, namespaced.\n"));
    page.line(&sentence(schema));
    page.line("\nA field without a default that is not marked *required* may be left out.\n");
    for part in ["spec", "status"] {
        if let Some(schema) = schema.pointer(&format!("/properties/{part}")) {
            page.waiting.push((part.to_owned(), schema.clone()));
        }
        while let Some((path, schema)) = page.waiting.pop() {
            page.object(&path, &schema);
        }
    }
    page.line("## Conditions\n");
    page.line("| type | true when |\n|---|---|");
    for condition in ConditionType::ALL {
        page.line(&format!("| `{}` | {} |", condition.as_str(), condition.meaning()));
    }
    page.line("\n## Reasons\n");
    page.line("Each reason is used in conditions, Events and members, as a field of logs and as a label of metrics.\n");
    page.line("| reason | meaning |\n|---|---|");
    for reason in Reason::ALL {
        page.line(&format!("| `{reason}` | {} |", reason.meaning().trim()));
    }
    page.text
}

struct Page {
    text: String,
    /// Objects that were mentioned and have no table yet; the last is next.
    waiting: Vec<(String, Value)>,
}

impl Page {
    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn object(&mut self, path: &str, schema: &Value) {
        self.line(&format!("## `{path}`\n"));
        self.line(&sentence(schema));
        let rules: Vec<&Value> = schema.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten().collect();
        if !rules.is_empty() {
            self.line("\nRules:\n");
        }
        for rule in rules {
            self.line(&format!("- {}", message(rule)));
        }
        self.line("\n| field | type | default | description |\n|---|---|---|---|");
        let required: Vec<&str> =
            schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        let mut objects = Vec::new();
        for (name, field) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
            let mut text = sentence(field);
            if required.contains(&name.as_str()) {
                text.insert_str(0, "*Required.* ");
            }
            // The rules of an object stand above its own table.
            let rules = field.get("x-kubernetes-validations").filter(|_| field.get("properties").is_none()).and_then(Value::as_array);
            for rule in rules.into_iter().flatten() {
                let _ = write!(text, " Rule: {}.", message(rule));
            }
            let default = field.get("default").map(|default| format!("`{default}`")).unwrap_or_default();
            let kind = kind(field);
            self.line(&format!("| `{name}` | {} | {} | {} |", cell(&kind), cell(&default), cell(&text)));
            let inner = if field.get("items").is_some() { field.get("items") } else { Some(field) };
            if let Some(inner) = inner.filter(|inner| inner.get("properties").is_some()) {
                let suffix = if field.get("items").is_some() { "[]" } else { "" };
                objects.push((format!("{path}.{name}{suffix}"), inner.clone()));
            }
        }
        self.line("");
        self.waiting.extend(objects.into_iter().rev());
    }
}

fn sentence(schema: &Value) -> String {
    let text = schema.get("description").and_then(Value::as_str).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn message(rule: &Value) -> &str {
    let message = rule.get("message").and_then(Value::as_str);
    message.or_else(|| rule.get("rule").and_then(Value::as_str)).unwrap_or_default()
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// Type and limits of a field, as text.
fn kind(schema: &Value) -> String {
    if schema.get("x-kubernetes-int-or-string").and_then(Value::as_bool) == Some(true) {
        return "integer or string".to_owned();
    }
    if let Some(words) = schema.get("enum").and_then(Value::as_array) {
        return words.iter().filter_map(Value::as_str).map(|word| format!("`{word}`")).collect::<Vec<_>>().join(" or ");
    }
    let word = schema.get("type").and_then(Value::as_str).unwrap_or("any");
    let number = |key: &str| schema.get(key).filter(|limit| limit.is_number()).map(ToString::to_string);
    let limits = |least: Option<String>, most: Option<String>, unit: &str| match (least, most) {
        (Some(least), Some(most)) => format!(", {least} to {most}{unit}"),
        (Some(least), None) => format!(", at least {least}{unit}"),
        (None, Some(most)) => format!(", at most {most}{unit}"),
        (None, None) => String::new(),
    };
    match word {
        "array" => {
            let items = schema.get("items").map(kind).unwrap_or_default();
            let keys = schema.get("x-kubernetes-list-map-keys").and_then(Value::as_array);
            let by = keys.into_iter().flatten().filter_map(Value::as_str).collect::<Vec<_>>().join(", ");
            let by = if by.is_empty() { String::new() } else { format!(" by `{by}`") };
            format!("list{by} of {items}{}", limits(number("minItems"), number("maxItems"), " items"))
        }
        "object" => match schema.get("additionalProperties").filter(|values| values.is_object()) {
            Some(values) => format!("map of {}{}", kind(values), limits(None, number("maxProperties"), " entries")),
            None => "object".to_owned(),
        },
        "string" => match schema.get("format").and_then(Value::as_str) {
            Some(format) => format!("string ({format})"),
            None => format!("string{}", limits(number("minLength").filter(|least| least != "0"), number("maxLength"), " characters")),
        },
        other => format!("{other}{}", limits(number("minimum"), number("maximum"), "")),
    }
}
