//! `weightsync conformance`: whether an inference server keeps the protocol that WeightSync relies on. For CI of those who make engines.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use super::Output;
use super::text::columns;
use crate::conformance::{Live, Options, Outcome, Report, run};
use crate::engine::ApiKey;

/// Arguments of `weightsync conformance`.
#[derive(Debug, Args)]
pub struct ConformanceArgs {
    /// Kind of the engine.
    #[arg(long, value_parser = ["vllm", "sglang", "lmdeploy", "fastdeploy"])]
    pub engine: String,
    /// Address of the server.
    #[arg(long, value_name = "http://HOST:PORT", required_unless_present = "simulator")]
    pub url: Option<String>,
    /// Start simulators of the engine and test those.
    #[arg(long, conflicts_with = "url")]
    pub simulator: bool,
    /// Environment variable that holds the server's API key.
    #[arg(long, value_name = "VARIABLE", conflicts_with = "simulator")]
    pub api_key_env: Option<String>,
    /// Name under which it serves its model, where it is not the one that it names first.
    #[arg(long, value_name = "NAME", conflicts_with = "simulator")]
    pub served_model_name: Option<String>,
    /// The checkpoint that the server was started with, under the path by which the server knows it too.
    #[arg(long, value_name = "DIR", requires = "other", conflicts_with = "simulator")]
    pub model: Option<PathBuf>,
    /// A checkpoint of another version of the same model, likewise.
    #[arg(long, value_name = "DIR", requires = "model")]
    pub other: Option<PathBuf>,
    /// UUID of the GPU of the next worker rank, for a server that is fed from GPU memory and does not name its GPUs.
    #[arg(long = "gpu", value_name = "UUID", conflicts_with = "simulator")]
    pub gpus: Vec<String>,
    /// Pause the live server, end its requests, and change its weights.
    #[arg(long, conflicts_with = "simulator")]
    pub destructive: bool,
    /// Longest wait for an answer, in seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// How long a call that is never answered is waited for, in seconds; an update ends after that time in those cases.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub silence: u64,
    /// How to print what was found.
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Output,
}

impl ConformanceArgs {
    /// Runs it; exit code 1 when a row failed.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let output = self.output;
        let options = self.options()?;
        let report = super::block_on(async move { Ok(run(&options).await?) })?;
        show(&report, output)?;
        Ok(if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn options(self) -> anyhow::Result<Options> {
        let api_key = match &self.api_key_env {
            Some(name) => Some(ApiKey::from_env(name)?.with_context(|| format!("the environment variable {name} is not set"))?),
            None => None,
        };
        let live = self.url.map(|url| Live {
            url: url.trim_end_matches('/').to_owned(),
            api_key,
            model_name: self.served_model_name,
            checkpoints: self.model.zip(self.other),
            gpus: self.gpus,
            destructive: self.destructive,
        });
        let (patience, silence) = (Duration::from_secs(self.timeout), Duration::from_secs(self.silence));
        Ok(Options { engine: self.engine, live, patience, silence })
    }
}

fn show(report: &Report, output: Output) -> anyhow::Result<()> {
    let counts = [Outcome::Passed, Outcome::Failed, Outcome::Skipped].map(|outcome| report.count(outcome));
    let [passed, failed, skipped] = counts;
    match output {
        Output::Json => {
            let mut object = serde_json::to_value(report)?;
            if let Some(object) = object.as_object_mut() {
                object.extend(
                    [("passed", passed), ("failed", failed), ("skipped", skipped)].map(|(name, count)| (name.to_owned(), count.into())),
                );
            }
            println!("{object}");
        }
        Output::Human => {
            let cut = |text: &str| text.chars().take(110).collect::<String>();
            let head = ["", "PART", "STEP", "EXPECTED", "CAME"].map(str::to_owned);
            let rows = report.rows.iter().map(|row| {
                let outcome = match row.outcome {
                    Outcome::Passed => "ok",
                    Outcome::Failed => "FAILED",
                    Outcome::Skipped => "skipped",
                };
                // What failed is shown whole.
                let found = if row.outcome == Outcome::Failed { row.found.clone() } else { cut(&row.found) };
                [outcome.to_owned(), row.part.clone(), cut(&row.step), cut(&row.expected), found]
            });
            let table: Vec<[String; 5]> = std::iter::once(head).chain(rows).collect();
            for line in columns(&table) {
                println!("{line}");
            }
            println!("{}: {passed} passed, {failed} failed, {skipped} skipped", report.engine);
        }
    }
    Ok(())
}
