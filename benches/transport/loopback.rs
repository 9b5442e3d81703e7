//! One hop on the loopback device against iperf3 with one stream, one after the other, several times; where the hop uses several
//! connections, also against iperf3 with as many.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::Args;
use weightsync_transport::tcp::TcpOptions;

use crate::processes::{Node, gigabytes, output, send};
use crate::report::Report;

#[derive(Args, Clone)]
pub struct Settings {
    /// GiB of each measurement.
    #[arg(long, default_value_t = 8)]
    gib: u64,
    /// Arguments for leader and members, e.g. `--lanes 2`.
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
    let member = [Node::start(&[], "127.0.0.1:0", &settings.tuning)?];
    let lanes = settings.lanes();
    let (mut ours, mut iperf, mut as_many) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..runs {
        iperf.push(iperf3(bytes, 1)?);
        if lanes > 1 {
            as_many.push(iperf3(bytes, lanes)?);
        }
        ours.push(gigabytes(bytes) / send(&[], &member, bytes, &settings.tuning)?.seconds);
    }
    let name = format!("weightsync, digest on, {lanes} connection(s)");
    report.compare("loopback, one hop", "GB/s", (&name, &ours), ("iperf3, one stream", &iperf), "at least 1.0");
    if lanes > 1 {
        let what = format!("loopback, one hop, against iperf3 with {lanes} streams");
        report.compare(&what, "GB/s", (&name, &ours), ("iperf3", &as_many), "for comparison");
    }
    Ok(())
}

impl Settings {
    /// Connections that the hop uses.
    fn lanes(&self) -> usize {
        let given = self.tuning.iter().skip_while(|word| *word != "--lanes").nth(1).and_then(|lanes| lanes.parse().ok());
        given.unwrap_or(TcpOptions::default().lanes)
    }
}

/// GB/s that the receiving side of iperf3 counted, over so many streams together.
fn iperf3(bytes: u64, streams: usize) -> Result<f64> {
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
    // For several streams, `--bytes` is what all send together.
    client.args(["--client", "127.0.0.1", "--port", &free, "--bytes", &bytes.to_string(), "--parallel", &streams.to_string(), "--json"]);
    let result: serde_json::Value = serde_json::from_str(&output(&mut client)?)?;
    server.wait()?;
    let _ = rest.join();
    let rate = result.pointer("/end/sum_received/bits_per_second").and_then(serde_json::Value::as_f64);
    Ok(rate.context("iperf3 said no rate")? / 8e9)
}
