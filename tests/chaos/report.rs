//! The tables that a run ends with: how often each cell was hit, and how long each kind of fault took. Judges nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::plan::{Fault, Phase, Strike, impossible};
use crate::play::Record;

/// A strike, and what came of it.
pub struct Played {
    pub strike: Strike,
    /// One for each try; all but the last came when the phase was over.
    pub records: Vec<Record>,
    pub failure: Option<String>,
}

impl Played {
    /// Times that its phase still ran when the fault had happened.
    pub fn hits(&self) -> usize {
        self.records.iter().filter(|record| record.hit).count()
    }

    /// One line.
    pub fn line(&self) -> String {
        let Strike { number, fault, phase, victim, .. } = &self.strike;
        let what = if *fault == Fault::LyingMember { self.strike.lie().name() } else { fault.name() };
        let head = format!("{number:>4} {what:<30} {:<9} {:<8}", phase.name(), crate::fixture::pod(*victim));
        match (&self.failure, self.records.last()) {
            (Some(failure), _) => format!("{head} FAILED {failure}"),
            (None, Some(record)) => {
                let reasons: Vec<&str> = record.reasons.iter().map(|reason| reason.as_str()).collect();
                let tries = if record.hit { String::new() } else { " MISSED".to_owned() };
                format!("{head} whole again {:>6} ms, {}{tries}", record.whole.as_millis(), reasons.join(" "))
            }
            (None, None) => format!("{head} not played"),
        }
    }
}

/// Prints the tables; returns how many faults did not end well.
pub fn print(seed: u64, played: &[Played]) -> usize {
    let tries: usize = played.iter().map(|one| one.records.len()).sum();
    println!("\nhits of each cell (faults that came when the phase was over, in parentheses)");
    let head: Vec<String> = Phase::ALL.iter().map(|phase| format!("{:>10}", phase.name())).collect();
    println!("{:<30}{}", "", head.concat());
    let mut reasons = BTreeSet::new();
    for fault in Fault::ALL {
        let row = Phase::ALL.map(|phase| {
            if let Some(why) = impossible(fault, phase) {
                reasons.insert(format!("{}, {}: {why}", fault.name(), phase.name()));
                return format!("{:>10}", "-");
            }
            let of_cell = || played.iter().filter(|one| one.strike.fault == fault && one.strike.phase == phase);
            let hits: usize = of_cell().map(Played::hits).sum();
            let missed: usize = of_cell().map(|one| one.records.len() - one.hits()).sum();
            let missed = if missed == 0 { String::new() } else { format!(" ({missed})") };
            format!("{:>10}", format!("{hits}{missed}"))
        });
        println!("{:<30}{}", fault.name(), row.concat());
    }
    for reason in reasons {
        println!("- {reason}");
    }
    println!("\n{:<30}{:>8}{:>20}{:>20}{:>20}  reported as", "", "faults", "named after, ms", "published after, ms", "whole again, ms");
    for fault in Fault::ALL {
        let records: Vec<&Record> = played.iter().filter(|one| one.strike.fault == fault).flat_map(|one| &one.records).collect();
        let words: BTreeSet<&str> = records.iter().flat_map(|record| &record.reasons).map(|reason| reason.as_str()).collect();
        println!(
            "{:<30}{:>8}{:>20}{:>20}{:>20}  {}",
            fault.name(),
            records.len(),
            spread(records.iter().filter_map(|record| record.noticed)),
            spread(records.iter().filter_map(|record| record.served)),
            spread(records.iter().map(|record| record.whole)),
            words.into_iter().collect::<Vec<_>>().join(" "),
        );
    }
    let failures: Vec<&Played> = played.iter().filter(|one| one.failure.is_some()).collect();
    let answers: u64 = played.iter().flat_map(|one| &one.records).map(|record| record.answers).sum();
    println!("\n{tries} faults, {} did not end well; {answers} answers of engines compared; seed {seed}", failures.len());
    for one in &failures {
        println!("{}", one.line());
    }
    failures.len()
}

/// Median, and worst in parentheses.
fn spread(times: impl Iterator<Item = Duration>) -> String {
    let mut times: Vec<u128> = times.map(|time| time.as_millis()).collect();
    times.sort_unstable();
    match times.last() {
        Some(worst) => format!("{} ({worst})", times[times.len() / 2]),
        None => "-".to_owned(),
    }
}
