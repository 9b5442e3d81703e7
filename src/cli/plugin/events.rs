//! `kubectl weightsync events [NAME]`: what was told about an object and its pods, the oldest first.

use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use futures::TryStreamExt;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::runtime::{WatchStreamExt, watcher};

use super::cluster::{Access, ClusterArgs, within};
use crate::cli::Output;
use crate::cli::text::columns;

/// Arguments of `kubectl weightsync events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Name of the object; all objects of the namespace if it is missing.
    name: Option<String>,
    /// Which cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Go on showing Events as they come, until interrupted.
    #[arg(short, long)]
    watch: bool,
    /// Only those that say that something is wrong.
    #[arg(long)]
    warnings: bool,
    /// How to print it; JSON is one object a line.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Events about our objects only.
const OURS: &str = "regarding.kind=WeightSync";

impl EventsArgs {
    /// Shows them.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let access = self.cluster.access().await?;
            let events = list(&access, self.name.as_deref()).await?;
            self.print(&events.iter().filter(|event| self.wants(event)).collect::<Vec<_>>())?;
            if self.watch {
                self.follow(&access).await?;
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    async fn follow(&self, access: &Access) -> anyhow::Result<()> {
        let config = watcher::Config::default().fields(&selector(self.name.as_deref()));
        let begun = Timestamp::now();
        let mut changes = std::pin::pin!(watcher(access.api::<Event>(), config).default_backoff().applied_objects());
        while let Some(event) = changes.try_next().await.context("Events cannot be watched")? {
            if self.wants(&event) && last_seen(&event).is_some_and(|at| at >= begun) {
                self.print(&[&event])?;
            }
        }
        Ok(())
    }

    fn wants(&self, event: &Event) -> bool {
        !self.warnings || event.type_.as_deref() == Some("Warning")
    }

    fn print(&self, events: &[&Event]) -> anyhow::Result<()> {
        match self.output {
            Output::Human => columns(&events.iter().map(|event| row(event)).collect::<Vec<_>>()).iter().for_each(|line| println!("{line}")),
            Output::Json => {
                for event in events {
                    println!("{}", serde_json::to_string(event).context("the Event cannot be written as JSON")?);
                }
            }
        }
        Ok(())
    }
}

fn selector(name: Option<&str>) -> String {
    name.map_or_else(|| OURS.to_owned(), |name| format!("{OURS},regarding.name={name}"))
}

/// Events of an object, or of all, by the time at which they were last seen.
pub(super) async fn list(access: &Access, name: Option<&str>) -> anyhow::Result<Vec<Event>> {
    let params = ListParams::default().fields(&selector(name));
    let mut events = within("Events cannot be listed", access.api::<Event>().list(&params)).await?.items;
    events.sort_by_key(last_seen);
    Ok(events)
}

fn last_seen(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref().map(|series| series.last_observed_time.0);
    let old = || event.deprecated_last_timestamp.as_ref().map(|time| time.0);
    series.or_else(|| event.event_time.as_ref().map(|time| time.0)).or_else(old)
}

fn row(event: &Event) -> [String; 6] {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let when = last_seen(event).map_or_else(|| "-".to_owned(), |at| at.strftime("%Y-%m-%d %H:%M:%S").to_string());
    let object = event.regarding.as_ref().and_then(|object| object.name.clone()).unwrap_or_default();
    let times = event.series.as_ref().map_or_else(String::new, |series| format!("({} times)", series.count));
    [when, text(&event.type_), text(&event.reason), object, text(&event.note), times]
}
