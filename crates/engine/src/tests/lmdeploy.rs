//! LMDeploy alone: the allowed routes of a server, and the known state of one that keeps no version.

use serde_json::{Value, json};
use tempfile::TempDir;

use super::gpu::GpuBench;
use super::support::{SOON, held};
use crate::lmdeploy::allowed::{Seen, any_route, tensor_route};
use crate::process::{EngineProcess, find};
use crate::record::{Record, UNKNOWN};
use crate::{EngineError, Holding, Settling};
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};

fn interface() -> Value {
    let fields =
        |names: &[&str]| json!({"properties": names.iter().map(|name| ((*name).to_owned(), json!({}))).collect::<serde_json::Map<_, _>>()});
    json!({"components": {"schemas": {
        "UpdateParamsRequest": fields(&["serialized_named_tensors", "load_format", "finished"]),
        "UpdateWeightsFromIPCRequest": fields(&["zmq_handles"]),
        "UpdateWeightsFromIPCStatus": fields(&["ready", "message", "backend", "device_type", "checkpoint_engine_version", "is_sleeping",
            "sleeping_tags", "device_uuids", "worker_ranks"]),
    }}})
}

fn process(words: &[&str]) -> EngineProcess {
    EngineProcess { pid: 1, start: "1@1".into(), words: words.iter().map(|word| (*word).to_owned()).collect() }
}

#[test]
fn way_without_sleep_is_allowed_only_where_proven() {
    let (proven, dense) = (interface(), json!({"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}));
    let plain = process(&["api_server", "--backend=pytorch"]);
    let seen = Seen { interface: Some(&proven), ranks: 1, config: Some(&dense), process: Some(&plain), kv_cache: KvCachePolicy::Reset };
    tensor_route(&seen).unwrap();
    let moe = json!({"architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16", "quantization_config": null});
    tensor_route(&Seen { config: Some(&moe), ..seen }).unwrap();
    tensor_route(&Seen { ranks: 2, ..seen }).unwrap();

    let other = json!({"components": {"schemas": {}}});
    let llama = json!({"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"});
    let half = json!({"architectures": ["Qwen3ForCausalLM"], "dtype": "float16"});
    let quantised = json!({"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}});
    let (draft, caching) = (process(&["--speculative-algorithm", "eagle"]), process(&["--enable-prefix-caching"]));
    let quantised_cache = process(&["--quant-policy=8"]);
    let refused = [
        (Seen { interface: None, ..seen }, "version is not known"),
        (Seen { interface: Some(&other), ..seen }, "not that of LMDeploy 0.18.0"),
        (Seen { ranks: 4, ..seen }, "4 ranks"),
        (Seen { ranks: 2, config: Some(&moe), ..seen }, "2 ranks"),
        (Seen { config: None, ..seen }, "config.json"),
        (Seen { config: Some(&llama), ..seen }, "LlamaForCausalLM"),
        (Seen { config: Some(&half), ..seen }, "float16"),
        (Seen { config: Some(&quantised), ..seen }, "quantised"),
        (Seen { process: None, ..seen }, "cannot be seen"),
        (Seen { process: Some(&draft), ..seen }, "draft"),
        (Seen { process: Some(&caching), ..seen }, "prefix cache"),
        (Seen { process: Some(&quantised_cache), ..seen }, "quantised"),
    ];
    for (seen, named) in refused {
        let why = tensor_route(&seen).unwrap_err();
        assert!(why.contains(named), "{why}");
    }
    tensor_route(&Seen { process: Some(&caching), kv_cache: KvCachePolicy::Keep, ..seen }).unwrap();
    assert!(any_route(Some(&quantised)).is_err() && any_route(None).is_ok());
}

#[tokio::test]
async fn what_the_server_lacks_is_probed_and_the_slower_way_says_why() {
    let words: Option<&[&str]> = Some(&[]);
    let route = |pause| async move {
        let no_ray = GpuBench::start("lmdeploy", 1, words, |options| options.ray = false).await;
        let no_abort = GpuBench::start("lmdeploy", 1, words, |options| options.abort_handling = false).await;
        let ask = |on: GpuBench| async move {
            // Dropping all of it ends its server too.
            let on = on;
            on.engine.device_route(pause, KvCachePolicy::Reset, SOON).await
        };
        (ask(no_ray).await, ask(no_abort).await)
    };
    let (no_ray, no_abort) = route(PausePolicy::AbortAwake).await;
    for (route, option) in [(no_ray, "--distributed-executor-backend ray"), (no_abort, "--enable-abort-handling")] {
        let route = route.unwrap();
        assert_eq!(route.name, "checkpoint-engine");
        assert!(route.why_not_faster.unwrap().contains(option));
    }
    let (no_ray, no_abort) = route(PausePolicy::External).await;
    assert!(matches!(no_ray, Err(EngineError::Unsupported { .. })), "sleeping would end requests that are not ours to end");
    assert_eq!(no_abort.unwrap().name, "update_weights", "no one has to be ended");

    let bare = GpuBench::start("lmdeploy", 1, None, |options| options.checkpoint_engine = false).await;
    let refusal = bare.engine.device_route(PausePolicy::Abort, KvCachePolicy::Reset, SOON).await.unwrap_err().to_string();
    assert!(refusal.contains("install checkpoint-engine"), "{refusal}");
}

#[tokio::test]
async fn server_of_two_ranks_is_fed_awake() {
    let words: Option<&[&str]> = Some(&[]);
    let on = GpuBench::start("lmdeploy", 2, words, |_| {}).await;
    let route = on.engine.device_route(PausePolicy::AbortAwake, KvCachePolicy::Reset, SOON).await.unwrap();
    assert_eq!((route.name, route.gpus.len()), ("update_weights", 2), "{:?}", route.why_not_faster);
    for version in [2, 3] {
        on.version(version).feed(on.engine.as_ref(), &on.job(version)).await.unwrap();
        assert_eq!(on.bench.digest().await, on.bench.fresh_digest(version).await);
    }
}

#[tokio::test]
async fn a_probe_tells_ranks_and_version_by_what_the_server_shows() {
    let on = GpuBench::start("lmdeploy", 2, None, |_| {}).await;
    let facts = on.engine.probe(SOON).await.unwrap();
    assert_eq!((facts.kind.as_str(), facts.size, facts.server_version.as_str()), ("lmdeploy", 2, "0.18.0"));
    assert_eq!(facts.answer_version, "none");
}

#[tokio::test]
async fn the_next_life_of_the_agent_knows_what_the_last_one_began() {
    let on = GpuBench::start("lmdeploy", 1, Some(&[]), |_| {}).await;
    let record = on.processes.path().join("record.json");
    let first = GpuBench::adapter(&on.bench, &on.processes, Some(record.clone()));
    let version = on.version(2);
    let install = version.feed_some(first.as_ref(), &on.job(2), 1).await;
    let successor = GpuBench::adapter(&on.bench, &on.processes, Some(record.clone()));
    assert!(matches!(successor.holding(SOON).await.unwrap(), Holding::HalfAnUpdate(_)));
    assert!(matches!(successor.settle(&Settling::LEFT_PAUSED, SOON).await.unwrap().holding, Holding::HalfAnUpdate(_)));
    install.abandon("the agent ends").await;
    version.feed(successor.as_ref(), &on.job(2)).await.unwrap();
    let third = GpuBench::adapter(&on.bench, &on.processes, Some(record));
    assert_eq!(third.holding(SOON).await.unwrap(), Holding::Version(held(2)));
}

#[test]
fn a_record_speaks_of_its_own_start_only() {
    let folder = TempDir::new().unwrap();
    let file = Some(folder.path().join("record.json"));
    let (version, half) = (Holding::Version(held(7)), Holding::HalfAnUpdate(held(8)));
    let record = Record::new(file.clone());
    assert_eq!(record.read("1"), Holding::Startup);
    record.write("1", &version).unwrap();
    assert_eq!((record.read("1"), record.read("2")), (version.clone(), Holding::Startup));
    assert_eq!(Record::new(file.clone()).read("1"), version);
    // A start that cannot be identified: half an update counts, a complete version only for this incarnation.
    record.write(UNKNOWN, &version).unwrap();
    assert_eq!((record.read(UNKNOWN), Record::new(file.clone()).read(UNKNOWN)), (version, Holding::Startup));
    record.write(UNKNOWN, &half).unwrap();
    assert_eq!(Record::new(file.clone()).read("3"), half);
    std::fs::write(file.as_ref().unwrap(), "nonsense").unwrap();
    assert_eq!(Record::new(file).read("3"), Holding::Startup);
}

#[test]
fn process_is_found_by_its_words_first_match_counts() {
    let folder = TempDir::new().unwrap();
    for (pid, ticks, line) in
        [("9", 50, "x\0api_server\0--server-port=1"), ("11", 40, "x\0api_server\0--server-port\x001\0"), ("12", 1, "other")]
    {
        let process = folder.path().join(pid);
        std::fs::create_dir(&process).unwrap();
        std::fs::write(process.join("cmdline"), line).unwrap();
        std::fs::write(process.join("stat"), format!("{pid} (a) b) S {} {ticks} 0", "0 ".repeat(18).trim())).unwrap();
    }
    std::fs::create_dir(folder.path().join("13")).unwrap();
    let found = find(folder.path(), |process| process.value("--server-port") == Some("1")).unwrap();
    assert_eq!(found.start, "11@40");
    assert!(found.has("--server-port") && !found.has("--server"));
    assert!(found.runs(folder.path()));
    std::fs::write(folder.path().join("11/stat"), format!("11 (a) S {} 41 0", "0 ".repeat(18).trim())).unwrap();
    assert!(!found.runs(folder.path()), "another process under the same number");
    assert_eq!(find(folder.path(), |_| false), None);
}
