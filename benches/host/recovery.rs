//! From the signal to a replica until the others serve the version that was under way, detection included.
//!
//! Each run is a `weightsync-dev demo` of its own with another seed: which replica, and when between 20 and 80 % of the bytes, differs. The
//! demo asks every engine what it serves; a run that does not agree ends the measurement.

use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;

use crate::fixture::Over;
use crate::report::Report;

#[derive(Args, Clone)]
pub struct Settings {
    /// Runs of each kind.
    #[arg(long, default_value_t = 20)]
    runs: u64,
    /// Size of the model in MiB. Small, so that what is measured is the loss and not the wire.
    #[arg(long, default_value_t = 64)]
    megabytes: u32,
    /// Replicas, the lost one included.
    #[arg(long, default_value_t = 3)]
    replicas: u32,
    /// How bytes travel.
    #[arg(long, value_enum, default_value_t)]
    transport: Over,
}

impl Default for Settings {
    fn default() -> Self {
        Self { runs: 20, megabytes: 64, replicas: 3, transport: Over::default() }
    }
}

pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    for (fault, signal, wanted) in [("kill", "SIGKILL", "below 1000 ms"), ("freeze", "SIGSTOP", "below 5000 ms")] {
        let (mut noticed, mut recovered) = (Vec::new(), Vec::new());
        for seed in 1..=settings.runs {
            let outcome = demo(settings, fault, seed)?;
            noticed.push(number(&outcome, "detectedMs")?);
            recovered.push(number(&outcome, "recoveredMs")?);
        }
        let what = format!(
            "{signal} of one of {} replicas, {} MiB over {}: until",
            settings.replicas,
            settings.megabytes,
            settings.transport.name()
        );
        report.series(&format!("{what} the group gave the epoch up"), "ms", &noticed, "as soon as possible");
        report.series(&format!("{what} the others served the version"), "ms", &recovered, wanted);
    }
    Ok(())
}

fn demo(settings: &Settings, fault: &str, seed: u64) -> Result<Value> {
    let mut command = Command::new(weightsync_testkit::dev_program());
    command.args(["demo", "--output", "json", "--fault", fault, "--seed", &seed.to_string()]);
    command.args(["--megabytes", &settings.megabytes.to_string(), "--replicas", &settings.replicas.to_string()]);
    command.args(["--transport", settings.transport.name()]);
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let outcome: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    if !output.status.success() || outcome.get("verified") != Some(&Value::Bool(true)) {
        bail!("{command:?}: {outcome} {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(outcome)
}

fn number(outcome: &Value, field: &str) -> Result<f64> {
    outcome.get(field).and_then(Value::as_f64).with_context(|| format!("no {field} in {outcome}"))
}
