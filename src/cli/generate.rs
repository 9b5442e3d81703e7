//! `weightsync generate`: files that are made from the program's own types, so that they cannot differ from them.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory, Subcommand};
use clap_complete::Shell;

/// Arguments of `weightsync generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// What to write.
    #[command(subcommand)]
    pub what: What,
}

/// What can be written.
#[derive(Debug, Subcommand)]
pub enum What {
    /// Completion of commands and options for a shell, to standard output.
    Completion {
        /// Which shell.
        shell: Shell,
    },
}

impl GenerateArgs {
    /// Writes it.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.what {
            What::Completion { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut super::Cli::command(), "weightsync", &mut script);
                std::io::stdout().write_all(&script).context("standard output cannot be written")?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
