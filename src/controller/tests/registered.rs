//! A controller that follows another one while more engines are registered than the status lists: real agents, a real controller.

use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use serde_json::json;
use tokio::process::{Child, Command};
use tokio_util::sync::{CancellationToken, DropGuard};
use weightsync_agent::client::{ClientServerConfig, SocketName};
use weightsync_agent::enrollment::{Applicant, TokenSource};
use weightsync_agent::fabric::FabricSettings;
use weightsync_agent::gpu::{GpuChoice, GpuSettings};
use weightsync_agent::process::{EngineFactory, Settings, run};
use weightsync_agent::rollout::Places;
use weightsync_agent::space::Cgroups;
use weightsync_core::protocol::{Incarnation, Role};

use super::api_server::{ApiServer, projected_token};
use super::fixtures::{changed, plain};
use super::whole::{Controller, agent, cluster, status};
use crate::api::MAX_MEMBERS;

#[path = "../../../tests/host/agent_process/idle.rs"]
mod idle;

const PODS: usize = 5;
const ENGINES: u16 = 14;

/// Registers engines at ports from 8001 on, until its input ends.
const REGISTERS: &str = "
import sys
import weightsync
held = [weightsync.register_engine(8001 + number, timeout=60) for number in range(int(sys.argv[1]))]
sys.stdin.read()
";

/// The agent of a pod, and the process whose engines register with it.
struct Pod {
    folder: tempfile::TempDir,
    _agent: DropGuard,
    _engines: Child,
}

impl Pod {
    fn start(server: &ApiServer, controller: &Controller, name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let pod_uid = format!("uid-{name}");
        let token = folder.path().join("token");
        std::fs::write(&token, projected_token(name, &pod_uid)).unwrap();
        let socket = SocketName::of_pod(&format!("{pod_uid}-{}", std::process::id())).unwrap();
        let authority = server.get("configmaps", "system", "weightsync-ca").unwrap()["data"]["ca.crt"].as_str().unwrap().to_owned();
        let engines: EngineFactory = Arc::new(|_, _| Ok(Arc::new(idle::Idle)));
        let settings = Settings {
            role: Role::Rollout,
            applicant: Applicant {
                namespace: "default".into(),
                pod: name.into(),
                incarnation: Incarnation { pod_uid: pod_uid.clone(), instance: "1".into() },
                token: TokenSource::File(token),
            },
            ip: IpAddr::V4(Ipv4Addr::LOCALHOST),
            control_port: 0,
            data_port: 0,
            status: (Ipv4Addr::LOCALHOST, 0).into(),
            probes: (Ipv4Addr::LOCALHOST, 0).into(),
            controller: controller.enroll.clone(),
            ca_pem: authority,
            places: Places { versions: folder.path().join("versions"), versions_in_engine: None, model: None, name: pod_uid },
            socket: ClientServerConfig::at(socket.clone()),
            engines,
            cgroups: Cgroups::of_this_process(),
            serve_unclaimed_after: None,
            command: None,
            fabric: FabricSettings::default(),
            gpus: GpuSettings { choice: GpuChoice::None, ..GpuSettings::default() },
        };
        let cancel = CancellationToken::new();
        tokio::spawn(run(settings, cancel.clone()));
        let mut command = Command::new("python3");
        command.args(["-c", REGISTERS, &ENGINES.to_string()]).env("WEIGHTSYNC_SOCKET", socket.to_string());
        command.env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("python")).stdin(Stdio::piped()).kill_on_drop(true);
        Self { folder, _agent: cancel.drop_guard(), _engines: command.spawn().unwrap() }
    }

    /// The directories of its endpoints: an endpoint that is made again has another one.
    fn endpoints(&self) -> Vec<(String, u64)> {
        let entries = std::fs::read_dir(self.folder.path().join("versions")).unwrap().flatten();
        let directories = entries.filter(|entry| entry.path().is_dir());
        let mut found: Vec<_> =
            directories.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.metadata().unwrap().ino())).collect();
        found.sort();
        found
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn next_controller_keeps_engines_that_status_does_not_list() {
    let server = cluster();
    let object = changed("ws", 1, |object| object["spec"]["rollouts"][0]["engine"] = json!({"kind": "VLLM", "discovery": "Registered"}));
    server.put("weightsyncs", serde_json::to_value(object).unwrap());
    let names: Vec<String> = (0..PODS).map(|number| format!("actor-{number}")).collect();
    for name in &names {
        server.put("pods", serde_json::to_value(plain(name)).unwrap());
    }
    let controller = Controller::start(&server).await;
    let enroll = controller.enroll.clone();
    let _trainer = agent(&server, &controller, "trainer-0", "a").await;
    let pods: Vec<Pod> = names.iter().map(|name| Pod::start(&server, &controller, name)).collect();
    let ranks = 1 + PODS * usize::from(ENGINES);
    assert!(ranks > MAX_MEMBERS);
    server.until("all engines in one group", |server| status(server)["worldSize"] == ranks).await;
    let epoch = status(&server)["epoch"].clone();
    let before: Vec<_> = pods.iter().map(Pod::endpoints).collect();
    controller.stop().await;

    let next = Controller::start_on(&server, &enroll).await;
    let took_over =
        |event: &serde_json::Value| event["note"].as_str().is_some_and(|note| note.contains(&format!("working group of {ranks}")));
    server.until("the group is taken over", |server| server.all("events").iter().any(took_over)).await;
    server.until("the same group", |server| status(server)["worldSize"] == ranks).await;
    assert_eq!(status(&server)["epoch"], epoch);
    assert_eq!(pods.iter().map(Pod::endpoints).collect::<Vec<_>>(), before, "endpoints were made again");
    next.stop().await;
}
