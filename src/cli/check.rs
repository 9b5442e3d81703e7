//! `weightsync check`: whether an installation can work: the API server serves the resource, and a controller answers that it is ready.
//!
//! Run by `helm test`, with the controller's own rights. It changes nothing and ends within the time that it was given.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use kube::api::ListParams;
use kube::{Api, Client};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use super::Output;
use crate::api::WeightSync;

/// Time between two tries.
const AGAIN: Duration = Duration::from_millis(500);
/// Longest single question.
const QUESTION: Duration = Duration::from_secs(5);

/// Arguments of `weightsync check`.
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Status pages of the controller, for instance `http://weightsync.weightsync-system.svc:8080`.
    #[arg(long)]
    controller: String,
    /// Namespaces in which objects must be readable, separated by commas; the whole cluster if empty.
    #[arg(long, env = "WEIGHTSYNC_WATCH_NAMESPACES", value_delimiter = ',', default_value = "")]
    watch_namespaces: Vec<String>,
    /// Seconds until it gives up.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: u64,
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl CheckArgs {
    /// Asks until all is well, or the time is over.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        super::block_on(async {
            let deadline = Instant::now() + Duration::from_secs(self.timeout);
            let objects = until(deadline, || self.objects()).await.context("WeightSync objects cannot be listed")?;
            until(deadline, || self.ready()).await.with_context(|| format!("the controller at {} is not ready", self.controller))?;
            match self.output {
                Output::Human => println!("the API server serves weightsyncs ({objects} there), and the controller is ready"),
                Output::Json => println!("{}", json!({"objects": objects, "ready": true})),
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    async fn objects(&self) -> anyhow::Result<usize> {
        let client = Client::try_default().await.context("no cluster is configured")?;
        let named: Vec<&String> = self.watch_namespaces.iter().filter(|namespace| !namespace.is_empty()).collect();
        if named.is_empty() {
            return Ok(Api::<WeightSync>::all(client).list_metadata(&ListParams::default()).await?.items.len());
        }
        let mut found = 0;
        for namespace in named {
            found += Api::<WeightSync>::namespaced(client.clone(), namespace).list_metadata(&ListParams::default()).await?.items.len();
        }
        Ok(found)
    }

    async fn ready(&self) -> anyhow::Result<()> {
        let url = format!("{}/readyz", self.controller.trim_end_matches('/'));
        let client = reqwest::Client::builder().timeout(QUESTION).build()?;
        let answer = client.get(url).send().await?;
        if !answer.status().is_success() {
            bail!("{}: {}", answer.status(), answer.text().await.unwrap_or_default().trim());
        }
        Ok(())
    }
}

/// The first good answer, or the last refusal when the time is over.
async fn until<T, F: Future<Output = anyhow::Result<T>>>(deadline: Instant, mut ask: impl FnMut() -> F) -> anyhow::Result<T> {
    loop {
        let refusal = match timeout(QUESTION, ask()).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(refusal)) => refusal,
            Err(_) => anyhow::anyhow!("no answer within {QUESTION:?}"),
        };
        if Instant::now() + AGAIN >= deadline {
            return Err(refusal);
        }
        sleep(AGAIN).await;
    }
}
