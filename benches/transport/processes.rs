//! Processes of a measurement as their parent sees them: members, leaders that send one stream, and the processor time that they took.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::Args;

/// What a comparison of hops over the loopback device is asked for.
#[derive(Args, Clone)]
pub struct OneHop {
    /// GiB of each measurement.
    #[arg(long, default_value_t = 4)]
    pub gib: u64,
    /// Arguments for leader and members, e.g. `--lanes 2`.
    #[arg(last = true)]
    pub tuning: Vec<String>,
}

impl Default for OneHop {
    fn default() -> Self {
        Self { gib: 4, tuning: Vec::new() }
    }
}

#[allow(clippy::cast_precision_loss)]
pub fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
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

    /// Processor time that it has taken up to now, in seconds.
    fn processor(&self) -> Result<f64> {
        processor(&self.child.id().to_string())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// A stream that was sent.
pub struct Sent {
    /// From opening it until it was confirmed.
    pub seconds: f64,
    /// Processor time of the leader in that time, in seconds.
    pub leader: f64,
    /// That of all members.
    pub members: f64,
}

/// Sends one stream of `bytes` through members in their order, from a leader of its own process that is started through `prefix`.
pub fn send(prefix: &[String], chain: &[Node], bytes: u64, arguments: &[String]) -> Result<Sent> {
    let addresses: Vec<&str> = chain.iter().map(|member| member.address.as_str()).collect();
    let mut leader = program(prefix)?;
    leader.args(["leader", "--chain", &addresses.join(","), "--bytes", &bytes.to_string()]).args(arguments);
    let members = || chain.iter().map(Node::processor).sum::<Result<f64>>();
    let before = members()?;
    let said = output(&mut leader)?;
    let mut numbers = said.split_whitespace().map(str::parse::<f64>);
    let mut next = || numbers.next().context("a leader said too little")?.context("a leader said no number");
    Ok(Sent { seconds: next()?, leader: next()?, members: members()? - before })
}

/// Processor time of a process, in seconds; `self` is this one.
pub fn processor(process: &str) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name of the program may hold anything; after it come the state and numbers. Times are in hundredths of a second on every Linux.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: Vec<f64> = fields.skip(11).take(2).filter_map(|ticks| ticks.parse().ok()).collect();
    Ok(ticks.iter().sum::<f64>() / 100.0)
}

/// This program, started through `prefix`.
fn program(prefix: &[String]) -> Result<Command> {
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
