//! `weightsync agent`: the agent of one pod, until it receives a request to stop.
//!
//! All settings come from flags or the environment; secrets come from a file, from standard input, or from a variable, never from the
//! command line. `weightsync run` starts the same agent next to a command.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::num::ParseIntError;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};

use crate::client::{ClientServerConfig, SocketName, TrainerUsers};
use crate::enrollment::{Applicant, TokenSource, read_token};
use crate::fabric::FabricSettings;
use crate::gpu::{GpuChoice, GpuSettings};
use crate::process::{self, EngineFactory, Settings};
use crate::registry::Registered;
use crate::rollout::Places;
use crate::space::Cgroups;
use weightsync_core::protocol::{EngineAssignment, Incarnation, Role};
use weightsync_engine::{ApiKey, EngineConfig, LOCALHOST};
use weightsync_net::health;
use weightsync_net::listen::everywhere;
use weightsync_net::logs::{self, LogFormat};
use weightsync_net::shutdown;

/// Port of the status pages of an agent in a pod.
pub const STATUS_PORT: u16 = 8472;
/// Port on which an agent in a pod answers probes.
pub const PROBE_PORT: u16 = STATUS_PORT + 1;

/// What a pod takes part as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PodRole {
    /// The trainer is in this pod.
    Trainer,
    /// An engine is in this pod.
    Rollout,
}

/// After which time a pod serves that no operator claims; none for never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ServeUnclaimed(Option<Duration>);

impl FromStr for ServeUnclaimed {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        if text.is_empty() { Ok(Self(None)) } else { Ok(Self(Some(Duration::from_secs(text.parse()?)))) }
    }
}

/// Arguments of `weightsync agent`.
#[derive(Debug, Clone, Args)]
pub struct AgentArgs {
    /// What the pod takes part as; the same as its label `weightsync.dev/role`.
    #[arg(long, env = "WEIGHTSYNC_ROLE", value_enum)]
    role: PodRole,
    /// Name of the pod.
    #[arg(long, env = "POD_NAME")]
    pod: String,
    /// Namespace of the pod.
    #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
    namespace: String,
    /// UID of the pod.
    #[arg(long, env = "POD_UID")]
    pod_uid: String,
    /// Address of the pod; servers listen there.
    #[arg(long, env = "POD_IP")]
    ip: IpAddr,
    /// The controller: HOST:PORT, or a URL that begins with https://.
    #[arg(long, env = "WEIGHTSYNC_CONTROLLER_URL")]
    controller: String,
    /// The operator's CA: PEM text, or the path of a file that holds it.
    #[arg(long, env = "WEIGHTSYNC_CONTROLLER_CA", hide_env_values = true)]
    controller_ca: String,
    /// File that holds the token for enrolment; /dev/stdin reads one line once. A token in the variable WEIGHTSYNC_TOKEN goes first.
    #[arg(long, env = "WEIGHTSYNC_TOKEN_FILE", default_value = "/var/run/weightsync/token")]
    token_file: PathBuf,
    /// Port of the control server; 0 takes a free one. Further engines of the pod take the ports after it.
    #[arg(long, default_value_t = 0)]
    control_port: u16,
    /// Port of the data listener; 0 takes a free one. Further engines of the pod take the ports after it.
    #[arg(long, default_value_t = 0)]
    data_port: u16,
    /// Where the status pages (/readyz, /healthz, /metrics, /v1/roster) are; `[::]` takes both families of addresses.
    #[arg(long, env = "WEIGHTSYNC_STATUS_ADDRESS", default_value_t = everywhere(STATUS_PORT))]
    status_address: SocketAddr,
    /// Where probes (/readyz, /healthz) are answered, apart from everything else (default: the port after the status pages').
    #[arg(long)]
    probe_address: Option<SocketAddr>,
    /// Directory for versions, on a memory-backed file system that the engine sees.
    #[arg(long, env = "WEIGHTSYNC_VERSION_DIR", default_value = "/dev/shm/weightsync")]
    version_dir: PathBuf,
    /// The same directory as the engine sees it, where that differs.
    #[arg(long)]
    engine_version_dir: Option<PathBuf>,
    /// The engine's own model directory: versions are compared with it, and its configuration and tokenizer go next to the weights.
    #[arg(long, env = "WEIGHTSYNC_MODEL_DIR")]
    model_dir: Option<PathBuf>,
    /// Host of the engines; `localhost` is 127.0.0.1, and ::1 where nothing answers there.
    #[arg(long, default_value = LOCALHOST)]
    engine_host: String,
    /// File that holds the engine's API key; else the variable WEIGHTSYNC_ENGINE_API_KEY is read.
    #[arg(long)]
    engine_api_key_file: Option<PathBuf>,
    /// Abstract unix socket for the trainer (without a leading @); by default one named after the pod's UID.
    #[arg(long, env = "WEIGHTSYNC_SOCKET")]
    socket: Option<String>,
    /// Users that may speak on the trainer's socket next to the agent's own and root: ids with commas between them, or `any`.
    #[arg(long, env = "WEIGHTSYNC_TRAINER_UIDS", default_value = "")]
    trainer_uids: TrainerUsers,
    /// Seconds after which the pod serves what it has although no operator claimed it since the agent started; empty for never. Its engine may
    /// then serve another version than the others.
    #[arg(long, env = "WEIGHTSYNC_SERVE_UNCLAIMED_AFTER_SECONDS", default_value = "", value_name = "SECONDS")]
    serve_unclaimed_after_seconds: ServeUnclaimed,
    /// GPUs for NCCL and for engines on the same GPU: `auto` (those that are visible, shared out among the engines of the pod), `none`, or
    /// UUIDs with commas between them.
    #[arg(long, env = "WEIGHTSYNC_GPUS", default_value = "auto")]
    gpus: GpuChoice,
    /// File of NCCL's library; looked for next to the engine's torch and in the system if it is not given.
    #[arg(long, env = "WEIGHTSYNC_NCCL")]
    nccl: Option<PathBuf>,
    /// File of NIXL's C interface (libnixl_capi.so); looked for in Python's packages and in the system if it is not given.
    #[arg(long, env = "WEIGHTSYNC_NIXL")]
    nixl: Option<PathBuf>,
    /// Devices that NIXL may use, by UCX's names (`mlx5_0:1`), with commas between them, or `all`. If none is given, those that are nearest to a
    /// GPU, and all for slots in host memory. Other settings of UCX, such as UCX_IB_GID_INDEX, are taken from the environment.
    #[arg(long, env = "UCX_NET_DEVICES", default_value = "", hide_default_value = true)]
    nixl_devices: String,
    /// Log filter, e.g. `info` or `weightsync=debug,warn`; logs go to standard error.
    #[arg(long, env = "WEIGHTSYNC_LOG", default_value = "info")]
    log: String,
    /// Form of log lines.
    #[arg(long, env = "WEIGHTSYNC_LOG_FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
}

#[allow(missing_docs)]
impl AgentArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.init_logs()?;
        super::block_on(async move {
            let stop = shutdown::on_signals().context("signals cannot be awaited")?;
            process::run(self.settings().await?, stop).await?;
            Ok(ExitCode::SUCCESS)
        })
    }

    pub fn init_logs(&self) -> anyhow::Result<()> {
        Ok(logs::init(self.log_format, &self.log)?)
    }

    pub async fn settings(self) -> anyhow::Result<Settings> {
        let ca_pem = if self.controller_ca.contains("-----BEGIN") {
            self.controller_ca.clone()
        } else {
            let path = self.controller_ca.trim();
            if path.is_empty() {
                bail!("WEIGHTSYNC_CONTROLLER_CA is empty: the operator had no CA when this pod was made; create the pod again");
            }
            std::fs::read_to_string(path).with_context(|| format!("the operator's CA cannot be read from {path}"))?
        };
        let token = self.token().await?;
        let socket = match &self.socket {
            Some(name) => name.trim_start_matches('@').parse()?,
            None => SocketName::of_pod(&self.pod_uid)?,
        };
        let socket = ClientServerConfig { users: self.trainer_uids.clone(), ..ClientServerConfig::at(socket) };
        let places = Places {
            versions: self.version_dir.clone(),
            versions_in_engine: self.engine_version_dir.clone(),
            model: self.model_dir.clone(),
            name: self.pod_uid.clone(),
        };
        Ok(Settings {
            role: match self.role {
                PodRole::Trainer => Role::Source,
                PodRole::Rollout => Role::Rollout,
            },
            ip: self.ip,
            control_port: self.control_port,
            data_port: self.data_port,
            status: self.status_address,
            probes: self.probe_address.unwrap_or_else(|| health::alongside(self.status_address)),
            controller: controller_address(&self.controller)?,
            ca_pem,
            places,
            socket,
            engines: self.engines()?,
            cgroups: Cgroups::of_this_process(),
            serve_unclaimed_after: self.serve_unclaimed_after_seconds.0,
            command: None,
            gpus: GpuSettings { choice: self.gpus.clone(), nccl: self.nccl.clone(), worker: None, child: false },
            fabric: FabricSettings { nixl: self.nixl.clone(), devices: FabricSettings::devices(&self.nixl_devices), worker: None },
            applicant: Applicant {
                namespace: self.namespace,
                pod: self.pod,
                incarnation: Incarnation { pod_uid: self.pod_uid, instance: uuid::Uuid::new_v4().simple().to_string() },
                token,
            },
        })
    }

    async fn token(&self) -> anyhow::Result<TokenSource> {
        // An ephemeral container has no volume of its own that could hold a token. Not an option: command lines are seen by all.
        if let Some(token) = std::env::var("WEIGHTSYNC_TOKEN").ok().filter(|token| !token.is_empty()) {
            return Ok(TokenSource::Given(token));
        }
        // A stream can be read once only; a file is read again, because projected tokens are rotated.
        let rereadable = std::fs::metadata(&self.token_file).map_or(true, |found| found.is_file());
        Ok(if rereadable { TokenSource::File(self.token_file.clone()) } else { TokenSource::Given(read_token(&self.token_file).await?) })
    }

    fn engines(&self) -> anyhow::Result<EngineFactory> {
        let api_key = match &self.engine_api_key_file {
            Some(path) => Some(ApiKey::from_file(path)?),
            None => ApiKey::from_env("WEIGHTSYNC_ENGINE_API_KEY")?,
        };
        let unproven_routes = unproven_routes();
        let owner = format!("{}.{}", self.namespace, self.pod);
        let (host, served_model, versions) = (self.engine_host.clone(), self.model_dir.clone(), self.version_dir.clone());
        Ok(Arc::new(move |engine: &EngineAssignment, registered: Option<&Registered>| {
            let url = match registered.and_then(|registered| registered.address) {
                Some(address) => format!("http://{}", SocketAddr::new(address, engine.port)),
                None => url_of(&host, engine.port),
            };
            weightsync_engine::connect(EngineConfig {
                kind: engine.kind.clone(),
                url,
                api_key: registered.map_or_else(|| api_key.clone(), |registered| registered.api_key.clone()),
                served_model: served_model.clone(),
                owner: format!("{owner}.{}", engine.port),
                record: Some(versions.join(format!("engine-{}.json", engine.port))),
                processes: "/proc".into(),
                unproven_routes,
            })
        }))
    }
}

/// Whether `WEIGHTSYNC_UNPROVEN_ROUTES=1` allows ways from GPU memory that were never seen on a GPU.
pub fn unproven_routes() -> bool {
    std::env::var_os("WEIGHTSYNC_UNPROVEN_ROUTES").is_some_and(|value| value == "1")
}

/// URL of a server at a name or an address, which stands in brackets where it has colons.
fn url_of(host: &str, port: u16) -> String {
    match host.trim_matches(['[', ']']).parse() {
        Ok(address) => format!("http://{}", SocketAddr::new(address, port)),
        Err(_) => format!("http://{host}:{port}"),
    }
}

/// `HOST:PORT` of a URL or of such a text itself; an IPv6 address stands in brackets.
fn controller_address(text: &str) -> anyhow::Result<String> {
    let rest = match text.split_once("://") {
        Some(("https", rest)) => rest,
        Some((scheme, _)) => bail!("the controller is reached by https, not {scheme}: {text}"),
        None => text,
    };
    let address = rest.trim_end_matches('/');
    let bracketed = |host: &str| host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).is_some_and(is_ipv6);
    let is_host = |host: &str| !host.is_empty() && !host.contains(['/', ':', '[', ']']) || bracketed(host);
    match address.rsplit_once(':') {
        Some((host, port)) if is_host(host) && port.parse::<u16>().is_ok() => Ok(address.to_owned()),
        _ if is_host(address) => Ok(format!("{address}:443")),
        _ => bail!("{text} is not the address of a controller: HOST:PORT is wanted, with an IPv6 address in brackets"),
    }
}

fn is_ipv6(text: &str) -> bool {
    text.parse::<Ipv6Addr>().is_ok()
}

#[cfg(test)]
mod tests;
