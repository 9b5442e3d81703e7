//! One hop on the loopback device against iperf3, one after the other, several times.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::chain::{Node, output, program};
use crate::report::Report;

#[derive(Args, Clone)]
pub struct Settings {
    /// GiB of each measurement.
    #[arg(long, default_value_t = 8)]
    gib: u64,
    /// Arguments for leader and members, e.g. `--receive-kib 512`.
    #[arg(last = true)]
    tuning: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { gib: 8, tuning: Vec::new() }
    }
}

pub fn measure(settings: &Settings, runs: usize, report: &mut Report) -> Result<()> {
    let bytes = settings.gib << 30;
    let member = Node::start(&[], "127.0.0.1:0", &settings.tuning)?;
    let (mut ours, mut iperf) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        iperf.push(iperf3(bytes)?);
        let mut leader = program(&[])?;
        leader.args(["leader", "--chain", &member.address, "--bytes", &bytes.to_string()]).args(&settings.tuning);
        let seconds: f64 = output(&mut leader)?.trim().parse()?;
        ours.push(gigabytes(bytes) / seconds);
    }
    report.compare("loopback, one hop, one stream", "GB/s", ("weightsync, digest on", &ours), ("iperf3", &iperf), "at least 1.0");
    Ok(())
}

#[allow(clippy::cast_precision_loss)]
fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

/// GB/s that the receiving side of iperf3 counted.
fn iperf3(bytes: u64) -> Result<f64> {
    let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let mut server = Command::new("iperf3")
        .args(["--server", "--one-off", "--forceflush", "--bind", "127.0.0.1", "--port", &free])
        .stdout(Stdio::piped())
        .spawn()
        .context("iperf3 is needed to compare with")?;
    let said = BufReader::new(server.stdout.take().context("no output")?).lines();
    let mut said = said.map_while(Result::ok);
    if !said.any(|line| line.contains("Server listening")) {
        bail!("iperf3 does not listen: {}", server.wait()?);
    }
    let rest = std::thread::spawn(move || said.for_each(drop));
    let mut client = Command::new("iperf3");
    client.args(["--client", "127.0.0.1", "--port", &free, "--bytes", &bytes.to_string(), "--json"]);
    let result: serde_json::Value = serde_json::from_str(&output(&mut client)?)?;
    server.wait()?;
    let _ = rest.join();
    let rate = result.pointer("/end/sum_received/bits_per_second").and_then(serde_json::Value::as_f64);
    Ok(rate.context("iperf3 said no rate")? / 8e9)
}
