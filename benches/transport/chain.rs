//! A chain of four members against a chain of one, every link of the same rate.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::namespaces::Network;
use crate::report::Report;

#[derive(Args, Clone)]
pub struct Settings {
    /// Rate of every link in Mbit/s, each way.
    #[arg(long, default_value_t = 1000)]
    mbit: u32,
    /// MiB of each measurement.
    #[arg(long, default_value_t = 512)]
    mib: u64,
    /// Members of the long chain.
    #[arg(long, default_value_t = 4)]
    members: u8,
    /// Arguments for leader and members.
    #[arg(last = true)]
    tuning: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { mbit: 1000, mib: 512, members: 4, tuning: Vec::new() }
    }
}

pub fn measure(settings: &Settings, runs: usize, report: &mut Report) -> Result<()> {
    let network = Network::new(settings.members + 1, settings.mbit)?;
    let hosts = &network.hosts;
    let (source, rest) = hosts.split_first().context("no host")?;
    let started = rest.iter().map(|host| Node::start(&host.prefix, &format!("{}:0", host.address), &settings.tuning));
    let members = started.collect::<Result<Vec<_>>>()?;
    let seconds = |count: usize| -> Result<f64> {
        let chain: Vec<&str> = members.iter().take(count).map(|member| member.address.as_str()).collect();
        let mut leader = program(&source.prefix)?;
        leader.args(["leader", "--chain", &chain.join(","), "--bytes", &(settings.mib << 20).to_string()]).args(&settings.tuning);
        Ok(output(&mut leader)?.trim().parse()?)
    };
    let (mut one, mut all) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        one.push(seconds(1)?);
        all.push(seconds(members.len())?);
    }
    let what = format!("{} MiB over links of {} Mbit/s, open to confirmed", settings.mib, settings.mbit);
    let chain = format!("chain of {}", members.len());
    report.compare(&what, "s", (&chain, &all), ("chain of 1", &one), "at most 1.15");
    Ok(())
}

/// A member in a process of its own; ends with its standard input.
pub struct Node {
    child: Child,
    pub address: String,
}

impl Node {
    pub fn start(prefix: &[String], listen: &str, tuning: &[String]) -> Result<Self> {
        let mut command = program(prefix)?;
        command.args(["member", "--listen", listen]).args(tuning).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut address = String::new();
        BufReader::new(child.stdout.take().context("no output")?).read_line(&mut address)?;
        let node = Self { child, address: address.trim().to_owned() };
        if node.address.is_empty() {
            bail!("a member did not start");
        }
        Ok(node)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// This program, started through `prefix`.
pub fn program(prefix: &[String]) -> Result<Command> {
    let me = std::env::current_exe()?;
    Ok(match prefix.split_first() {
        None => Command::new(me),
        Some((first, rest)) => {
            let mut command = Command::new(first);
            command.args(rest).arg(me);
            command
        }
    })
}

/// What a command prints; an error when it fails.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", output.status);
    }
    Ok(String::from_utf8(output.stdout)?)
}
