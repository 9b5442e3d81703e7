use std::collections::BTreeSet;

use super::*;

const BOARD: &str = include_str!("../../../../charts/weightsync/files/board.json");

/// Names of series in a query, with the labels that stand in braces after them.
fn named(query: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for (at, _) in query.match_indices("weightsync_") {
        let rest = &query[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let labels = rest[end..].strip_prefix('{').and_then(|rest| rest.split('}').next()).unwrap_or_default();
        let labels = labels.split(',').filter_map(|pair| pair.split(['=', '!']).next()).map(str::trim).filter(|label| !label.is_empty());
        found.push((rest[..end].to_owned(), labels.map(str::to_owned).collect()));
    }
    found
}

fn check(queries: &[String]) {
    let all = || controller::METRICS.iter().chain(weightsync_agent::process::METRICS).chain([&BUILD]).chain(process::DEFINITIONS);
    for query in queries {
        let named = named(query);
        assert!(!named.is_empty(), "{query}");
        for (series, labels) in named {
            let is = |definition: &&Definition| {
                let base = definition.series();
                series == base || ["_bucket", "_sum", "_count"].iter().any(|suffix| series == format!("{base}{suffix}"))
            };
            let definition = all().find(is).unwrap_or_else(|| panic!("{series} is not exposed: {query}"));
            for label in labels {
                let known =
                    definition.labels.iter().any(|(known, _)| *known == label) || ["le", "namespace", "pod"].contains(&label.as_str());
                assert!(known, "{series} has no label {label}: {query}");
            }
        }
    }
}

fn expressions(value: &Value, key: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(object) => object.iter().for_each(|(name, inner)| match inner.as_str() {
            Some(text) if name == key => found.push(text.to_owned()),
            _ => expressions(inner, key, found),
        }),
        Value::Array(items) => items.iter().for_each(|item| expressions(item, key, found)),
        _ => {}
    }
}

#[test]
fn every_alert_is_made_of_series_and_labels_that_exist() {
    let rules = alerts().unwrap();
    assert!(rules.len() >= 10, "{}", rules.len());
    let expressions: Vec<String> = rules.iter().map(|rule| rule["expr"].as_str().unwrap().to_owned()).collect();
    check(&expressions);
    let names: BTreeSet<_> = rules.iter().map(|rule| rule["alert"].as_str().unwrap()).collect();
    assert_eq!(names.len(), rules.len(), "names differ");
    for rule in &rules {
        assert!(["critical", "warning"].contains(&rule["labels"]["severity"].as_str().unwrap()), "{rule}");
        assert!(rule["annotations"]["summary"].is_string() && rule["annotations"]["description"].is_string(), "{rule}");
    }
}

#[test]
fn every_panel_of_the_board_uses_existing_series() {
    let board: Value = serde_json::from_str(BOARD).unwrap();
    let mut found = Vec::new();
    expressions(&board["panels"], "expr", &mut found);
    assert!(found.len() >= 12, "{}", found.len());
    check(&found);
}
