//! A pod whose first address is IPv6: what listens there, and the main stories over `::1` alone.

use std::net::{IpAddr, Ipv6Addr};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use weightsync_net::identity::Ca;

use crate::model::Model;
use crate::world::{Actor, PROGRAM, SOON, World, installed, until};

const HERE: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

/// The variables that injection writes, and a free port for the pages.
fn injected(uid: &str, folder: &std::path::Path) -> [(&'static str, String); 10] {
    [
        ("WEIGHTSYNC_ROLE", "rollout".to_owned()),
        ("POD_NAME", "a".to_owned()),
        ("POD_UID", uid.to_owned()),
        ("POD_IP", HERE.to_string()),
        ("WEIGHTSYNC_CONTROLLER_URL", "https://[::1]:9".to_owned()),
        ("WEIGHTSYNC_CONTROLLER_CA", Ca::generate().unwrap().certificate_pem().to_owned()),
        ("WEIGHTSYNC_TOKEN", "t".to_owned()),
        ("WEIGHTSYNC_STATUS_ADDRESS", "[::]:0".to_owned()),
        ("WEIGHTSYNC_VERSION_DIR", folder.to_string_lossy().into_owned()),
        ("WEIGHTSYNC_GPUS", "none".to_owned()),
    ]
}

/// LLMKube #972: a kubelet that probes the pod's IPv6 address.
#[tokio::test(flavor = "multi_thread")]
async fn probes_of_an_ipv6_pod_are_answered_at_both_families() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let uid = format!("ipv6-{}", std::process::id());
    let mut command = Command::new(PROGRAM);
    command.arg("agent").envs(injected(&uid, folder.path())).stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut agent = command.spawn().unwrap();
    let mut lines = BufReader::new(agent.stderr.take().unwrap()).lines();
    let mut port_of = async |what: &str| {
        let found = async {
            loop {
                let line = lines.next_line().await.unwrap().expect("the agent goes on");
                if line.contains(what) {
                    return line.rsplit_once("]:").unwrap().1.trim().parse::<u16>().unwrap();
                }
            }
        };
        tokio::time::timeout(SOON, found).await.unwrap()
    };
    let (pages, probes) = (port_of("status pages").await, port_of("probes").await);
    let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(5)).build().unwrap();
    for (port, path) in [(probes, "readyz"), (probes, "healthz"), (pages, "metrics"), (pages, "readyz")] {
        for host in ["[::1]", "127.0.0.1"] {
            let answer = http.get(format!("http://{host}:{port}/{path}")).send().await;
            let status = answer.map(|answer| answer.status().as_u16());
            let expected = if path == "readyz" { 503 } else { 200 };
            assert_eq!(status.as_ref().ok(), Some(&expected), "{host} {path}: {status:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn main_stories_hold_where_all_addresses_are_ipv6() {
    let mut world = World::start_at(HERE, [Actor::new(), Actor::sglang()]).await;
    world.until_ready(2).await;
    let models = [1, 2].map(Model::small);
    let folders = [1, 2].map(|version| Model::small(version).save(&world.folder().join(format!("v{version}"))));
    let result = world.publish(&folders[0], 1, &[]).await.done();
    assert_eq!(installed(&result).len(), 2, "{result}");
    for number in [0, 1] {
        world.until_serves(number, &models[0]).await;
        assert_eq!(world.page(&format!("actor-{number}"), "/readyz").await.0, 200);
    }

    // An engine that starts again serves its start-up weights, and is fed.
    world.spoil(0, &json!({"rules": [{"path": "/health", "times": 1, "fault": {"kind": "crash"}}]})).await;
    let _gone = world.get(0, "/health").await;
    until("the engine to lose its version", || async { !world.serves(0, &models[0]).await }).await;
    world.until_serves(0, &models[0]).await;

    // A rollout that is lost comes back, and takes what was published meanwhile.
    world.signal("actor-1", Signal::KILL).await;
    world.reported("AgentLost", "actor-1").await;
    world.until_ready(2).await;
    let result = world.publish(&folders[1], 2, &[]).await.done();
    assert_eq!(installed(&result).len(), 2, "{result}");
    for number in [0, 1] {
        world.until_serves(number, &models[1]).await;
    }
    assert!(world.web_page().starts_with("http://[::1]:"), "{}", world.web_page());
}
