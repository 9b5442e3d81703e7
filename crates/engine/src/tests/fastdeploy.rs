//! FastDeploy alone: its snapshot, its message from GPU memory, its refusals, and its traps.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;
use tokio::time::timeout;

use super::gpu::GpuBench;
use super::support::{Bench, HOUR, SNAPSHOT, SOON, adapter, held, post, until, write_checkpoint};
use crate::fastdeploy::steps::Wanted;
use crate::{EngineError, Holding, InstallJob, Left, Settling};
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};
use weightsync_testkit::simulator::{Faults, LoadFault, SimulatorOptions};

async fn bench(more: impl FnOnce(&mut SimulatorOptions)) -> Bench {
    Bench::start_with("fastdeploy", Faults::default(), more).await
}

fn job(on: &Bench, version: u64) -> InstallJob {
    on.job_with(version, PausePolicy::Abort)
}

async fn memory(on: &Bench) -> serde_json::Value {
    on.get("/simulator/memory").await
}

#[tokio::test]
async fn versions_in_a_row_replace_the_snapshot() {
    let on = bench(|options| options.fastdeploy.mtp = true).await;
    let facts = on.engine.probe(SOON).await.unwrap();
    assert_eq!((facts.kind.as_str(), facts.size), ("fastdeploy", 1));
    for version in [2, 3, 2] {
        let before = on.complete("the same prompt", 8).await;
        let report = on.engine.install(&job(&on, version)).await.unwrap();
        assert_eq!(report.start, on.engine.health(SOON).await.unwrap().start, "the install is no restart");
        assert_eq!(on.digest().await, on.fresh_digest(version).await);
        assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Version(held(version)));
        assert_ne!(on.complete("the same prompt", 8).await, before);
        assert!(!on.is_paused().await);
        let (placed, from) = (on.directory(1).join(SNAPSHOT), on.directory(version).join("model.safetensors"));
        assert_eq!(std::fs::read(placed).unwrap(), std::fs::read(from).unwrap());
    }
    let memory = memory(&on).await;
    assert_eq!((&memory["rebuilt"], &memory["recaptured"]), (&json!(3), &json!(3)), "caches and graphs are built again each time");
    assert_eq!((&memory["graphs"], &memory["mtpCache"], &memory["empty"]), (&json!(true), &json!(true), &json!([])));
}

#[tokio::test]
async fn running_request_fails_and_new_one_waits_for_new_weights() {
    let on = bench(|options| options.faults.token_ms = 5).await;
    let url = format!("{}/v1/completions", on.simulator.url());
    let body = json!({"model": "model", "prompt": "a long one", "max_tokens": 3000});
    let (running, ()) = tokio::join!(post(&url, &body), async {
        until("the request", || async { on.get("/simulator/digest").await["requests"] == json!(1) }).await;
        on.engine.install(&job(&on, 2)).await.unwrap();
    });
    assert_eq!(running.0, 500);
    assert!(running.1["error"]["message"].as_str().unwrap().contains("aborted since LLM Engine is paused"), "{running:?}");
    assert_eq!(on.digest().await, on.fresh_digest(2).await);
}

#[tokio::test]
async fn load_that_fails_once_is_repeated_with_one_tag_asleep() {
    let on = bench(|options| options.faults.load = Some(LoadFault::FailHalfwayOnce)).await;
    on.engine.install(&job(&on, 2)).await.unwrap();
    assert_eq!(on.digest().await, on.fresh_digest(2).await);
    assert!(memory(&on).await["empty"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn half_an_update_is_held_until_fed_or_restored() {
    for put_back in [false, true] {
        let on = bench(|_| {}).await;
        on.engine.install(&job(&on, 2)).await.unwrap();
        on.set_faults(Faults { load: Some(LoadFault::FailHalfway), ..Faults::default() }).await;
        let error = on.engine.install(&job(&on, 3)).await.unwrap_err();
        assert!(error.is_dirty() && error.step == "load", "{error}");
        assert!(error.to_string().contains("Out of memory"), "{error}");
        assert!(on.is_paused().await);
        assert_eq!(on.engine.settle(&Settling::LEFT_PAUSED, SOON).await.unwrap().holding, Holding::HalfAnUpdate(held(3)));
        on.set_faults(Faults::default()).await;
        if put_back {
            on.engine.put_back(SOON).await.unwrap();
            assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Startup);
        } else {
            on.engine.install(&job(&on, 3)).await.unwrap();
        }
        let version = if put_back { 1 } else { 3 };
        assert_eq!(on.digest().await, on.fresh_digest(version).await);
        assert!(!on.is_paused().await);
    }
}

#[tokio::test]
async fn a_wake_up_that_read_nothing_is_no_success() {
    let on = bench(|options| options.faults.load = Some(LoadFault::AcknowledgeUnread)).await;
    let error = on.engine.install(&job(&on, 2)).await.unwrap_err();
    assert!(error.is_dirty() && error.to_string().contains("opened none of their files"), "{error}");
    assert!(on.is_paused().await);
}

/// Story F93.
#[tokio::test]
async fn workers_slower_than_the_engine_waits_are_asked_once() {
    let on = bench(|options| {
        options.fastdeploy.worker_timeout = Duration::from_millis(50);
        options.faults.load_ms = 400;
    })
    .await;
    let error = on.engine.install(&job(&on, 2)).await.unwrap_err();
    assert!(error.is_dirty() && matches!(error.source, EngineError::Timeout { .. }), "{error}");
    let wakeups = on.calls().await.iter().filter(|call| *call == "POST /v1/wakeup").count();
    assert_eq!(wakeups, 1, "a load that may still run must not be joined by a second one");
    assert!(on.is_paused().await, "it is held, whatever the workers do meanwhile");
    // The workers end their work after the error.
    let fresh = on.fresh_digest(2).await;
    until("the workers", || async { on.digest().await == fresh }).await;
}

#[tokio::test]
async fn what_does_not_fit_is_refused_before_anything_is_touched() {
    type Tensors<'a> = &'a [(&'a str, &'a [u64])];
    let on = bench(|_| {}).await;
    let cases: [(Tensors, &str); 3] = [
        (&[("embed.weight", &[8, 4]), ("layer.q.weight", &[4, 4]), ("norm.weight", &[4])], "lacks layer.k.weight"),
        (
            &[("embed.weight", &[8, 4]), ("layer.q.weight", &[4, 4]), ("layer.k.weight", &[4, 4]), ("norm.weight", &[4]), ("x", &[1])],
            "brings the unknown x",
        ),
        (&[("embed.weight", &[4, 8]), ("layer.q.weight", &[4, 4]), ("layer.k.weight", &[4, 4]), ("norm.weight", &[4])], "in another shape"),
    ];
    for (tensors, named) in cases {
        write_checkpoint(&on.directory(2), tensors, 2);
        let error = on.engine.install(&job(&on, 2)).await.unwrap_err();
        assert!(!error.is_dirty() && error.to_string().contains(named), "{error}");
    }
    assert!(on.calls().await.iter().all(|call| call.starts_with("GET")), "nothing was asked for but facts");
    let mut halves = weightsync_core::weights::safetensors::Checkpoint::open(&on.directory(1)).unwrap().specs();
    halves[0].dtype = weightsync_core::weights::Dtype::BF16;
    let error = on.engine.fits(&halves).unwrap_err().to_string();
    assert!(error.contains("converts nothing"), "{error}");
}

#[tokio::test]
async fn impossible_policy_is_refused_with_a_possible_setting() {
    let on = bench(|_| {}).await;
    for (pause, kv_cache, named) in [
        (PausePolicy::Keep, KvCachePolicy::Reset, "pause to Abort"),
        (PausePolicy::Drain, KvCachePolicy::Reset, "pause to Abort"),
        (PausePolicy::External, KvCachePolicy::Reset, "resumes by itself"),
        (PausePolicy::Abort, KvCachePolicy::Keep, "kvCache to Reset"),
    ] {
        let error = on.engine.accepts(pause, kv_cache).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
    on.engine.accepts(PausePolicy::Abort, KvCachePolicy::Reset).unwrap();
}

#[tokio::test]
async fn rdma_only_steps_are_refused_with_the_reason() {
    for (words, named) in [
        (&["--dynamic-load-weight", "--load_strategy", "rsync"][..], "checkpoint_transfer, a library that is not public"),
        (&["--dynamic-load-weight", "--load-strategy=ipc"], "trainer's own memory"),
        (&["--dynamic-load-weight", "--load_strategy", "ipc", "--rsync_config", r#"{"transfer_mode": "gdr"}"#], "trainer's own memory"),
        (&["--dynamic-load-weight"], "without a --load_strategy"),
        (&["--load_strategy", "ipc_snapshot"], "--dynamic-load-weight"),
        (&["--dynamic-load-weight", "--load_strategy", "ipc_snapshot", "--tensor-parallel-size", "2"], "its own shards"),
    ] {
        let on = GpuBench::start("fastdeploy", 1, Some(words), |_| {}).await;
        let refusal = on.engine.probe(SOON).await.unwrap_err().to_string();
        assert!(refusal.contains(named), "{words:?}: {refusal}");
        assert!(refusal.contains("start FastDeploy") || refusal.contains("run FastDeploy"), "{refusal}");
    }
    let none = bench(|_| {}).await;
    let elsewhere = TempDir::new().unwrap();
    let blind = adapter("fastdeploy", &none.simulator.url(), None, Some(elsewhere.path().to_owned()));
    let refusal = blind.probe(SOON).await.unwrap_err().to_string();
    assert!(refusal.contains("holds no model_state"), "{refusal}");
}

#[tokio::test]
async fn restarted_agent_finds_model_directory_by_the_server() {
    let on = bench(|_| {}).await;
    let engine = adapter("fastdeploy", &on.simulator.url(), None, None);
    engine.probe(SOON).await.unwrap();
    engine.install(&job(&on, 2)).await.unwrap();
    assert_eq!(on.digest().await, on.fresh_digest(2).await);
}

#[tokio::test]
async fn restarted_server_reads_a_whole_snapshot() {
    let mut on = bench(|_| {}).await;
    on.engine.install(&job(&on, 2)).await.unwrap();
    on.restart().await;
    assert_eq!(on.digest().await, on.fresh_digest(2).await, "its snapshot is the last version");
    on.engine.install(&job(&on, 3)).await.unwrap();
    assert_eq!(on.digest().await, on.fresh_digest(3).await);
}

/// A server that reads steps from a folder by `update_weights`, and that folder.
async fn steps_bench(ranks: usize, more: impl FnOnce(&mut SimulatorOptions)) -> (GpuBench, TempDir) {
    let folder = TempDir::new().unwrap();
    (steps_bench_in(folder.path(), ranks, more).await, folder)
}

async fn steps_bench_in(folder: &Path, ranks: usize, more: impl FnOnce(&mut SimulatorOptions)) -> GpuBench {
    let config = json!({"directory": folder}).to_string();
    let size = ranks.to_string();
    let words = ["--dynamic-load-weight", "--load_strategy", "rsync", "--rsync_config", &config, "--tensor-parallel-size", &size];
    GpuBench::start("fastdeploy", ranks, Some(&words), |options| {
        "rsync".clone_into(&mut options.fastdeploy.load_strategy);
        options.fastdeploy.gdr = true;
        options.fastdeploy.transfer = Some(folder.to_owned());
        more(options);
    })
    .await
}

/// Each agent removed the other's step, and one server stayed paused in the middle of an update.
#[tokio::test]
async fn servers_of_one_step_folder_leave_each_others_steps() {
    let folder = TempDir::new().unwrap();
    let servers = [steps_bench_in(folder.path(), 1, |_| {}).await, steps_bench_in(folder.path(), 1, |_| {}).await];
    let install = |on: &GpuBench, version| {
        let (engine, job) = (on.engine.clone(), job(&on.bench, version));
        async move { engine.install(&job).await }
    };
    for version in [2, 3].repeat(6) {
        let (one, two) = tokio::join!(install(&servers[0], version), install(&servers[1], version));
        one.unwrap();
        two.unwrap();
    }
    for on in &servers {
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(3).await);
        assert!(!on.bench.is_paused().await);
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 2, "one step of each");
}

#[tokio::test]
async fn update_weights_brings_versions_to_every_rank() {
    let (on, folder) = steps_bench(2, |_| {}).await;
    std::fs::create_dir(folder.path().join("0")).unwrap();
    let facts = on.engine.probe(SOON).await.unwrap();
    assert_eq!((facts.size, facts.delivery.as_str()), (2, "update_weights, steps in a folder"));
    for version in [2, 3, 2] {
        on.engine.install(&job(&on.bench, version)).await.unwrap();
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(version).await);
        assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Version(held(version)));
        assert!(!on.bench.is_paused().await);
    }
    let memory = memory(&on.bench).await;
    assert_eq!((&memory["handles"], &memory["rebuilt"]), (&json!(1), &json!(0)), "it was never put to sleep");
    // One of our steps at a time, and the user's own.
    let mut names: Vec<String> = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() == 2 && names[0] == "0" && names[1].starts_with("weightsync-"), "{names:?}");
}

#[tokio::test]
async fn the_next_step_is_laid_while_the_last_one_serves() {
    let (on, folder) = steps_bench(1, |_| {}).await;
    on.engine.install(&job(&on.bench, 2)).await.unwrap();
    let before = on.bench.calls().await;
    let at = |call: &str| before.iter().position(|each| each == call);
    assert!(at("POST /v1/pause") < at("POST /v1/update_weights"), "{before:?}");
    // A step that cannot be prepared is detected before the server is paused.
    std::fs::remove_dir_all(folder.path()).unwrap();
    let error = on.engine.install(&job(&on.bench, 3)).await.unwrap_err();
    assert!(!error.is_dirty() && error.to_string().contains("cannot be laid into"), "{error}");
    let calls = on.bench.calls().await;
    assert!(calls[before.len()..].iter().all(|call| call.starts_with("GET")), "{calls:?}");
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(2).await);
}

#[tokio::test]
async fn a_draft_model_without_its_weights_holds_the_server() {
    let (on, _folder) = steps_bench(1, |options| options.fastdeploy.mtp = true).await;
    let error = on.engine.install(&job(&on.bench, 2)).await.unwrap_err();
    assert!(error.is_dirty() && error.to_string().contains("No MTP weights were cached"), "{error}");
    assert!(on.bench.is_paused().await);
}

#[tokio::test]
async fn a_step_that_failed_is_streamed_once_more() {
    let (on, _folder) = steps_bench(1, |options| options.faults.load = Some(LoadFault::FailHalfwayOnce)).await;
    on.engine.install(&job(&on.bench, 2)).await.unwrap();
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(2).await);
    assert_eq!(memory(&on.bench).await["handles"], json!(2), "a failure destroys the handle");
}

#[test]
fn an_answer_of_a_rank_less_or_a_tensor_less_is_no_success() {
    let wanted = Wanted { name: Some("weightsync-1"), tensors: Some(2), ranks: 2 };
    let rank = |version: &str, count: u64| json!({"version": version, "update_count": count});
    let ours = || rank("weightsync-1", 2);
    wanted.was_taken(&json!({"result": [ours(), ours()]})).unwrap();
    for (result, named) in [
        (json!(null), "0 of 2 ranks answered"),
        (json!([ours()]), "1 of 2 ranks answered"),
        (json!([ours(), rank("0", 2)]), "rank 1 took the step \"0\", not weightsync-1"),
        (json!([rank("weightsync-1", 1), ours()]), "rank 0 took 1 tensors of the 2"),
        (json!([ours(), {"version": "weightsync-1"}]), "rank 1 took no number of tensors"),
    ] {
        let refused = wanted.was_taken(&json!({"result": result})).unwrap_err();
        assert!(refused.contains(named), "{refused}");
    }
}

/// A server that was started for the asynchronous message, and its address.
async fn message_bench(more: impl FnOnce(&mut SimulatorOptions)) -> GpuBench {
    message_bench_of(1, "", more).await
}

/// A server with several ranks; its address ends with `end`.
async fn message_bench_of(ranks: usize, end: &str, more: impl FnOnce(&mut SimulatorOptions)) -> GpuBench {
    let folder = std::env::temp_dir().join(format!("fd-{}{end}", uuid::Uuid::new_v4().simple()));
    let address = format!("ipc://{}", folder.display());
    let config = json!({"transfer_mode": "ipc_async", "ipc_address": address}).to_string();
    let size = ranks.to_string();
    let words = ["--dynamic-load-weight", "--load_strategy", "ipc", "--rsync_config", &config, "--tensor-parallel-size", &size];
    GpuBench::start("fastdeploy", ranks, Some(&words), |options| {
        "ipc".clone_into(&mut options.fastdeploy.load_strategy);
        options.fastdeploy.async_ipc = Some(address.clone());
        more(options);
    })
    .await
}

#[tokio::test]
async fn async_message_brings_gpu_versions_bucket_by_bucket() {
    for v1 in [false, true] {
        let on = message_bench(|options| options.fastdeploy.v1_update_weights = v1).await;
        on.engine.probe(SOON).await.unwrap();
        let route = on.engine.device_route(PausePolicy::Abort, KvCachePolicy::Reset, SOON).await.unwrap();
        assert_eq!((route.name, route.gated), ("ipc_async", true));
        for version in [2, 3] {
            on.install(version).await.unwrap();
            assert_eq!(on.bench.digest().await, on.bench.fresh_digest(version).await);
            assert_eq!(on.engine.holding(SOON).await.unwrap(), Holding::Version(held(version)));
            assert!(!on.bench.is_paused().await);
        }
    }
}

#[tokio::test]
async fn reply_that_overtakes_the_workers_last_answer_counts() {
    let on = message_bench(|options| options.faults.last_answer_ms = 300).await;
    for version in [2, 3] {
        on.install(version).await.unwrap();
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(version).await);
    }
}

#[tokio::test]
async fn each_rank_clones_from_the_handle_on_its_own_gpu() {
    let on = message_bench_of(2, "-{rank}", |_| {}).await;
    assert_eq!(on.engine.probe(SOON).await.unwrap().size, 2);
    for version in [2, 3] {
        on.install(version).await.unwrap();
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(version).await);
        let ranks = memory(&on.bench).await["ranks"].clone();
        for (rank, name) in ["gpu0-1-1", "gpu1-1-1"].iter().enumerate() {
            let handles = ranks[rank]["handles"].as_array().unwrap();
            assert!(handles.len() == 1 && handles[0].as_str().unwrap().contains(name), "rank {rank} opened {handles:?}");
        }
        assert_eq!(ranks[0]["tensors"].as_object().unwrap().len(), 4);
        assert_eq!(ranks[0]["tensors"], ranks[1]["tensors"], "each rank got every tensor");
    }
}

#[tokio::test]
async fn ranks_without_an_address_each_are_refused_untouched() {
    let on = message_bench_of(2, "", |_| {}).await;
    let error = on.install(2).await.unwrap_err();
    assert!(!error.is_dirty() && error.to_string().contains("write {rank} into the server's ipc_address"), "{error}");
    assert!(!on.bench.calls().await.contains(&"GET /clear_load_weight".to_owned()));
}

#[tokio::test]
async fn a_message_that_lacks_a_parameter_is_refused_untouched() {
    let on = message_bench(|_| {}).await;
    let rest = [("embed.weight", &[8_u64, 4][..]), ("layer.q.weight", &[4, 4]), ("layer.k.weight", &[4, 4]), ("stranger", &[8, 4])];
    write_checkpoint(&on.bench.directory(2), &rest, 2);
    let before = on.bench.digest().await;
    let error = on.install(2).await.unwrap_err();
    assert!(!error.is_dirty() && error.to_string().contains("lacks norm.weight"), "{error}");
    // Without anything to compare, the message is not used either: upstream commented out the server's own check.
    std::fs::remove_file(on.bench.directory(1).join("model.safetensors")).unwrap();
    for version in [2, 3] {
        let error = on.install(version).await.unwrap_err();
        assert!(!error.is_dirty() && error.to_string().contains("does not look whether all its parameters came"), "{error}");
    }
    assert!(!on.bench.calls().await.contains(&"GET /clear_load_weight".to_owned()));
    assert_eq!(on.bench.digest().await, before);
    assert!(!on.bench.is_paused().await);
}

/// Story F94.
#[tokio::test]
async fn worker_that_cannot_clone_a_bucket_holds_the_server() {
    let on = message_bench(|options| options.faults.load = Some(LoadFault::FailHalfway)).await;
    let error = timeout(SOON, on.install_by(2, HOUR)).await.expect("the answer of the worker ends it").unwrap_err();
    assert!(error.is_dirty() && error.to_string().contains("Out of memory"), "{error}");
    assert!(on.bench.is_paused().await);
    on.bench.set_faults(Faults::default()).await;
    on.install(3).await.unwrap();
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(3).await);
}

#[tokio::test]
async fn message_cut_off_leaves_server_held_until_fed() {
    let on = message_bench(|_| {}).await;
    let (version, job) = (on.version(2), on.job(2));
    let install = version.feed_some(on.engine.as_ref(), &job, 1).await;
    assert_eq!(install.abandon("the stream broke").await, Left::Mixture);
    assert!(matches!(on.engine.holding(SOON).await.unwrap(), Holding::HalfAnUpdate(_)));
    on.install(3).await.unwrap();
    assert_eq!(on.bench.digest().await, on.bench.fresh_digest(3).await);
}
