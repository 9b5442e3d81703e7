//! Where log lines go: to standard error, for a person or as one JSON object a line. Standard output stays free for results.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};

/// Form of log lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For a person at a terminal.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

/// Why logs cannot be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum LogsError {
    #[error("the log filter {filter:?} cannot be understood: {source}")]
    Filter { filter: String, source: ParseError },
    #[error("logs are set up already: {0}")]
    Again(#[from] TryInitError),
}

/// Sets up logs for the whole process; `filter` is e.g. `info` or `weightsync=debug,warn`.
pub fn init(format: LogFormat, filter: &str) -> Result<(), LogsError> {
    let filter = EnvFilter::try_new(filter).map_err(|source| LogsError::Filter { filter: filter.to_owned(), source })?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Human => logs.finish().try_init()?,
        LogFormat::Json => logs.json().flatten_event(true).finish().try_init()?,
    }
    Ok(())
}
