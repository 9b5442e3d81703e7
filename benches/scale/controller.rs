//! The real `weightsync controller` as a process, and what it says and takes.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::exposition::Exposition;
use super::fill::{NAME, SYSTEM};
use super::plane::{Plane, Process, free_port, spawn};

const PROGRAM: &str = env!("CARGO_BIN_EXE_weightsync");
const END: Duration = Duration::from_secs(30);
/// Ticks of a second in `/proc`.
const TICKS: f64 = 100.0;

/// Ports stay the same over restarts, as a Service's do.
#[derive(Debug, Clone, Copy)]
pub struct Ports {
    enroll: SocketAddr,
    status: SocketAddr,
}

impl Ports {
    pub fn free() -> Result<Self> {
        let local = |port| SocketAddr::new(IpAddr::from(Ipv4Addr::LOCALHOST), port);
        Ok(Self { enroll: local(free_port()?), status: local(free_port()?) })
    }

    pub fn enroll(&self) -> String {
        self.enroll.to_string()
    }
}

pub struct Controller {
    process: Process,
    ports: Ports,
    pub started: Instant,
}

/// What was read at one moment.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    pub metrics: Exposition,
    /// Processor time used, in seconds.
    pub cpu: f64,
    /// MiB in use.
    pub memory: f64,
    /// The most MiB that ever were.
    pub peak: f64,
    /// What the API server answered, to anybody.
    pub requests: Vec<(String, f64)>,
    pub at: Option<Instant>,
}

impl Controller {
    pub fn start(plane: &Plane, ports: Ports, program: Option<&Path>, life: usize) -> Result<Self> {
        let mut command = Command::new(program.unwrap_or(Path::new(PROGRAM)));
        command.arg("controller").env("KUBECONFIG", &plane.kubeconfig);
        command.envs([("POD_NAME", "controller-0"), ("POD_NAMESPACE", SYSTEM)]);
        command.env("WEIGHTSYNC_LOG_FORMAT", "json");
        command.env("WEIGHTSYNC_CONTROLLER_URL", format!("https://{}", ports.enroll));
        command.args([
            format!("--name={NAME}"),
            "--agent-image=none".to_owned(),
            format!("--enroll-address={}", ports.enroll),
            format!("--status-address={}", ports.status),
            "--probe-address=127.0.0.1:0".to_owned(),
        ]);
        let process = spawn(&mut command, &plane.dir.path().join(format!("controller-{life}.log")))?;
        Ok(Self { process, ports, started: Instant::now() })
    }

    /// Ends it as a rollout of its Deployment does.
    pub async fn stop(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.process.0), Signal::TERM)?;
        let until = Instant::now() + END;
        while self.process.0.try_wait()?.is_none() {
            ensure!(Instant::now() < until, "the controller does not end");
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// What its page says; an error while it is not up.
    pub async fn metrics(&self) -> Result<Exposition> {
        let asked = async {
            let mut stream = TcpStream::connect(self.ports.status).await?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await?;
            anyhow::Ok(text)
        };
        let text = timeout(Duration::from_secs(10), asked).await.context("/metrics gives no answer")??;
        Ok(Exposition::parse(text.split_once("\r\n\r\n").context("no answer")?.1))
    }

    pub async fn read(&self, plane: &Plane) -> Result<Reading> {
        let of = |name: &str| fs::read_to_string(format!("/proc/{}/{name}", self.process.0.id()));
        let (stat, status) = (of("stat")?, of("status")?);
        let ticks: f64 = stat
            .rsplit_once(')')
            .context("stat")?
            .1
            .split_whitespace()
            .skip(14 - 3)
            .take(2)
            .filter_map(|field| field.parse::<f64>().ok())
            .sum();
        let mebibytes = |field: &str| -> f64 {
            let line = status.lines().find(|line| line.starts_with(field)).unwrap_or_default();
            line.split_whitespace().nth(1).and_then(|kibibytes| kibibytes.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1024.0
        };
        Ok(Reading {
            metrics: self.metrics().await?,
            cpu: ticks / TICKS,
            memory: mebibytes("VmRSS:"),
            peak: mebibytes("VmHWM:"),
            requests: plane.requests().await?,
            at: Some(Instant::now()),
        })
    }
}

const REQUESTS: &str = "weightsync_api_requests_total";

impl Reading {
    /// What a counter grew by since `before`.
    pub fn grown(&self, before: &Self, name: &str) -> f64 {
        self.metrics.all(name) - before.metrics.all(name)
    }

    /// Requests of the controller since `before`, but renewals of the lease and watches: what objects cause.
    pub fn calls(&self, before: &Self) -> f64 {
        let caused = |reading: &Self| reading.metrics.sum(REQUESTS, |labels| labels.get("method").is_some_and(|method| caused(method)));
        caused(self) - caused(before)
    }

    /// Requests of the controller since `before`, all of them.
    pub fn all_calls(&self, before: &Self) -> f64 {
        self.grown(before, REQUESTS)
    }

    /// Quantile of looks at objects since `before`, in ms.
    pub fn reconcile(&self, before: &Self, share: f64) -> f64 {
        self.metrics.quantile(&before.metrics, "weightsync_reconcile_duration_seconds", share) * 1000.0
    }

    /// Seconds since `before`.
    pub fn seconds(&self, before: &Self) -> f64 {
        self.at.zip(before.at).map_or(f64::NAN, |(now, then)| (now - then).as_secs_f64())
    }

    /// What the API server answered since `before` about objects, pods, Events and tokens, by kind.
    pub fn answered(&self, before: &Self) -> Vec<(String, f64)> {
        let resource = |kind: &str| kind.split(' ').nth(1).unwrap_or_default().split('/').next().unwrap_or_default().to_owned();
        let of = |kind: &str| ["weightsyncs", "pods", "events", "tokenreviews"].contains(&resource(kind).as_str());
        let grown = |(kind, count): &(String, f64)| {
            let known = before.requests.iter().find(|(other, _)| other == kind).map_or(0.0, |(_, count)| *count);
            (kind.clone(), count - known)
        };
        self.requests.iter().filter(|(kind, _)| of(kind)).map(grown).filter(|(_, count)| *count > 0.0).collect()
    }
}

/// Renewals of the lease are PUTs, and there are no others.
fn caused(method: &str) -> bool {
    !matches!(method, "put" | "watch")
}
