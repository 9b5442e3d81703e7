//! The web page in a real browser: what a person sees after the page's own program ran, under its own policy.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use super::operate::{two_attempts, until};
use super::whole::{Controller, all_agents, cluster, is_ready};
use weightsync_core::protocol::{MemberName, Received, TransportKind};

/// A browser on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The document after scripts ran for a while, and what the browser reported about them.
async fn document(url: &str) -> (String, String) {
    let home = tempfile::tempdir().unwrap();
    let mut command = Command::new("chromium");
    command
        // A container's root may not make the sandbox; the page is our own.
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"])
        .args(["--proxy-server=direct://", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", home.path().display()))
        .arg(url)
        .env("HOME", home.path())
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await.expect("the browser ends");
    let output = output.expect("chromium runs: tests/cluster/packages.sh installs it");
    (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn browser_draws_members_and_timeline_under_the_policy() {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    two_attempts(&server, &controller, &agents).await;
    let received =
        |from: &str, bytes| Received { version: 7, from: MemberName(from.into()), by: TransportKind::Tcp, bytes, microseconds: 1_000_000 };
    let source = agents[0].state().member.expect("it is in a group").0;
    agents[1].change(|state| state.received = Some(received(&source, 2_500_000)));
    agents[2].change(|state| state.received = Some(received("actors/actor-0", 1_250_000)));
    let measured =
        |state: &Value| state["objects"][0]["members"].as_array().unwrap().iter().filter(|member| member["rate"].is_u64()).count() == 2;
    until(&controller, "the speeds", measured).await;

    let (document, said) = document(&format!("http://{}/ui/", controller.status)).await;
    for part in [
        "default/ws",
        "actors/actor-1",
        "2 of 2 replicas ready",
        "world size 3",
        "Ready=True",
        "1.5 MB",
        "622 ms",
        "2.5 MB/s",
        "1.3 MB/s",
        "GroupFormed",
    ] {
        assert!(document.contains(part), "{part} is not in {document}\n{said}");
    }
    assert_eq!(document.matches("<rect").count(), 8 + 3, "four phases of two attempts, and three members: {document}");
    assert_eq!(document.matches(r#"class="edge""#).count(), 2, "one arrow for each member that received bytes: {document}");
    assert!(document.contains("&lt;b&gt;actors/actor-1&lt;/b&gt;") && !document.contains("<b>"), "text is never markup: {document}");
    assert!(!said.contains("Content Security Policy") && !said.contains("Uncaught"), "{said}");
    controller.stop().await;
}
