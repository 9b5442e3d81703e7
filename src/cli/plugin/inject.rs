//! `kubectl weightsync inject`: reads manifests, adds the agent where a template opts in, writes them again.
//!
//! Unless they are given, image, controller and CA are read from the installation in the cluster. So the result equals that of the
//! admission policy.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ListParams;
use kube::{Api, Client};
use serde_json::Value;

use crate::inject::{Options, Resources, inject};

const DEADLINE: Duration = Duration::from_secs(15);

#[derive(Debug, Args)]
pub struct InjectArgs {
    /// File with manifests (YAML, several documents); `-` is standard input.
    #[arg(short, long, default_value = "-")]
    filename: PathBuf,
    /// Image of the agent. Default: that of the installed controller.
    #[arg(long)]
    image: Option<String>,
    /// Pull policy of that image.
    #[arg(long, default_value = "IfNotPresent")]
    image_pull_policy: String,
    /// URL of the controller's enrolment service. Default: that of the installation.
    #[arg(long, requires = "ca_file")]
    controller_url: Option<String>,
    /// File with the PEM of the controller's CA. Default: that of the installation.
    #[arg(long, requires = "controller_url")]
    ca_file: Option<PathBuf>,
    /// CPU request of the sidecar, or of the container that copies the program.
    #[arg(long, default_value = "100m")]
    cpu: String,
    /// Memory request, in addition to the shared memory that holds weights.
    #[arg(long, default_value = "64Mi")]
    memory: String,
    /// CPU limit. Default: none.
    #[arg(long)]
    cpu_limit: Option<String>,
    /// Memory limit. Default: none. It must have room for the versions that the agent keeps.
    #[arg(long)]
    memory_limit: Option<String>,
    /// Limit of the volume at /dev/shm that a pod gets if it mounts none of its own. Default: none.
    #[arg(long)]
    shm_limit: Option<String>,
    /// Secret for pulling the image, added to those of the pod; may be given several times. It must exist in the pod's namespace.
    #[arg(long = "image-pull-secret", value_name = "NAME")]
    image_pull_secrets: Vec<String>,
}

impl InjectArgs {
    /// Writes the changed manifests to standard output, and what was done to standard error.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let text = weightsync_agent::command::text::read(&self.filename)?;
        let mut documents: Vec<Value> = serde_saphyr::from_multiple(&text).context("the input is not YAML")?;
        documents.retain(|document| !document.is_null());
        if documents.is_empty() {
            bail!("the input holds no manifest: give manifests with --filename FILE or on standard input");
        }
        let options = self.options()?;
        let mut templates = 0;
        for document in &mut documents {
            let injected = inject(document, &options)?;
            if injected.templates > 0 {
                eprintln!("{}: agent added to {} pod template(s)", injected.what, injected.templates);
            }
            templates += injected.templates;
        }
        if templates == 0 {
            eprintln!("nothing to do: no pod template carries the label weightsync.dev/role (trainer or rollout) and lacks the agent");
        }
        let out = serde_saphyr::to_string_multiple(&documents).context("the manifests cannot be written as YAML")?;
        std::io::stdout().write_all(out.as_bytes()).context("standard output cannot be written")?;
        Ok(ExitCode::SUCCESS)
    }

    fn options(&self) -> anyhow::Result<Options> {
        let amount = |name: &str, amount: &String| (name.to_owned(), amount.clone());
        let limits =
            [self.cpu_limit.as_ref().map(|most| amount("cpu", most)), self.memory_limit.as_ref().map(|most| amount("memory", most))];
        let resources = Resources {
            requests: [amount("cpu", &self.cpu), amount("memory", &self.memory)].into(),
            limits: limits.into_iter().flatten().collect(),
        };
        let shared_memory = self.shm_limit.clone();
        let image_pull_policy = self.image_pull_policy.clone();
        if let (Some(image), Some(url), Some(file)) = (&self.image, &self.controller_url, &self.ca_file) {
            let controller_ca = std::fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))?;
            return Ok(Options {
                image: image.clone(),
                image_pull_policy,
                controller_url: url.clone(),
                controller_ca,
                resources,
                shared_memory,
                image_pull_secrets: self.image_pull_secrets.clone(),
            });
        }
        let found = crate::cli::block_on(async {
            tokio::time::timeout(DEADLINE, installation()).await.context("the cluster did not respond within 15 s")?
        })
        .context("the installation cannot be read: give --image, --controller-url and --ca-file")?;
        Ok(Options {
            image: self.image.clone().unwrap_or(found.image),
            image_pull_policy,
            controller_url: self.controller_url.clone().unwrap_or(found.controller_url),
            controller_ca: found.controller_ca,
            resources,
            shared_memory,
            image_pull_secrets: self.image_pull_secrets.clone(),
        })
    }
}

struct Installation {
    image: String,
    controller_url: String,
    controller_ca: String,
}

async fn installation() -> anyhow::Result<Installation> {
    let client = Client::try_default().await.context("no cluster is configured")?;
    let ours = ListParams::default().labels("app.kubernetes.io/name=weightsync");
    let deployments = Api::<Deployment>::all(client.clone()).list(&ours).await.context("deployments cannot be listed")?;
    let deployment = match deployments.items.as_slice() {
        [one] => one.clone(),
        [] => bail!("no installation found: no Deployment has the label app.kubernetes.io/name=weightsync"),
        several => bail!("{} installations found: name one with --image, --controller-url and --ca-file", several.len()),
    };
    let (name, namespace) = (deployment.metadata.name.unwrap_or_default(), deployment.metadata.namespace.unwrap_or_default());
    let spec = deployment.spec.and_then(|spec| spec.template.spec).context("the Deployment has no pod template")?;
    let image = spec.containers.into_iter().find_map(|container| container.image).context("the Deployment names no image")?;
    let map = Api::<ConfigMap>::namespaced(client, &namespace).get(&format!("{name}-ca")).await;
    let map = map.with_context(|| format!("ConfigMap {namespace}/{name}-ca cannot be read"))?;
    let controller_ca = map.data.and_then(|mut data| data.remove("ca.crt"));
    let controller_ca = controller_ca.context("the controller has not written its CA yet: wait until it is ready")?;
    Ok(Installation { image, controller_url: format!("https://{name}.{namespace}.svc:8443"), controller_ca })
}
