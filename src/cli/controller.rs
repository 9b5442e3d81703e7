//! `weightsync controller`: runs the operator. The chart sets all of its options by environment variables.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

use crate::controller::{self, Injection, Settings, Ui, WebhookSettings};
use weightsync_net::health;
use weightsync_net::logs::{self, LogFormat};
use weightsync_net::shutdown;

#[derive(Debug, clap::Args)]
pub struct ControllerArgs {
    /// Name of this pod; the holder's name in the Lease.
    #[arg(long, env = "POD_NAME")]
    pod_name: String,
    /// Namespace of this pod.
    #[arg(long, env = "POD_NAMESPACE")]
    namespace: String,
    /// Name of the installation: of the Lease, and (with the suffix -ca) of the Secret and ConfigMap of the CA.
    #[arg(long, default_value = "weightsync")]
    name: String,
    /// Namespaces to watch, separated by commas; all if empty.
    #[arg(long, value_delimiter = ',', default_value = "")]
    watch_namespaces: Vec<String>,
    /// Image of agents that are added to running pods (agent.launch Ephemeral).
    #[arg(long)]
    agent_image: String,
    /// Pull policy of that image.
    #[arg(long, default_value = "IfNotPresent")]
    agent_image_pull_policy: String,
    /// URL at which agents reach this controller (default: `https://NAME.NAMESPACE.svc:8443`)
    #[arg(long, env = "WEIGHTSYNC_CONTROLLER_URL")]
    controller_url: Option<String>,
    /// Address to listen on for agents that enrol.
    #[arg(long, default_value = "[::]:8443")]
    enroll_address: SocketAddr,
    /// Address to listen on for /healthz, /readyz, /metrics, /loglevel and /ui.
    #[arg(long, default_value = "[::]:8080")]
    status_address: SocketAddr,
    /// Address to listen on for probes only (/healthz, /readyz) (default: the next port after the status address)
    #[arg(long)]
    probe_address: Option<SocketAddr>,
    /// Clients that may see the web page /ui: none, those on the pod's loopback interface (forwarded ports), or all that reach the status
    /// port.
    #[arg(long, value_enum, default_value_t)]
    ui: Ui,
    /// Serve the webhook that injects the agent into new pods, with these settings of the added lines, as JSON: `resources`, `sharedMemory`
    /// and `imagePullSecrets`. Without it there is no webhook.
    #[arg(long, value_name = "JSON", value_parser = webhook_settings, requires = "webhook_certificate")]
    inject: Option<WebhookSettings>,
    /// Folder with the certificate and key of the webhook, `tls.crt` and `tls.key`: the mounted Secret that the chart makes.
    #[arg(long, value_name = "DIR", requires = "inject")]
    webhook_certificate: Option<PathBuf>,
    /// OpenTelemetry collector (OTLP over HTTP, JSON) that gets a trace of every update, as `http://HOST:4318`; none if empty.
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", default_value = "")]
    otlp_endpoint: String,
    /// Log filter: a level, or `target=level` separated by commas.
    #[arg(long, env = "WEIGHTSYNC_LOG", default_value = "info")]
    log: String,
    /// Format of log lines.
    #[arg(long, env = "WEIGHTSYNC_LOG_FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
}

fn webhook_settings(text: &str) -> Result<WebhookSettings, String> {
    serde_json::from_str(text).map_err(|cause| format!("this is no JSON with resources, sharedMemory and imagePullSecrets: {cause}"))
}

impl ControllerArgs {
    /// Runs until a signal, or until the lease is lost.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        logs::init(self.log_format, &self.log)?;
        let controller_url = self.controller_url.unwrap_or_else(|| format!("https://{}.{}.svc:8443", self.name, self.namespace));
        let settings = Settings {
            pod_name: self.pod_name,
            namespace: self.namespace,
            name: self.name,
            watch_namespaces: self.watch_namespaces.into_iter().filter(|namespace| !namespace.is_empty()).collect(),
            agent_image: self.agent_image,
            agent_image_pull_policy: self.agent_image_pull_policy,
            controller_url,
            enroll_address: self.enroll_address,
            status_address: self.status_address,
            probe_address: self.probe_address.unwrap_or_else(|| health::alongside(self.status_address)),
            ui: self.ui,
            webhook: self.inject.zip(self.webhook_certificate).map(|(lines, certificate)| Injection { lines, certificate }),
            otlp_endpoint: self.otlp_endpoint,
        };
        super::block_on(async {
            let cancel = shutdown::on_signals().context("signals cannot be caught")?;
            controller::run(settings, cancel).await?;
            Ok(ExitCode::SUCCESS)
        })
    }
}
