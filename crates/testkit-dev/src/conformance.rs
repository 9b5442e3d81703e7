//! Tests whether an inference server keeps the protocol that its adapter relies on: for engine projects, and for WeightSync's own tests.
//!
//! Three parts, each a list of rows: a script of calls with the expected statuses and fields; an update by the real adapter, proven by a
//! round trip; and the same update with each call broken in turn, after which no engine may serve something else than it reports. Runs
//! against a simulator that it starts itself, or a live server, which it does not disturb unless an option allows that. Decides what each
//! row expects; never calls an unknown outcome a success.

mod client;
mod fixture;
mod folder;
mod install;
mod memory;
mod model;
mod negative;
mod proxy;
mod script;
mod source;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use self::fixture::Fixture;
pub use self::source::Sources;
use weightsync_engine::ApiKey;

#[derive(Debug, Clone)]
pub struct Options {
    /// `vllm`, `sglang`, `lmdeploy`, `fastdeploy`.
    pub engine: String,
    /// The server; none starts simulators.
    pub live: Option<Live>,
    /// Longest wait for any answer.
    pub patience: Duration,
    /// Wait of the cases in which a call is never answered.
    pub silence: Duration,
    /// Rank 0 of the groups that the server's own workers join; without it no group is formed.
    pub sources: Option<Arc<Sources>>,
    /// Run only such groups.
    pub only_groups: bool,
}

#[derive(Debug, Clone)]
pub struct Live {
    /// `http://HOST:PORT`.
    pub url: String,
    pub api_key: Option<ApiKey>,
    /// Name under which it serves its model; read from the server if not given.
    pub model_name: Option<String>,
    /// The checkpoint that it was started with, and one of another version: both as this process and as the server see them.
    pub checkpoints: Option<(PathBuf, PathBuf)>,
    /// UUIDs of its GPUs, for a server that is fed from their memory and does not name them.
    pub gpus: Vec<String>,
    /// Whether it may be paused, and its weights changed.
    pub destructive: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    Passed,
    Failed,
    /// Not tried; the row says why.
    Skipped,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// `script`, `update` or `negative`, with the way by which weights go where there are several.
    pub part: String,
    pub step: String,
    pub expected: String,
    pub found: String,
    pub outcome: Outcome,
}

impl Row {
    fn new(part: &str, step: impl Into<String>, expected: impl Into<String>, found: Result<String, String>) -> Self {
        let outcome = if found.is_ok() { Outcome::Passed } else { Outcome::Failed };
        let found = found.unwrap_or_else(|found| found);
        Self { part: part.to_owned(), step: step.into(), expected: expected.into(), found, outcome }
    }

    fn skipped(part: &str, step: impl Into<String>, why: impl Into<String>) -> Self {
        Self { part: part.to_owned(), step: step.into(), expected: "-".to_owned(), found: why.into(), outcome: Outcome::Skipped }
    }
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    pub engine: String,
    /// The server; none for simulators.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// All steps in their order.
    pub rows: Vec<Row>,
}

impl Report {
    pub fn count(&self, outcome: Outcome) -> usize {
        self.rows.iter().filter(|row| row.outcome == outcome).count()
    }

    /// Whether nothing failed and something was tried.
    pub fn passed(&self) -> bool {
        self.count(Outcome::Failed) == 0 && self.count(Outcome::Passed) > 0
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ConformanceError {
    #[error("there is no engine {0:?}: use one of {1}")]
    UnknownEngine(String, String),
    #[error("the suite's own files cannot be made: {0}")]
    Files(#[from] std::io::Error),
    #[error("the simulator does not start: {0}")]
    Simulator(#[from] weightsync_testkit::simulator::SimulatorError),
    #[error(transparent)]
    Engine(#[from] weightsync_engine::EngineError),
    #[error("the HTTP client cannot be set up: {0}")]
    Client(String),
    #[error("no rank 0 for groups: {0}")]
    Source(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// From a directory.
    Directory,
    /// From GPU memory, over the route of this name.
    Device(&'static str),
    /// By a group that its own workers join.
    Group,
    /// Any route that a live server has.
    Any,
}

impl Way {
    fn part(self, part: &str) -> String {
        match self {
            Self::Directory => format!("{part}, directory"),
            Self::Device(name) => format!("{part}, {name}"),
            Self::Group => format!("{part}, group"),
            Self::Any => part.to_owned(),
        }
    }
}

fn ways(engine: &str) -> &'static [Way] {
    match engine {
        "vllm" | "sglang" => &[Way::Directory, Way::Device("checkpoint-engine")],
        "lmdeploy" => &[Way::Device("update_weights"), Way::Device("checkpoint-engine")],
        "fastdeploy" => &[Way::Directory, Way::Device("ipc_async")],
        _ => &[],
    }
}

/// Whether its own workers can join groups.
fn joins(engine: &str) -> bool {
    engine != "fastdeploy"
}

/// Runs the suite.
///
/// # Errors
///
/// There is no such engine, or the suite itself cannot begin. What is wrong with the server is in the rows.
pub async fn run(options: &Options) -> Result<Report, ConformanceError> {
    if ways(&options.engine).is_empty() {
        return Err(ConformanceError::UnknownEngine(options.engine.clone(), weightsync_engine::kinds().collect::<Vec<_>>().join(", ")));
    }
    let mut rows = Vec::new();
    let joins = joins(&options.engine);
    let groups = (joins && options.sources.is_some()).then_some(Way::Group);
    let others = match &options.live {
        _ if options.only_groups => &[][..],
        Some(_) => &[Way::Any],
        None => ways(&options.engine),
    };
    for (number, way) in others.iter().copied().chain(groups).enumerate() {
        let fixture = match &options.live {
            Some(live) => Fixture::live(options, live, way)?,
            None => Fixture::simulated(options, way).await?,
        };
        if number == 0 && !options.only_groups {
            rows.extend(script::play(&fixture).await?);
        }
        let changed = install::rows(&fixture, way).await?;
        let works = changed.iter().all(|row| row.outcome != Outcome::Failed);
        rows.extend(changed);
        rows.extend(match &options.live {
            None => negative::simulated(options, way).await?,
            Some(_) if works => negative::live(&fixture).await?,
            Some(_) => vec![Row::skipped(&way.part("negative"), "every call spoiled", "the update itself does not work")],
        });
    }
    if groups.is_none() && (options.only_groups || (joins && options.live.is_none())) {
        let no_gpu = "it needs a GPU for rank 0: --source-gpu, or for simulators FAKEGPU_DIR, the folder of the stand-in driver";
        let why = if joins { no_gpu } else { "this kind of engine joins none" };
        rows.push(Row::skipped(&Way::Group.part("update"), "join, receive, leave", why));
    }
    Ok(Report { engine: options.engine.clone(), url: options.live.as_ref().map(|live| live.url.clone()), rows })
}
