//! How fast the TCP data path is: one hop against `iperf3`, and a chain of four against a chain of one.
//!
//! `cargo bench --bench transport` runs both; `-- loopback` and `-- chain` run one. Every member and leader is a process of its own: the
//! program starts itself. Ratios are taken within one run, of medians. It changes nothing on the machine but the network namespaces that
//! it makes, and removes.

mod chain;
mod loopback;
mod namespaces;
mod node;
#[allow(dead_code)]
mod report;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Measurements of each kind; medians are reported.
    #[arg(long, default_value_t = 5, global = true)]
    runs: usize,
    /// One JSON object instead of lines for people.
    #[arg(long, global = true)]
    json: bool,
    /// Given by cargo.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Command {
    /// One hop on the loopback device, digest on, against iperf3 with one stream.
    Loopback(loopback::Settings),
    /// Four members against one, in network namespaces shaped to one equal rate (needs root, iproute2 and tc).
    Chain(chain::Settings),
    /// A member: prints its address, receives until its standard input ends.
    #[command(hide = true)]
    Member(node::MemberSettings),
    /// A leader: sends one stream and prints how long it took.
    #[command(hide = true)]
    Leader(node::LeaderSettings),
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut report = report::Report::new(arguments.json);
    match arguments.command {
        Some(Command::Member(settings)) => return node::member(&settings),
        Some(Command::Leader(settings)) => return node::leader(&settings),
        Some(Command::Loopback(settings)) => loopback::measure(&settings, arguments.runs, &mut report)?,
        Some(Command::Chain(settings)) => chain::measure(&settings, arguments.runs, &mut report)?,
        None => {
            loopback::measure(&loopback::Settings::default(), arguments.runs, &mut report)?;
            chain::measure(&chain::Settings::default(), arguments.runs, &mut report)?;
        }
    }
    report.finish();
    Ok(())
}
