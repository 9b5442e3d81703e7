//! FastDeploy by steps that are no files of ours: from the agent's memory, under the strategy `ipc`, and of the server's own parameters.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;

use super::gpu::GpuBench;
use super::host::Version;
use super::support::{SOON, held, write_checkpoint};
use crate::{Holding, HostMemory, InstallError, InstallJob, InstallReport};
use weightsync_core::protocol::PausePolicy;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_testkit::simulator::{Fault, FaultRule, Faults, SimulatorOptions};

const ON: &str = "PATH=/bin\0FD_USE_GDR_CHECKPOINT_TRANSFER=1\0HOME=/root\0";
const OFF: &str = "PATH=/bin\0FD_USE_GDR_CHECKPOINT_TRANSFER=0\0";

/// A server that takes steps, the folder of its start step, and what its environment is seen to be.
async fn bench(
    (strategy, config, environment): (&str, serde_json::Value, Option<&str>),
    ranks: usize,
    more: impl FnOnce(&mut SimulatorOptions),
) -> (GpuBench, TempDir) {
    let folder = TempDir::new().unwrap();
    let mut config = config;
    config["directory"] = json!(folder.path());
    let (config, size) = (config.to_string(), ranks.to_string());
    let words = ["--dynamic-load-weight", "--load_strategy", strategy, "--rsync_config", &config, "--tensor-parallel-size", &size];
    let on = GpuBench::start("fastdeploy", ranks, Some(&words), |options| {
        strategy.clone_into(&mut options.fastdeploy.load_strategy);
        options.fastdeploy.gdr = environment != Some(OFF);
        options.fastdeploy.transfer = Some(folder.path().to_owned());
        more(options);
    })
    .await;
    std::fs::create_dir(folder.path().join("0")).unwrap();
    std::fs::copy(on.bench.directory(1).join("model.safetensors"), folder.path().join("0/model.safetensors")).unwrap();
    std::fs::write(on.bench.directory(1).join("version.yaml"), "step: 0\n").unwrap();
    if let Some(environment) = environment {
        std::fs::write(on.processes.path().join("77/environ"), environment).unwrap();
    }
    (on, folder)
}

async fn memory_bench(ranks: usize, more: impl FnOnce(&mut SimulatorOptions)) -> (GpuBench, TempDir) {
    bench(("rsync", json!({"updates": "memory"}), None), ranks, more).await
}

fn version(on: &GpuBench, number: u64) -> Version {
    Version::from(Checkpoint::open(&on.bench.directory(number)).unwrap(), number)
}

async fn install(on: &GpuBench, number: u64, change: impl FnOnce(&Version)) -> Result<InstallReport, InstallError> {
    install_within(on, number, SOON, change).await
}

/// From the memory of the version, which `change` may spoil once all of it is described.
async fn install_within(
    on: &GpuBench,
    number: u64,
    silence: Duration,
    change: impl FnOnce(&Version),
) -> Result<InstallReport, InstallError> {
    let version = version(on, number);
    let mut job = version.job();
    (job.terms.pause, job.silence) = (PausePolicy::Abort, silence);
    let mut install = on.engine.begin_host(&job).await?;
    for index in 0..version.layout.entries.len() {
        let bucket = version.bucket(index, install.digest(), None);
        install.bucket(bucket).await?;
    }
    change(&version);
    install.finish(held(number)).await
}

fn job(on: &GpuBench, version: u64) -> InstallJob {
    on.bench.job_with(version, PausePolicy::Abort)
}

fn names(folder: &Path) -> Vec<String> {
    folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test]
async fn memory_step_reaches_every_rank_and_makes_no_file() {
    let (on, folder) = memory_bench(2, |_| {}).await;
    let facts = on.engine.probe(SOON).await.unwrap();
    assert_eq!((facts.size, facts.delivery.as_str()), (2, "update_weights, from the agent's memory"));
    assert_eq!(on.engine.host_route(SOON).await.unwrap(), "checkpoint_transfer");
    assert!(on.engine.takes_directories().is_err());
    for number in [2, 3, 2] {
        install(&on, number, |_| {}).await.unwrap();
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(number).await);
        assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Version(held(number)));
        assert!(!on.bench.is_paused().await);
    }
    assert_eq!(names(folder.path()), ["0"]);
    on.engine.put_back(SOON).await.unwrap();
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(1).await);
}

#[tokio::test]
async fn flipped_byte_in_shared_memory_is_refused_by_name() {
    let (on, _folder) = memory_bench(2, |_| {}).await;
    let before = on.bench.digest().await;
    let error = install(&on, 2, |version| {
        let entry = &version.layout.entries[1];
        version.memory.write_all_at(&[0xff], entry.offset).unwrap();
    })
    .await
    .unwrap_err();
    let named = version(&on, 2).layout.entries[1].tensor.name.clone();
    assert!(error.is_dirty() && error.to_string().contains(&format!("tensor {named} is not what the agent says")), "{error}");
    assert_eq!(on.bench.digest().await, before, "no byte of it was taken");
    assert!(on.bench.is_paused().await);
    install(&on, 2, |_| {}).await.unwrap();
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(2).await);
}

#[tokio::test]
async fn loader_that_stops_early_is_reported_with_its_own_cause() {
    let (on, _folder) = memory_bench(1, |options| options.fastdeploy.stops_after = Some(1)).await;
    let error = install(&on, 2, |_| {}).await.unwrap_err();
    assert!(error.is_dirty() && error.to_string().contains("Out of memory error on GPU 0"), "{error}");
    assert!(on.bench.is_paused().await);
}

/// The name of the socket stands in `/proc/net/unix`; the token does not.
#[tokio::test]
async fn stranger_on_the_socket_of_workers_gets_no_memory() {
    let (on, _folder) = memory_bench(1, |_| {}).await;
    let mut strangers = Vec::new();
    install(&on, 2, |_| {
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
        for name in sockets.lines().filter_map(|line| line.split('@').nth(1)).filter(|name| name.starts_with("weightsync-feed/")) {
            let address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
            // Other tests of this process have such sockets too.
            let Ok(mut stranger) = UnixStream::connect_addr(&address) else { continue };
            let hello =
                json!({"token": "a guess", "protocol": 1, "rank": 0, "ranks": 1, "device": "cpu", "digests": ["xxh3-128"], "open": false});
            let _gone = stranger.write_all(format!("{}\n", json!({"hello": hello})).as_bytes());
            strangers.push(stranger);
        }
    })
    .await
    .unwrap();
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(2).await);
    assert!(!strangers.is_empty());
    for mut stranger in strangers {
        let mut heard = Vec::new();
        stranger.set_read_timeout(Some(SOON)).unwrap();
        let _reset = stranger.read_to_end(&mut heard);
        assert!(heard.is_empty(), "it was answered: {}", String::from_utf8_lossy(&heard));
    }
}

/// Workers that never connect are not waited for longer than silence is allowed, and a call that ended earlier says why.
#[tokio::test]
async fn step_that_no_worker_asks_for_ends_with_the_reason() {
    let no_library = json!({"status": "error", "error_message": "No module named 'checkpoint_transfer'"});
    for (fault, named) in [
        (Fault::Answer { status: 500, body: no_library }, "No module named 'checkpoint_transfer'"),
        (Fault::Answer { status: 200, body: json!({"status": "success", "result": []}) }, "before its workers connected"),
        (Fault::Hang, "rank 0, 1 did not connect to its agent"),
    ] {
        let (on, _folder) = memory_bench(2, |_| {}).await;
        let rule = FaultRule { path: "/v1/update_weights".to_owned(), after: 0, times: None, fault };
        on.bench.set_faults(Faults { rules: vec![rule], ..Faults::default() }).await;
        let error = install_within(&on, 2, Duration::from_millis(500), |_| {}).await.unwrap_err();
        assert!(error.is_dirty() && error.to_string().contains(named), "{error}");
        assert!(on.bench.is_paused().await);
        on.bench.set_faults(Faults::default()).await;
        install(&on, 2, |_| {}).await.unwrap();
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(2).await);
    }
}

#[tokio::test]
async fn memory_smaller_than_a_version_is_refused_untouched() {
    let (on, _folder) = memory_bench(1, |_| {}).await;
    let version = version(&on, 2);
    let mut job = version.job();
    (job.terms.pause, job.memory) = (PausePolicy::Abort, HostMemory::of(&version.memory, version.layout.total_bytes - 1).unwrap().into());
    let Err(error) = on.engine.begin_host(&job).await else { panic!("it was opened") };
    assert!(!error.is_dirty() && error.to_string().contains("do not hold the version"), "{error}");
    assert!(!on.bench.is_paused().await);
}

#[tokio::test]
async fn ipc_takes_steps_where_its_flag_is_seen() {
    for updates in ["folder", "memory"] {
        let (on, _folder) = bench(("ipc", json!({"updates": updates}), Some(ON)), 1, |_| {}).await;
        on.engine.probe(SOON).await.unwrap();
        match updates {
            "folder" => on.engine.install(&job(&on, 2)).await.unwrap(),
            _ => install(&on, 2, |_| {}).await.unwrap(),
        };
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(2).await);
    }
}

/// Without the flag an update would be written into the memory of the trainer.
#[tokio::test]
async fn ipc_whose_flag_is_off_or_unseen_is_refused_untouched() {
    for (environment, named) in [(Some(OFF), "computes with the trainer's own memory"), (None, "is not seen")] {
        let (on, _folder) = bench(("ipc", json!({}), environment), 1, |_| {}).await;
        let refusals =
            [on.engine.probe(SOON).await.unwrap_err().to_string(), on.engine.install(&job(&on, 2)).await.unwrap_err().to_string()];
        assert!(refusals.iter().all(|refusal| refusal.contains(named)), "{refusals:?}");
        assert!(on.bench.calls().await.iter().all(|call| call.starts_with("GET")), "nothing was changed");
    }
}

#[tokio::test]
async fn own_parameters_come_from_both_places_and_are_compared() {
    for updates in ["folder", "memory"] {
        let (on, _folder) = bench(("rsync", json!({"updates": updates}), Some(OFF)), 1, |_| {}).await;
        on.engine.probe(SOON).await.unwrap();
        for number in [2, 3] {
            match updates {
                "folder" => on.engine.install(&job(&on, number)).await.unwrap(),
                _ => install(&on, number, |_| {}).await.unwrap(),
            };
            assert_eq!(on.bench.digest().await, on.bench.fresh_digest(number).await);
        }
        on.engine.put_back(SOON).await.unwrap();
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(1).await);
        // The server would keep what it does not get, and say success.
        write_checkpoint(&on.bench.directory(2), &[("embed.weight", &[8, 4]), ("layer.q.weight", &[4, 4]), ("norm.weight", &[4])], 2);
        let refused = match updates {
            "folder" => on.engine.install(&job(&on, 2)).await.unwrap_err(),
            _ => install(&on, 2, |_| {}).await.unwrap_err(),
        };
        assert!(!refused.is_dirty() && refused.to_string().contains("lacks layer.k.weight"), "{refused}");
    }
}

#[tokio::test]
async fn own_parameters_of_two_ranks_are_refused() {
    let (on, _folder) = bench(("rsync", json!({}), Some(OFF)), 2, |_| {}).await;
    let refusal = on.engine.probe(SOON).await.unwrap_err().to_string();
    assert!(refusal.contains("parameters of its own shards"), "{refusal}");
}
