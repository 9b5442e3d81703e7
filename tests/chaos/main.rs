//! Faults at random moments of a group, on real processes over TCP: `make chaos` plays them by the hundred, `make chaos-test` each once.
//!
//! The run is a function of its seed: `WEIGHTSYNC_CHAOS_SEED` replays it. It unshares network, mounts and processes first, so that links,
//! small disks and the remains of a failed test belong to it and end with it. Needs root, iproute2, nftables and gcc.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod checks;
mod clock;
mod fault;
mod fixture;
#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "../host/model.rs"]
mod model;
mod net;
mod plan;
mod play;
mod processes;
mod report;
mod run;
mod strangers;
mod trainer;
mod truth;

use std::process::Command;

/// Set for the process that has namespaces of its own.
const INSIDE: &str = "WEIGHTSYNC_CHAOS_INSIDE";

#[test]
fn every_fault_in_every_phase_is_bounded_named_and_healed() {
    if std::env::var_os(INSIDE).is_some() {
        return run::run();
    }
    // With namespaces of processes too: when this process ends, all that it started has ended.
    let this = std::env::current_exe().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]).arg(this);
    command.args(["every_fault_in_every_phase_is_bounded_named_and_healed", "--exact", "--nocapture", "--test-threads=1"]);
    let status = command.env(INSIDE, "1").status().expect("unshare (util-linux) can be started");
    assert!(status.success(), "{status}; namespaces need root");
}
