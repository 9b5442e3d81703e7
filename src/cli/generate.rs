//! `weightsync generate`: files that are made from the program's own types, so that they cannot differ from them.
//!
//! Everything goes to standard output; the tests say which file of the repository must hold it.

mod metrics;
mod reference;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory, Subcommand};
use clap_complete::Shell;

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// What to write.
    #[command(subcommand)]
    pub what: What,
}

#[derive(Debug, Subcommand)]
pub enum What {
    /// The CustomResourceDefinition (`crds/weightsync.yaml`), to standard output.
    Crds,
    /// The reference of the API (`docs/reference/api.md`), to standard output.
    ApiReference,
    /// The reference of metrics and alerts (`docs/metrics.md`), to standard output.
    Metrics,
    /// Completion of commands and options for a shell, to standard output.
    Completion {
        /// Which shell.
        shell: Shell,
    },
}

impl GenerateArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let text = match self.what {
            What::Crds => crds()?.into_bytes(),
            What::ApiReference => api_reference()?.into_bytes(),
            What::Metrics => metrics()?.into_bytes(),
            What::Completion { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut super::Cli::command(), "weightsync", &mut script);
                script
            }
        };
        std::io::stdout().write_all(&text).context("standard output cannot be written")?;
        Ok(ExitCode::SUCCESS)
    }
}

/// What `crds/weightsync.yaml` must hold.
pub fn crds() -> anyhow::Result<String> {
    crate::api::crd_yaml().map_err(|error| anyhow::anyhow!(error)).context("the CRD cannot be written")
}

/// What `docs/reference/api.md` must hold.
pub fn api_reference() -> anyhow::Result<String> {
    Ok(reference::render(&crate::api::schema().context("the schema cannot be read")?))
}

/// What `docs/metrics.md` must hold.
pub fn metrics() -> anyhow::Result<String> {
    metrics::render()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use clap::CommandFactory;

    #[test]
    fn the_api_reference_in_the_repository_is_the_one_that_the_types_give() {
        let there = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/api.md")).unwrap();
        assert!(there == super::api_reference().unwrap(), "stale: cargo run -- generate api-reference > docs/reference/api.md");
    }

    #[test]
    fn the_metrics_page_in_the_repository_is_the_one_that_the_definitions_give() {
        let there = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md")).unwrap();
        assert!(there == super::metrics().unwrap(), "stale: cargo run -- generate metrics > docs/metrics.md");
    }

    #[test]
    fn the_api_reference_has_every_object_and_every_reason() {
        let page = super::api_reference().unwrap();
        for part in ["## `spec`", "## `spec.rollouts[].engine.vllm`", "## `status.members[]`", "## Conditions", "| `EngineUnhealthy` |"] {
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
}
