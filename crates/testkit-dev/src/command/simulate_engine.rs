//! `weightsync simulate-engine`: a stand-in for an inference server, for demos, local runs and tests. Hidden, because it serves no model.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use tokio::net::TcpListener;

use weightsync_engine::ApiKey;
use weightsync_testkit::simulator::{FastdeployOptions, Faults, GroupOptions, Simulator, SimulatorOptions, WeightTransfer};

#[derive(Debug, Args)]
pub struct SimulateEngineArgs {
    /// Engine whose endpoints and rules are simulated.
    #[arg(long, value_parser = ["vllm", "sglang", "lmdeploy", "fastdeploy"])]
    pub engine: String,
    /// Checkpoint to start with: a directory with safetensors files.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// vLLM and SGLang only: checkpoint of its draft model.
    #[arg(long, value_name = "DIR")]
    pub draft: Option<PathBuf>,
    /// Address to listen on.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one. The URL is the first line of the output.
    #[arg(long, alias = "server-port", default_value_t = 0)]
    pub port: u16,
    /// Name under which the model is served.
    #[arg(long, default_value = "model")]
    pub served_model_name: String,
    /// Worker ranks to report.
    #[arg(long, default_value_t = 1)]
    pub world_size: u32,
    /// Longest request, in tokens.
    #[arg(long, default_value_t = 4096)]
    pub max_model_len: usize,
    /// Environment variable that holds the API key which clients must show.
    #[arg(long, value_name = "VARIABLE")]
    pub api_key_env: Option<String>,
    /// vLLM only: leave out the routes of VLLM_SERVER_DEV_MODE=1.
    #[arg(long)]
    pub no_dev_mode: bool,
    /// UUID of the GPU of the next worker rank; given once for each. Without it, those that the container runtime let in, where it names them.
    #[arg(long = "gpu", value_name = "UUID", env = "NVIDIA_VISIBLE_DEVICES", value_delimiter = ',')]
    pub gpus: Vec<String>,
    /// Folder of the stand-in GPU driver, in whose memory buckets are found.
    #[arg(long, value_name = "DIR", env = "FAKEGPU_DIR")]
    pub fake_gpu: Option<PathBuf>,
    /// LMDeploy and vLLM only: without the Ray executor.
    #[arg(long)]
    pub no_ray: bool,
    /// LMDeploy only: without --enable-abort-handling.
    #[arg(long)]
    pub no_abort_handling: bool,
    /// FastDeploy only: where weights come from.
    #[arg(long, alias = "load_strategy", default_value = "ipc_snapshot", value_parser = ["ipc_snapshot", "ipc", "rsync"])]
    pub load_strategy: String,
    /// FastDeploy only: folder with a checkpoint for each version of its transfer library; without it there is no such library.
    #[arg(long, value_name = "DIR")]
    pub checkpoint_transfer: Option<PathBuf>,
    /// FastDeploy only: as with `FD_USE_GDR_CHECKPOINT_TRANSFER=1`: the library streams checkpoint tensors.
    #[arg(long)]
    pub gdr_checkpoint_transfer: bool,
    /// FastDeploy only: as the server takes it; `ipc_address` and `gdr_mtp_chunk_size` are used.
    #[arg(long, alias = "rsync_config", value_name = "JSON", default_value = "{}")]
    pub rsync_config: String,
    /// FastDeploy only: with a draft model in addition to the main one.
    #[arg(long)]
    pub mtp: bool,
    /// Without checkpoint-engine installed.
    #[arg(long)]
    pub no_checkpoint_engine: bool,
    /// vLLM only: started with WeightSync's own weight-transfer back end.
    #[arg(long)]
    pub weightsync_backend: bool,
    /// vLLM only: another backend for --weight-transfer-config.
    #[arg(long, value_parser = ["nccl", "ipc"], conflicts_with = "weightsync_backend")]
    pub weight_transfer: Option<String>,
    /// NCCL's library for the groups that its ranks join, with the stand-in GPU driver.
    #[arg(long, value_name = "FILE", env = "WEIGHTSYNC_NCCL")]
    pub nccl: Option<PathBuf>,
    /// Version of torch to simulate, where groups depend on it: 2.15 makes groups of nccl2.
    #[arg(long, value_name = "MAJOR.MINOR", value_parser = parse_version)]
    pub torch: Option<(u32, u32)>,
    /// How long the engine's torch tries a store and waits in a broadcast, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    pub group_timeout: u64,
    /// Faults, as JSON, e.g. '{"loadMs":200,"rules":[{"path":"/pause","fault":{"kind":"hang"}}]}'. Can be changed later by POST
    /// /simulator/faults.
    #[arg(long, value_name = "JSON", value_parser = parse_faults, default_value = "{}")]
    pub faults: Faults,
}

fn parse_faults(text: &str) -> Result<Faults, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn parse_version(text: &str) -> Result<(u32, u32), String> {
    let parts = text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parts.ok_or_else(|| format!("{text} is no version like 2.15"))
}

impl SimulateEngineArgs {
    /// Serves until it is killed, or until one of its faults ends it (exit code 1).
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let api_key = match &self.api_key_env {
            Some(name) => Some(ApiKey::from_env(name)?.with_context(|| format!("the environment variable {name} is not set"))?),
            None => None,
        };
        let config: serde_json::Value = serde_json::from_str(&self.rsync_config).context("--rsync-config is not JSON")?;
        let text = |name: &str| config.get(name).and_then(serde_json::Value::as_str).map(str::to_owned);
        let defaults = FastdeployOptions::default();
        let fastdeploy = FastdeployOptions {
            load_strategy: self.load_strategy,
            transfer: self.checkpoint_transfer,
            gdr: self.gdr_checkpoint_transfer,
            mtp_chunk: config
                .get("gdr_mtp_chunk_size")
                .and_then(serde_json::Value::as_u64)
                .map_or(defaults.mtp_chunk, |size| usize::try_from(size).unwrap_or(usize::MAX)),
            async_ipc: text("ipc_address"),
            mtp: self.mtp,
            ..defaults
        };
        // Ranks have GPUs only where the stand-in driver is.
        let groups = self.fake_gpu.as_ref().map(|_| {
            let own = std::env::current_exe().context("this program's own file is not known")?;
            let defaults = GroupOptions::new(&self.engine, own);
            let torch = self.torch.unwrap_or(defaults.torch);
            Ok::<_, anyhow::Error>(GroupOptions { nccl: self.nccl, patience: Duration::from_secs(self.group_timeout), torch, ..defaults })
        });
        let options = SimulatorOptions {
            fastdeploy,
            groups: groups.transpose()?,
            weight_transfer: match self.weight_transfer {
                Some(backend) => Some(WeightTransfer::of(&backend)),
                None => self.weightsync_backend.then(WeightTransfer::weightsync),
            },
            draft: self.draft,
            served_model_name: self.served_model_name,
            world_size: self.world_size,
            max_model_len: self.max_model_len,
            api_key: api_key.map(|key| key.text().to_owned()),
            dev_mode: !self.no_dev_mode,
            // The runtime's list may be `all` or `none`.
            gpus: self.gpus.into_iter().filter(|gpu| gpu.starts_with("GPU-")).collect(),
            gpu_memory: self.fake_gpu.map(|folder| folder.join("memory")),
            ray: !self.no_ray,
            abort_handling: !self.no_abort_handling,
            checkpoint_engine: !self.no_checkpoint_engine,
            faults: self.faults,
            ..SimulatorOptions::new(&self.engine, self.model)
        };
        let address = SocketAddr::new(self.host, self.port);
        weightsync_agent::command::block_on(async move {
            let listener = TcpListener::bind(address).await.with_context(|| format!("{address} cannot be listened on"))?;
            let mut simulator = Simulator::start(options, listener).await?;
            println!("{}", simulator.url());
            simulator.ended().await;
            Ok(ExitCode::FAILURE)
        })
    }
}
