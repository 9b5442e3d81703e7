//! Renders the page of metrics and alerts from their definitions: nothing in it is written by hand.

use std::fmt::Write;

use anyhow::Context;
use serde_json::Value;

use crate::controller;
use weightsync_net::metrics::{BUILD, Definition, process, table};

const ALERTS: &str = include_str!("../../../charts/weightsync/files/alerts.yaml");

pub(super) fn render() -> anyhow::Result<String> {
    let mut page = String::new();
    let _ = writeln!(page, "<!-- Written by `weightsync generate metrics` from the definitions in the code. Do not edit. -->");
    let _ = writeln!(page, "# Metrics and alerts\n");
    let _ = writeln!(
        page,
        "`/metrics` of the controller (port 8080) and of every agent (port 8472), in OpenMetrics text. The values of every label are a closed\n\
         set, and no histogram carries an object's name: the number of series grows with objects and engines, not with versions or time.\n\
         Series that the chart's own monitors and rules need are named below; `monitoring` in its values turns them on\n\
         ([operations](operations.md#metrics-board-alerts)).\n"
    );
    section(&mut page, "Controller", controller::METRICS);
    section(&mut page, "Agents", weightsync_agent::process::METRICS);
    let common: Vec<Definition> = [BUILD].iter().chain(process::DEFINITIONS).copied().collect();
    section(&mut page, "Both", &common);
    let _ = writeln!(page, "## Alerts\n");
    let _ = writeln!(page, "| alert | severity | for | when | says |\n|---|---|---|---|---|");
    for rule in alerts()? {
        let text = |pointer: &str| rule.pointer(pointer).and_then(Value::as_str).unwrap_or_default().trim().replace('\n', " ");
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | `{}` | {} |",
            text("/alert"),
            text("/labels/severity"),
            text("/for"),
            text("/expr").split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|"),
            text("/annotations/description").split_whitespace().collect::<Vec<_>>().join(" ")
        );
    }
    Ok(page)
}

fn section(page: &mut String, title: &str, definitions: &[Definition]) {
    let _ = writeln!(page, "## {title}\n\n{}", table(definitions));
}

fn alerts() -> anyhow::Result<Vec<Value>> {
    let file: Value = serde_saphyr::from_str(ALERTS).context("the alert rules cannot be read")?;
    let groups = file.get("groups").and_then(Value::as_array).context("the alert rules have no groups")?;
    let rules = groups.iter().filter_map(|group| group.get("rules").and_then(Value::as_array)).flatten();
    Ok(rules.cloned().collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const BOARD: &str = include_str!("../../../charts/weightsync/files/board.json");

    /// Names of series in a query, with the labels that stand in braces behind them.
    fn named(query: &str) -> Vec<(String, Vec<String>)> {
        let mut found = Vec::new();
        for (at, _) in query.match_indices("weightsync_") {
            let rest = &query[at..];
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            let labels = rest[end..].strip_prefix('{').and_then(|rest| rest.split('}').next()).unwrap_or_default();
            let labels =
                labels.split(',').filter_map(|pair| pair.split(['=', '!']).next()).map(str::trim).filter(|label| !label.is_empty());
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
    fn every_panel_of_the_board_is_made_of_series_and_labels_that_exist() {
        let board: Value = serde_json::from_str(BOARD).unwrap();
        let mut found = Vec::new();
        expressions(&board["panels"], "expr", &mut found);
        assert!(found.len() >= 12, "{}", found.len());
        check(&found);
    }
}
