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
        "`/metrics` of the controller (port 8080) and of every agent (port 8472), in OpenMetrics text to a\n\
         scraper that accepts it, else in that of Prometheus. The values of every label are a closed\n\
         set, and no histogram carries an object's name: the number of series grows with objects and engines, not with versions or time.\n\
         Series that the chart's own monitors and rules need are named below; `monitoring` in its values turns them on\n\
         ([operations](operations.md#metrics-board-alerts)).\n"
    );
    section(&mut page, "Controller", controller::METRICS);
    section(&mut page, "Agents", weightsync_agent::process::METRICS);
    let common: Vec<Definition> = [BUILD].iter().chain(process::DEFINITIONS).copied().collect();
    section(&mut page, "Both", &common);
    let _ = writeln!(page, "## Alerts\n");
    let _ = writeln!(page, "| alert | severity | for | when | meaning |\n|---|---|---|---|---|");
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
mod tests;
