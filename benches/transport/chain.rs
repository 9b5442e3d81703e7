//! Chains of several members against a chain of one, every link of the same rate.

use anyhow::{Context, Result};
use clap::Args;

use crate::namespaces::Network;
use crate::processes::{Node, send};
use crate::report::Report;

/// A chain whose every hop two cores can carry at the full rate of its link.
pub const SHORT: Usual = Usual { mbit: 1000, mib: 512, members: &[4] };
/// So many hops share those two cores: slower links, so that it is the links that are waited for.
pub const LONG: Usual = Usual { mbit: 200, mib: 96, members: &[8, 16] };

/// The settings of a measurement without options.
pub struct Usual {
    mbit: u32,
    mib: u64,
    members: &'static [u8],
}

#[derive(Args, Clone, Default)]
pub struct Settings {
    /// Rate of every link in Mbit/s, each way.
    #[arg(long)]
    mbit: Option<u32>,
    /// MiB of each measurement.
    #[arg(long)]
    mib: Option<u64>,
    /// Members of each of the longer chains.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u8).range(2..=250))]
    members: Vec<u8>,
    /// Arguments for leader and members.
    #[arg(last = true)]
    tuning: Vec<String>,
}

pub fn measure(settings: &Settings, usual: &Usual, runs: usize, report: &mut Report) -> Result<()> {
    let (mbit, mib) = (settings.mbit.unwrap_or(usual.mbit), settings.mib.unwrap_or(usual.mib));
    let lengths = if settings.members.is_empty() { usual.members } else { &settings.members };
    let network = Network::new(lengths.iter().max().context("no chain")? + 1, mbit)?;
    let hosts = &network.hosts;
    let (source, rest) = hosts.split_first().context("no host")?;
    let started = rest.iter().map(|host| Node::start(&host.prefix, &format!("{}:0", host.address), &settings.tuning));
    let members = started.collect::<Result<Vec<_>>>()?;
    let seconds = |count: usize| -> Result<f64> {
        let chain = members.get(..count).context("too few members")?;
        Ok(send(&source.prefix, chain, mib << 20, &settings.tuning)?.seconds)
    };
    let mut one = Vec::new();
    let mut longer = vec![Vec::new(); lengths.len()];
    for _ in 0..runs {
        one.push(seconds(1)?);
        for (length, runs) in lengths.iter().zip(&mut longer) {
            runs.push(seconds(usize::from(*length))?);
        }
    }
    for (length, runs) in lengths.iter().zip(&longer) {
        let what = format!("{mib} MiB over {length} links of {mbit} Mbit/s, open to confirmed");
        report.compare(&what, "s", (&format!("chain of {length}"), runs), ("chain of 1", &one), "at most 1.15");
    }
    Ok(())
}
