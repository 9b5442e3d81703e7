//! Groups of real processes, each pod in a network namespace of its own, whose links have different rates: what the pre-flight finds, and what
//! an update costs then. Needs root, iproute2 and nftables; it unshares network, mounts and processes first, as the chaos test does.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod group;
#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "../host/model.rs"]
mod model;
#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "../chaos/net.rs"]
mod net;

use std::process::Command;
use std::time::Duration;

use weightsync_core::membership::MemberStanding;
use weightsync_core::protocol::{Preflight, Reason};

use self::group::{Group, Links, Wanted, member};

/// Set for the process that has namespaces of its own.
const INSIDE: &str = "WEIGHTSYNC_EDGES_INSIDE";

/// Runs a test in namespaces of its own.
fn apart<F: Future<Output = ()>>(name: &str, test: impl FnOnce() -> F) {
    if std::env::var_os(INSIDE).is_some() {
        net::set_up();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        return runtime.block_on(test());
    }
    let this = std::env::current_exe().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]).arg(this);
    command.args([name, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"]);
    let status = command.env(INSIDE, "1").status().expect("unshare (util-linux) can be started");
    assert!(status.success(), "{status}; namespaces need root");
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[test]
fn slow_member_is_named_and_slows_no_update() {
    apart("slow_member_is_named_and_slows_no_update", || async {
        let links = Links { mbit: 100, slow: Some((2, 10)) };
        let without = Wanted { world: 1, rollouts: 3, links: Links { slow: None, ..links }, preflight: Preflight::Auto };
        let mut without = Group::start(without).await;
        without.measured().await;
        let usual = without.updates(5).await;
        println!("updates without the member: {usual:?}");
        let usual = median(usual);
        without.stop().await;

        let mut with = Group::start(Wanted { world: 2, rollouts: 4, links, preflight: Preflight::Auto }).await;
        let slow = member(2);
        let left_out = with.until("the slow member to be left out", |view| {
            let row = view.members.iter().find(|row| row.name.0 == slow);
            view.committed && row.is_some_and(|row| row.standing == MemberStanding::Out && row.reason == Reason::BadEdge)
        });
        let view = left_out.await;
        let named = view.degraded.iter().find(|found| found.reason == Reason::BadEdge).expect("a condition has the reason");
        assert!(named.message.contains(&slow) && named.message.contains("MB/s"), "{}", named.message);
        println!("the condition says: {}", named.message);
        let times = with.updates(5).await;
        println!("updates with it: {times:?}");
        let ratio = median(times).as_secs_f64() / usual.as_secs_f64();
        println!("an update with one edge at a tenth, pre-flight done: {ratio:.2} times that without the member ({usual:?})");
        // With the member in the chain it would take seven times as long; the figure is in docs/benchmarks.md.
        assert!(ratio < 3.0, "{ratio}");
        with.stop().await;
    });
}

#[test]
#[ignore = "a figure of two minutes: docs/benchmarks.md"]
fn figures_of_the_preflight() {
    apart("figures_of_the_preflight", || async {
        let links = Links { mbit: 100, slow: Some((2, 10)) };
        let mut off = Group::start(Wanted { world: 1, rollouts: 4, links, preflight: Preflight::Off }).await;
        println!("an update with one edge at a tenth, without pre-flight: {:?}", median(off.updates(1).await));
        off.stop().await;
        for mbit in [1_000, 10_000] {
            let links = Links { mbit, slow: None };
            let world = if mbit == 1_000 { 2 } else { 3 };
            let eight = Group::start(Wanted { world, rollouts: 7, links, preflight: Preflight::Auto }).await;
            let report = eight.measured().await;
            println!("pre-flight of 8 pods, links of {mbit} Mbit/s: {} edges in {} ms", report.measured, report.took_ms);
            eight.stop().await;
        }
    });
}
