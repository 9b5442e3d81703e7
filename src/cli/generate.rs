//! `weightsync generate`: files that are generated from the program's types.
//!
//! Everything goes to standard output. Tests compare it with the files in the repository.

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
    /// The CustomResourceDefinition (`crds/weightsync.dev_weightsyncs.yaml`), to standard output.
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

/// The content of `crds/weightsync.dev_weightsyncs.yaml`.
pub fn crds() -> anyhow::Result<String> {
    crate::api::crd_yaml().map_err(|error| anyhow::anyhow!(error)).context("the CRD cannot be written")
}

/// The content of `docs/reference/api.md`.
pub fn api_reference() -> anyhow::Result<String> {
    Ok(reference::render(&crate::api::schema().context("the schema cannot be read")?))
}

/// The content of `docs/metrics.md`.
pub fn metrics() -> anyhow::Result<String> {
    metrics::render()
}

#[cfg(test)]
mod tests;
