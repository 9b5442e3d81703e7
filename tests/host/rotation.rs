//! Certificates that end and are renewed while versions flow: a group of real processes over TLS, and no one notices.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::process::Command;
use weightsync_coordinator::local::{EngineProgram, Group, GroupSpec, PodSpec, default_policy, free_port};
use weightsync_core::membership::JoinPolicy;
use weightsync_core::protocol::EngineAssignment;
use weightsync_core::weights::IgnoredTensors;

use crate::model::Model;
use crate::world::{PROGRAM, SOON, until};

/// Renewed every four seconds: long enough for a busy machine, and three lives of a certificate are a short test.
const CERTIFICATES: Duration = Duration::from_secs(12);

fn spec(name: &str, folder: &Path, ports: &[u16]) -> GroupSpec {
    let pod = |name: String, pool, engine| PodSpec { name, pool, size: 1, gpus: Vec::new(), engine };
    let rollouts = ports.iter().enumerate().map(|(number, port)| {
        let model = folder.join("start").to_string_lossy().into_owned();
        let dev = weightsync_testkit::dev_program().display().to_string();
        let command = [&dev, "simulate-engine", "--engine", "vllm", "--port", &port.to_string(), "--model", &model];
        let engine = EngineProgram {
            assignment: EngineAssignment { kind: "vllm".into(), port: *port },
            registered: None,
            ignored: IgnoredTensors::default(),
            command: command.map(str::to_owned).to_vec(),
            environment: std::collections::BTreeMap::new(),
        };
        pod(format!("actor-{number}"), Some("rollouts".to_owned()), Some(engine))
    });
    let mut policy = default_policy();
    policy.health.period_ms = 500;
    policy.data_tls = true;
    GroupSpec {
        name: name.to_owned(),
        address: std::net::Ipv4Addr::LOCALHOST.into(),
        directory: folder.to_owned(),
        versions: folder.join("versions"),
        pods: std::iter::once(pod("trainer".into(), None, None)).chain(rollouts).collect(),
        policy,
        join: JoinPolicy::Immediate,
        debounce: Duration::from_millis(200),
        target: None,
        program: PathBuf::from(PROGRAM),
        guard: PathBuf::from(PROGRAM),
    }
}

/// How often an agent was given a certificate, by its log.
fn certificates(folder: &Path, pod: &str) -> usize {
    let log = std::fs::read_to_string(folder.join(format!("{pod}-agent.log"))).unwrap_or_default();
    log.lines().filter(|line| line.contains("enrolled") && !line.contains("not enrolled")).count()
}

async fn publish(name: &str, checkpoint: &Path, version: u64) -> Value {
    let mut command = Command::new(PROGRAM);
    command.arg("publish").arg(checkpoint).args(["--version", &version.to_string(), "--output", "json"]);
    command.args(["--socket", &format!("@weightsync/{name}-trainer")]).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(SOON, command.output()).await.expect("a publish ends").unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "version {version}: {}{}", text(&output.stdout), text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_renewed_three_times_disturb_no_version() {
    let folder = tempfile::tempdir().unwrap();
    let name = format!("rotation-{}", std::process::id());
    Model::small(0).save(&folder.path().join("start"));
    let ports = [free_port().unwrap(), free_port().unwrap()];
    let _ = rustls::crypto::ring::default_provider().install_default();
    let begun = Instant::now();
    let group = Group::start_certified(spec(&name, folder.path(), &ports), CERTIFICATES).await.unwrap();
    let mut view = group.view();
    tokio::time::timeout(SOON, view.wait_for(|view| view.ready == 2)).await.expect("a group").unwrap();
    let epoch = group.view().borrow().epoch;

    let pods = ["trainer", "actor-0", "actor-1"];
    let mut version = 0;
    // Three renewals, and beyond the end of the certificates that the group was formed with.
    while pods.iter().any(|pod| certificates(folder.path(), pod) < 4) || begun.elapsed() < CERTIFICATES + Duration::from_secs(2) {
        assert!(begun.elapsed() < SOON * 3, "certificates: {:?}", pods.map(|pod| certificates(folder.path(), pod)));
        version += 1;
        let checkpoint = folder.path().join(format!("version-{version}"));
        Model::small(version).save(&checkpoint);
        let result = publish(&name, &checkpoint, version).await;
        assert_eq!(result["installed"].as_array().map(Vec::len), Some(2), "version {version}: {result}");
        std::fs::remove_dir_all(&checkpoint).unwrap();
    }
    assert_eq!(group.view().borrow().epoch, epoch, "no one left the group over {version} versions");
    let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(5)).build().unwrap();
    for port in ports {
        until("the engine to serve the last version", || async {
            let answer = http.get(format!("http://127.0.0.1:{port}/simulator/digest")).send().await;
            let Ok(answer) = answer else { return false };
            answer.json::<Value>().await.unwrap_or_default()["tensors"] == json!(Model::small(version).digests())
        })
        .await;
    }
    group.stop().await;
}
