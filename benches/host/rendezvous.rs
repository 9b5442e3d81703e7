//! Clients of the real torch at our store and at torch's own, alternating: until each has connected, sent its hello, read the id of the
//! group and been released.
//!
//! Needs a Python with torch: `--python`, or `WEIGHTSYNC_VENV`.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use weightsync_torch::store::Server;

use crate::report::Report;

#[derive(Args, Clone)]
pub struct Settings {
    /// Clients, each a thread.
    #[arg(long, default_value_t = 64)]
    clients: u32,
    /// Rounds at each store.
    #[arg(long, default_value_t = 40)]
    rounds: u32,
    /// A Python that has torch.
    #[arg(long)]
    python: Option<PathBuf>,
}

pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let venv = || std::env::var_os("WEIGHTSYNC_VENV").map(|venv| PathBuf::from(venv).join("bin/python"));
    let python = settings.python.clone().or_else(venv).context("no Python with torch: give --python or set WEIGHTSYNC_VENV")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let server = runtime.block_on(Server::bind((Ipv4Addr::LOCALHOST, 0).into(), |_| true, &CancellationToken::new()))?;
    let mut command = Command::new(python);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/host/rendezvous.py"));
    command.args([settings.clients.to_string(), settings.rounds.to_string(), server.address().port().to_string()]);
    let output = command.output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let seconds: Value = serde_json::from_slice(&output.stdout)?;
    let rates = |name: &str| -> Result<Vec<f64>> {
        let rounds = seconds.get(name).and_then(Value::as_array).context("no rounds")?;
        Ok(rounds.iter().filter_map(Value::as_f64).map(|seconds| f64::from(settings.clients) / seconds / 1e3).collect())
    };
    let (ours, torchs) = (rates("ours")?, rates("torch")?);
    let what = format!("rendezvous of {} clients of torch, in thousands a second", settings.clients);
    report.compare(&what, "k/s", ("this store", &ours), ("torch's store", &torchs), "at least 1.0");
    Ok(())
}
