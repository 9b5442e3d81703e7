//! An etcd and a kube-apiserver on loopback, KWOK in the place of kubelets, and nothing else of Kubernetes: no scheduler, no controllers. All
//! end with the bench.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use serde_json::json;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

/// A fresh API server answers within this long.
const START: Duration = Duration::from_secs(120);
const TOKEN: &str = "scale-bench";

/// A child process that is killed when this is dropped.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub struct Plane {
    pub client: Client,
    pub kubeconfig: PathBuf,
    pub dir: TempDir,
    processes: Vec<Process>,
}

/// A port that no one has now.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Starts a program whose output goes to a file.
pub fn spawn(command: &mut Command, log: &Path) -> Result<Process> {
    let log = fs::File::create(log)?;
    let program = command.get_program().to_string_lossy().into_owned();
    let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn();
    Ok(Process(child.with_context(|| format!("{program} cannot be started; is tests/cluster/control-plane.sh done, and on PATH?"))?))
}

impl Plane {
    /// Starts both with an empty store, and waits until the API server answers.
    pub async fn start() -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("weightsync-scale-").tempdir()?;
        let at = |name: &str| dir.path().join(name);
        let (etcd, peers, port) = (free_port()?, free_port()?, free_port()?);
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        fs::write(at("accounts.key"), key.serialize_pem())?;
        fs::write(at("accounts.pub"), key.public_key_pem())?;
        fs::write(at("tokens"), format!("{TOKEN},bench,bench,\"system:masters\"\n"))?;
        let etcd_url = format!("http://127.0.0.1:{etcd}");
        let mut store = Command::new("etcd");
        store.arg("--data-dir").arg(at("etcd")).args(["--unsafe-no-fsync", "--log-level=error", "--quota-backend-bytes=4294967296"]);
        store.args([format!("--listen-client-urls={etcd_url}"), format!("--advertise-client-urls={etcd_url}")]);
        let peer_url = format!("http://127.0.0.1:{peers}");
        store.args([format!("--listen-peer-urls={peer_url}"), format!("--initial-advertise-peer-urls={peer_url}")]);
        store.arg(format!("--initial-cluster=default={peer_url}"));
        let mut server = Command::new("kube-apiserver");
        server.args(["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"]);
        server.args([format!("--etcd-servers={etcd_url}"), format!("--secure-port={port}")]);
        server.arg(format!("--cert-dir={}", at("certificates").display()));
        server.arg(format!("--token-auth-file={}", at("tokens").display()));
        server.args(["--authorization-mode=RBAC", "--service-account-issuer=https://kubernetes.default.svc"]);
        server.arg(format!("--service-account-key-file={}", at("accounts.pub").display()));
        server.arg(format!("--service-account-signing-key-file={}", at("accounts.key").display()));
        let processes = vec![spawn(&mut store, &at("etcd.log"))?, spawn(&mut server, &at("kube-apiserver.log"))?];

        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "bench",
            // Its certificate is its own and new each time; nothing leaves this machine.
            "clusters": [{"name": "bench", "cluster": {"server": format!("https://127.0.0.1:{port}"), "insecure-skip-tls-verify": true}}],
            "users": [{"name": "bench", "user": {"token": TOKEN}}],
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        });
        let kubeconfig = at("kubeconfig");
        fs::write(&kubeconfig, config.to_string())?;
        let config: Kubeconfig = serde_json::from_value(config)?;
        let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
        let mut plane = Self { client: Client::try_from(config)?, kubeconfig, dir, processes };
        plane.answers().await?;
        plane.processes.push(plane.kubelets()?);
        Ok(plane)
    }

    /// KWOK with its own stages, which `tests/cluster/control-plane.sh` took from its module: every node of the API server is its.
    fn kubelets(&self) -> Result<Process> {
        let stages =
            PathBuf::from(env::var("WEIGHTSYNC_CACHE").context("tests/cluster/env.sh says where KWOK's stages are")?).join("kwok-stages");
        let mut kwok = Command::new("kwok");
        kwok.env("KWOK_WORKDIR", self.dir.path()).arg("--manage-all-nodes").arg("--kubeconfig").arg(&self.kubeconfig);
        for stage in fs::read_dir(&stages).with_context(|| format!("{} cannot be read", stages.display()))? {
            kwok.arg("--config").arg(stage?.path());
        }
        spawn(&mut kwok, &self.dir.path().join("kwok.log"))
    }

    async fn answers(&self) -> Result<()> {
        let until = Instant::now() + START;
        loop {
            let request = http::Request::get("/readyz").body(Vec::new())?;
            match self.client.request_text(request).await {
                Ok(text) if text == "ok" => return Ok(()),
                answer => {
                    let log = fs::read_to_string(self.dir.path().join("kube-apiserver.log")).unwrap_or_default();
                    let last = log.lines().last().unwrap_or_default();
                    ensure!(Instant::now() < until, "kube-apiserver does not get ready: {answer:?}; its log ends: {last}");
                }
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// Requests that the API server answered since its start, as `verb resource[/subresource]`.
    pub async fn requests(&self) -> Result<Vec<(String, f64)>> {
        let text = self.client.request_text(http::Request::get("/metrics").body(Vec::new())?).await?;
        let exposition = super::exposition::Exposition::parse(&text);
        Ok(exposition.sums("apiserver_request_total", |labels| {
            let of = |key: &str| labels.get(key).cloned().unwrap_or_default();
            let (verb, resource, part) = (of("verb"), of("resource"), of("subresource"));
            if part.is_empty() { format!("{verb} {resource}") } else { format!("{verb} {resource}/{part}") }
        }))
    }
}
