//! Where log lines go: to standard error, as text or as one JSON object a line. Standard output stays free for results. The filter may
//! change while the program runs; the format may not.

mod page;

use std::sync::OnceLock;

use parking_lot::Mutex;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::{LevelFilter, ParseError};
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};

pub(crate) use page::router;

/// Form of log lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For a person at a terminal.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum LogsError {
    #[error("the log filter {filter:?} cannot be understood: {source}")]
    Filter { filter: String, source: ParseError },
    #[error("logs are set up already: {0}")]
    Again(#[from] TryInitError),
    #[error("{0}")]
    Refused(String),
    #[error("logs of this process are not set up by us")]
    NotOurs,
    #[error("the filter cannot be replaced: {0}")]
    Replace(String),
}

struct Filter {
    replace: Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>,
    started: String,
    now: Mutex<String>,
}

static FILTER: OnceLock<Filter> = OnceLock::new();

/// Sets up logs for the whole process; `filter` is e.g. `info` or `weightsync=debug,warn`.
pub fn init(format: LogFormat, filter: &str) -> Result<(), LogsError> {
    let parsed = parse(filter)?;
    // A line that cannot be written (the disk is full) is lost. A report of that would be one more line, and would panic in the code that
    // logs.
    let logs = tracing_subscriber::fmt().with_writer(std::io::stderr).log_internal_errors(false);
    // The type of a subscriber depends on its format.
    let replace: Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync> = match format {
        LogFormat::Human => {
            let logs = logs.with_env_filter(parsed).with_filter_reloading();
            let handle = logs.reload_handle();
            logs.finish().try_init()?;
            Box::new(move |filter| handle.reload(filter).map_err(|error| error.to_string()))
        }
        LogFormat::Json => {
            let logs = logs.json().flatten_event(true).with_env_filter(parsed).with_filter_reloading();
            let handle = logs.reload_handle();
            logs.finish().try_init()?;
            Box::new(move |filter| handle.reload(filter).map_err(|error| error.to_string()))
        }
    };
    // A second set-up was refused above.
    let _ = FILTER.set(Filter { replace, started: filter.to_owned(), now: Mutex::new(filter.to_owned()) });
    Ok(())
}

fn parse(filter: &str) -> Result<EnvFilter, LogsError> {
    EnvFilter::try_new(filter).map_err(|source| LogsError::Filter { filter: filter.to_owned(), source })
}

/// The filter in use and the one from the start; `None` if [`init`] did not set up logs.
fn filters() -> Option<(String, String)> {
    let filter = FILTER.get()?;
    Some((filter.now.lock().clone(), filter.started.clone()))
}

/// Replaces the filter; an empty one restores the filter from the start. Returns the filter in use.
fn change(wanted: &str) -> Result<String, LogsError> {
    let filter = FILTER.get().ok_or(LogsError::NotOurs)?;
    let wanted = match wanted.trim() {
        "" => filter.started.as_str(),
        wanted => {
            check(wanted)?;
            wanted
        }
    };
    let parsed = parse(wanted)?;
    let mut now = filter.now.lock();
    (filter.replace)(parsed).map_err(LogsError::Replace)?;
    tracing::info!(before = %now, filter = wanted, "what is logged was changed");
    wanted.clone_into(&mut now);
    Ok(wanted.to_owned())
}

/// The crates of this product, as log lines name them as targets; `weightsync` stands for all.
const OUR_CRATES: [&str; 9] = [
    "weightsync",
    "weightsync_agent",
    "weightsync_coordinator",
    "weightsync_core",
    "weightsync_engine",
    "weightsync_gpu",
    "weightsync_net",
    "weightsync_torch",
    "weightsync_transport",
];

/// Whether the target of a log line or of a filter is a module of this product.
pub fn is_ours(target: &str) -> bool {
    OUR_CRATES.contains(&target.split("::").next().unwrap_or_default())
}

/// At `trace`, libraries print the data that they send, including keys and tokens. So only our own code may be traced while it runs.
fn check(filter: &str) -> Result<(), LogsError> {
    if filter.contains('[') {
        return Err(LogsError::Refused("a filter by spans or fields is taken at the start only".into()));
    }
    for directive in filter.split(',').map(str::trim).filter(|directive| !directive.is_empty()) {
        let (target, level) = match directive.split_once('=') {
            Some((target, level)) => (target, level.parse::<LevelFilter>().unwrap_or(LevelFilter::TRACE)),
            // A single word is a level, or else a target of which everything is logged.
            None => match directive.parse::<LevelFilter>() {
                Ok(level) => ("", level),
                Err(_) => (directive, LevelFilter::TRACE),
            },
        };
        if level == LevelFilter::TRACE && !is_ours(target) {
            let message = "trace is for weightsync only, because libraries print keys and tokens there: weightsync=trace,info";
            return Err(LogsError::Refused(message.into()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
