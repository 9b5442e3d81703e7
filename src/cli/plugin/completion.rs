//! `kubectl weightsync completion SHELL`: completion of commands and options.
//!
//! kubectl itself asks a program `kubectl_complete-weightsync` on the PATH for candidates: that program is `completion kubectl`, and asks
//! this one in turn (`__complete`).

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command, CommandFactory, ValueEnum};
use clap_complete::Shell;

use super::Plugin;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum For {
    /// A script for kubectl: save it as `kubectl_complete-weightsync` on the PATH, and make it executable.
    Kubectl,
    /// For `kubectl-weightsync` in bash.
    Bash,
    /// For `kubectl-weightsync` in elvish.
    Elvish,
    /// For `kubectl-weightsync` in fish.
    Fish,
    /// For `kubectl-weightsync` in PowerShell.
    Powershell,
    /// For `kubectl-weightsync` in zsh.
    Zsh,
}

#[derive(Debug, Args)]
pub struct CompletionArgs {
    /// Shell to write it for.
    shell: For,
}

const SCRIPT: &str = "#!/bin/sh\nexec kubectl-weightsync __complete -- \"$@\"\n";

impl CompletionArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let shell = match self.shell {
            For::Kubectl => None,
            For::Bash => Some(Shell::Bash),
            For::Elvish => Some(Shell::Elvish),
            For::Fish => Some(Shell::Fish),
            For::Powershell => Some(Shell::PowerShell),
            For::Zsh => Some(Shell::Zsh),
        };
        let mut script = Vec::new();
        match shell {
            None => script.extend_from_slice(SCRIPT.as_bytes()),
            // The program's own name: kubectl's completion ignores words after `kubectl`.
            Some(shell) => {
                clap_complete::generate(shell, &mut Plugin::command().bin_name("kubectl-weightsync"), "kubectl-weightsync", &mut script);
            }
        }
        std::io::stdout().write_all(&script).context("standard output cannot be written")?;
        Ok(ExitCode::SUCCESS)
    }
}

#[derive(Debug, Args)]
pub struct CandidatesArgs {
    /// Words so far; the last one is incomplete.
    #[arg(last = true)]
    words: Vec<String>,
}

impl CandidatesArgs {
    /// Prints candidates as kubectl reads them: one a line, then a directive (4: no file names).
    pub fn run(self) -> ExitCode {
        for candidate in candidates(&Plugin::command(), &self.words) {
            println!("{candidate}");
        }
        println!(":4");
        ExitCode::SUCCESS
    }
}

fn candidates(plugin: &Command, words: &[String]) -> Vec<String> {
    let Some((last, before)) = words.split_last() else { return Vec::new() };
    let verb = before.iter().find_map(|word| plugin.get_subcommands().find(|verb| verb.get_name() == word));
    let mut found: Vec<String> = match verb {
        _ if last.starts_with('-') => {
            let options = verb.unwrap_or(plugin).get_arguments().filter(|argument| !argument.is_hide_set());
            options.filter_map(|argument| argument.get_long().map(|long| format!("--{long}"))).collect()
        }
        None => plugin.get_subcommands().filter(|verb| !verb.is_hide_set()).map(|verb| verb.get_name().to_owned()).collect(),
        // Values of the previous option, if they are a closed list.
        Some(verb) => {
            let option = before.last().and_then(|word| {
                let short = word.strip_prefix('-').and_then(|rest| rest.chars().next()).filter(|c| *c != '-');
                verb.get_arguments().find(|argument| {
                    word.strip_prefix("--").is_some_and(|long| argument.get_long() == Some(long))
                        || (short.is_some() && argument.get_short() == short)
                })
            });
            option
                .map(|argument| argument.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect())
                .unwrap_or_default()
        }
    };
    found.retain(|candidate| candidate.starts_with(last.as_str()));
    found.sort();
    found
}

#[cfg(test)]
mod tests;
