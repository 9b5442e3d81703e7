use std::fs;
use std::path::Path;

use clap::CommandFactory;

#[test]
fn api_reference_in_the_repository_is_current() {
    let there = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/api.md")).unwrap();
    assert!(there == super::api_reference().unwrap(), "stale: cargo run -- generate api-reference > docs/reference/api.md");
}

#[test]
fn metrics_page_in_the_repository_is_current() {
    let there = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md")).unwrap();
    assert!(there == super::metrics().unwrap(), "stale: cargo run -- generate metrics > docs/metrics.md");
}

#[test]
fn the_api_reference_has_every_object_and_every_reason() {
    let page = super::api_reference().unwrap();
    for part in ["## `spec`", "## `spec.rollouts[].engine`", "## `status.members[]`", "## Conditions", "| `EngineUnhealthy` |"] {
        assert!(page.contains(part), "{part}");
    }
    let rows = page.lines().filter(|line| line.starts_with("| `")).count();
    assert!(rows > 100, "{rows} rows");
    assert!(!page.contains("| any |"), "a field without a type");
}

#[test]
fn the_command_line_is_consistent() {
    crate::cli::Cli::command().debug_assert();
}
