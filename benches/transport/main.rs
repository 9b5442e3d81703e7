//! How fast the TCP data path is: one hop against `iperf3`, inside TLS against plain, what its digests cost, and longer chains against
//! one.
//!
//! `cargo bench --bench transport` runs all; `-- loopback`, `-- tls`, `-- hashing`, `-- chain` and `-- long-chains` run one. Every member
//! and leader is a process of its own: the program starts itself. Ratios are taken within one run, of medians. It changes nothing on the
//! machine but the network namespaces that it makes, and removes.

mod chain;
mod hashing;
mod loopback;
mod namespaces;
mod node;
mod processes;
#[allow(dead_code)]
mod report;
mod tls;

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
    /// One hop on the loopback device inside TLS, against the same in plain.
    Tls(processes::OneHop),
    /// What digests cost on one hop of the loopback device.
    Hashing(processes::OneHop),
    /// Four members against one, in network namespaces shaped to one equal rate (needs root, iproute2 and tc).
    Chain(chain::Settings),
    /// Eight and sixteen members against one, the same way, at a rate that two cores carry over all links.
    LongChains(chain::Settings),
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
        Some(Command::Tls(settings)) => tls::measure(&settings, arguments.runs, &mut report)?,
        Some(Command::Hashing(settings)) => hashing::measure(&settings, arguments.runs, &mut report)?,
        Some(Command::Chain(settings)) => chain::measure(&settings, &chain::SHORT, arguments.runs, &mut report)?,
        Some(Command::LongChains(settings)) => chain::measure(&settings, &chain::LONG, arguments.runs, &mut report)?,
        None => {
            loopback::measure(&loopback::Settings::default(), arguments.runs, &mut report)?;
            tls::measure(&processes::OneHop::default(), arguments.runs, &mut report)?;
            hashing::measure(&processes::OneHop::default(), arguments.runs, &mut report)?;
            chain::measure(&chain::Settings::default(), &chain::SHORT, arguments.runs, &mut report)?;
            chain::measure(&chain::Settings::default(), &chain::LONG, arguments.runs, &mut report)?;
        }
    }
    report.finish();
    Ok(())
}
