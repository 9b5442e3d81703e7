//! The GPU worker on real GPUs of one host: bytes, bandwidth against torch, deaths, aborts, epochs.
//!
//! `cargo bench --bench gpu -- SCENARIO` runs one, `-- all` all of them; `tests/gpu/*.sh` name what they need. The program starts itself as
//! the workers, so that one file is all that a machine needs, besides python3 with torch where torch takes part. A scenario that sees
//! something wrong fails; figures are printed, with the runs that they are medians of.

#![allow(clippy::cast_precision_loss, clippy::unwrap_used, clippy::indexing_slicing)]

mod endings;
mod engine_groups;
mod engine_rank;
mod epochs;
mod fleet;
mod pattern;
mod reads;
mod recovery;
#[path = "../transport/report.rs"]
#[allow(dead_code)]
mod report;
mod speed;
mod torch;
mod verify;

use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    settings: Settings,
    /// Given by cargo.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

/// What all scenarios share.
#[derive(Args, Clone)]
pub struct Settings {
    /// GPUs to use; the first is the source. 0: all that are visible.
    #[arg(long, default_value_t = 0, global = true)]
    gpus: usize,
    /// NCCL's library by path.
    #[arg(long, global = true)]
    nccl: Option<PathBuf>,
    /// NIXL's libnixl_capi.so by path, for reads.
    #[arg(long, env = "WEIGHTSYNC_NIXL", global = true)]
    nixl: Option<PathBuf>,
    /// Memory of reads.
    #[arg(long, value_enum, default_value_t = reads::Memory::Gpu, global = true)]
    memory: reads::Memory,
    /// Size of a bucket in MiB.
    #[arg(long, default_value_t = 256, global = true)]
    mib: u64,
    /// Slots of a ring.
    #[arg(long, default_value_t = 4, global = true)]
    slots: u32,
    /// Measurements of each kind; medians are reported.
    #[arg(long, default_value_t = 5, global = true)]
    runs: usize,
    /// The Python that has torch.
    #[arg(long, default_value = "python3", global = true)]
    python: String,
    /// Where `torch_ranks.py` is.
    #[arg(long, default_value = "tests/gpu/torch_ranks.py", global = true)]
    torch_ranks: PathBuf,
    /// Where `reads.py` is.
    #[arg(long, default_value = "tests/gpu/reads.py", global = true)]
    bare_reads: PathBuf,
    /// Where `engine_ranks.py` is.
    #[arg(long, default_value = "tests/gpu/engine_ranks.py", global = true)]
    engine_ranks: PathBuf,
    /// Where the archive of `tests/gpu/engine_code.sh` was unpacked.
    #[arg(long, global = true)]
    engine_code: Option<PathBuf>,
    /// Engines of engine-groups.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "sglang,lmdeploy,vllm", global = true)]
    engines: Vec<engine_groups::Engine>,
    /// engine-groups without a GPU: rank 0 is torch, over gloo, with our store. Not for vLLM.
    #[arg(long, global = true)]
    rehearse: bool,
    /// Added to the environment of workers: NAME=VALUE.
    #[arg(long = "env", global = true)]
    environment: Vec<String>,
    /// One JSON object at the end instead of lines for people.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand, Clone, Copy)]
enum Command {
    /// Every scenario that needs no torch.
    Workers,
    /// Every scenario but engine-groups and reads.
    All,
    /// A source and receivers: every byte compared, every digest against the CPU's.
    Verify,
    /// A source of ours and receivers in torch: every byte compared there.
    TorchReceivers,
    /// A source of ours and ranks that run the engines' own group code: every byte compared there, groups ended and formed again.
    EngineGroups,
    /// Broadcasts with and without digests, against torch in the same run.
    Bandwidth,
    /// Reads through NIXL with and without digests, against NIXL's own Python package in the same run.
    Reads,
    /// How long a group of warm workers takes to form.
    Formation,
    /// 100 groups built and torn down: memory, descriptors and threads stay.
    Epochs,
    /// Abort twice, abort in the middle, abort and drop; a rank that never comes.
    Endings,
    /// SIGKILL of a receiver's or the source's worker in a broadcast, to the first verified broadcast of the next group.
    Recovery,
    #[command(hide = true)]
    Worker,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Command::Worker = arguments.command {
        return Ok(weightsync_gpu::worker::serve(std::io::stdin().as_fd().try_clone_to_owned()?)?);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build()?;
    let settings = arguments.settings;
    let mut report = report::Report::new(settings.json);
    runtime.block_on(async {
        use Command as C;
        let chosen = match arguments.command {
            C::All => vec![C::Verify, C::TorchReceivers, C::Bandwidth, C::Formation, C::Epochs, C::Endings, C::Recovery],
            C::Workers => vec![C::Verify, C::Formation, C::Epochs, C::Endings, C::Recovery],
            one => vec![one],
        };
        for command in chosen {
            match command {
                C::Verify => verify::run(&settings).await?,
                C::TorchReceivers => torch::receivers(&settings).await?,
                C::EngineGroups => engine_groups::run(&settings).await?,
                C::Bandwidth => speed::bandwidth(&settings, &mut report).await?,
                C::Reads => reads::run(&settings, &mut report).await?,
                C::Formation => speed::formation(&settings, &mut report).await?,
                C::Epochs => epochs::run(&settings, &mut report).await?,
                C::Endings => endings::run(&settings).await?,
                C::Recovery => recovery::run(&settings, &mut report).await?,
                C::All | C::Workers | C::Worker => {}
            }
        }
        anyhow::Ok(())
    })?;
    report.finish();
    Ok(())
}
