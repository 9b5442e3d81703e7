//! `weightsync-dev conformance`: tests whether an inference server keeps the protocol that WeightSync relies on. For the CI of engine
//! projects.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};

use crate::conformance::{Live, Options, Outcome, Report, Sources, run};
use weightsync_agent::command::Output;
use weightsync_agent::command::text::columns;
use weightsync_engine::ApiKey;
use weightsync_gpu::worker::WorkerStart;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Only {
    /// Groups that its own workers join.
    Group,
}

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
    /// Name under which it serves its model. Default: the first name that it reports.
    #[arg(long, value_name = "NAME", conflicts_with = "simulator")]
    pub served_model_name: Option<String>,
    /// The checkpoint that the server was started with, under a path that is the same for the server.
    #[arg(long, value_name = "DIR", requires = "other", conflicts_with = "simulator")]
    pub model: Option<PathBuf>,
    /// A checkpoint of another version of the same model, with the same condition.
    #[arg(long, value_name = "DIR", requires = "model")]
    pub other: Option<PathBuf>,
    /// UUID of the GPU of the next worker rank, for a server that is fed from GPU memory and does not report its GPUs.
    #[arg(long = "gpu", value_name = "UUID", conflicts_with = "simulator")]
    pub gpus: Vec<String>,
    /// UUID of a GPU of this machine for rank 0 of groups that the live server's workers join. The server must not use this GPU.
    #[arg(long, value_name = "UUID", conflicts_with = "simulator")]
    pub source_gpu: Option<String>,
    /// NCCL's library for groups, of the server's version. Default: searched.
    #[arg(long, value_name = "FILE", env = "WEIGHTSYNC_NCCL")]
    pub nccl: Option<PathBuf>,
    /// Folder of the stand-in GPU driver, for groups of simulators.
    #[arg(long, value_name = "DIR", env = "FAKEGPU_DIR", hide = true)]
    pub fake_gpu: Option<PathBuf>,
    /// Run only these parts: groups that the server's own workers join.
    #[arg(long, value_enum)]
    pub only: Option<Only>,
    /// Pause the live server, end its requests, and change its weights.
    #[arg(long, conflicts_with = "simulator")]
    pub destructive: bool,
    /// Longest wait for a response, in seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// Wait for a call that is never answered, in seconds; an update ends after that time in those cases.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub silence: u64,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Output,
}

impl ConformanceArgs {
    /// Runs it; exit code 1 when a row failed.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let output = self.output;
        let report = weightsync_agent::command::block_on(async move { Ok(run(&self.options().await?).await?) })?;
        show(&report, output)?;
        Ok(if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    async fn options(self) -> anyhow::Result<Options> {
        let api_key = match &self.api_key_env {
            Some(name) => Some(ApiKey::from_env(name)?.with_context(|| format!("the environment variable {name} is not set"))?),
            None => None,
        };
        let sources = match (&self.source_gpu, &self.fake_gpu) {
            (None, None) => None,
            (None, Some(_)) if !self.simulator => None,
            (gpu, stand_in) => Some(Sources::find(WorkerStart::own("rank 0")?, self.nccl, gpu.as_deref(), stand_in.clone()).await?),
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
        Ok(Options { engine: self.engine, live, patience, silence, sources, only_groups: self.only.is_some() })
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
