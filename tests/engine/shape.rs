//! Whether two JSON bodies have the same shape: names and types, whatever the values. `null` stands for any type, and in the objects of
//! [`KEYED_BY_DATA`] the names are values too.

use serde_json::Value;

/// Objects whose names are tokens.
const KEYED_BY_DATA: &str = "/top_logprobs/0";

/// Differences, as `path: what`.
pub fn differences(simulated: &Value, real: &Value) -> Vec<String> {
    let mut found = Vec::new();
    compare("", simulated, real, &mut found);
    found
}

fn compare(path: &str, simulated: &Value, real: &Value, found: &mut Vec<String>) {
    match (simulated, real) {
        (Value::Null, _) | (_, Value::Null) => {}
        (Value::Object(simulated), Value::Object(real)) if path.ends_with(KEYED_BY_DATA) => {
            let (simulated, real) = (simulated.values().next(), real.values().next());
            compare(&format!("{path}/*"), simulated.unwrap_or(&Value::Bool(false)), real.unwrap_or(&Value::Bool(false)), found);
        }
        (Value::Object(simulated), Value::Object(real)) => {
            for (name, value) in real {
                match simulated.get(name) {
                    Some(other) => compare(&format!("{path}/{name}"), other, value, found),
                    None => found.push(format!("{path}/{name}: the simulator lacks it")),
                }
            }
            let more = simulated.keys().filter(|name| !real.contains_key(*name));
            found.extend(more.map(|name| format!("{path}/{name}: only the simulator has it")));
        }
        (Value::Array(simulated), Value::Array(real)) => match (simulated.first(), real.first()) {
            (Some(simulated), Some(real)) => compare(&format!("{path}/0"), simulated, real, found),
            (None, None) => {}
            _ => found.push(format!("{path}: one list is empty, the other is not")),
        },
        _ if kind(simulated) == kind(real) => {}
        _ => found.push(format!("{path}: {} simulated, {} real", kind(simulated), kind(real))),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "text",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    }
}

#[test]
fn shapes_differ_by_names_and_types_only() {
    use serde_json::json;
    let one = json!({"a": 1, "b": [{"c": "x"}], "d": null});
    assert!(differences(&one, &json!({"a": 2.5, "b": [{"c": "y"}, {"c": "z"}], "d": {}})).is_empty());
    assert_eq!(differences(&one, &json!({"a": "1", "b": [{}], "d": 1, "e": 1})).len(), 3);
    let tokens = |token: &str, value: Value| json!({"top_logprobs": [{token: value}]});
    assert!(differences(&tokens("a", json!(-1)), &tokens("b", json!(-2))).is_empty());
    assert_eq!(differences(&tokens("a", json!(-1)), &tokens("b", json!("-2"))).len(), 1);
}
