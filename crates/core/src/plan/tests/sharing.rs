//! When agent and engine can share a GPU's memory, and the message if they cannot.

use crate::plan::{Neighbour, NoSharing, ProcessView, SharingFacts, expandable_segments, sharing};
use crate::protocol::worker::GpuFacts;

fn gpu(uuid: &str) -> GpuFacts {
    serde_json::from_value(serde_json::json!({
        "uuid": uuid, "name": "H200", "bus": "0000:1a:00.0", "memoryBytes": 1, "freeBytes": 1, "driver": 13_000, "refused": null
    }))
    .unwrap()
}

fn view(namespace: u64) -> ProcessView {
    ProcessView { pid_namespace: Some(namespace), ..ProcessView::default() }
}

/// A wrapped engine with one GPU and correct settings.
fn wrapped() -> SharingFacts {
    SharingFacts {
        gpu_files: vec!["nvidia3".into()],
        control_file: true,
        shm_bytes: Some(1 << 34),
        gpus: Ok(vec![gpu("GPU-aaaa")]),
        agent: view(1),
        neighbour: Neighbour::Child(view(1)),
    }
}

fn alongside(neighbour: ProcessView) -> SharingFacts {
    SharingFacts { neighbour: Neighbour::Seen(neighbour), ..wrapped() }
}

/// The reason of the refusal, which must contain all these words.
fn refused(facts: &SharingFacts, words: &[&str]) -> NoSharing {
    let verdict = sharing(facts);
    let reason = verdict.gpus.expect_err("cannot be shared");
    for word in words {
        assert!(reason.to_string().contains(word), "{word}: {reason}");
    }
    assert_eq!(verdict.notes, Vec::<String>::new(), "one thing at a time");
    reason
}

#[test]
fn an_agent_in_the_engines_container_has_its_gpus() {
    let verdict = sharing(&wrapped());
    assert_eq!((verdict.gpus, verdict.notes), (Ok(vec!["GPU-aaaa".to_owned()]), Vec::new()));
    let unknown = SharingFacts { neighbour: Neighbour::Unknown, ..wrapped() };
    assert!(sharing(&unknown).gpus.is_ok(), "what is not known is no reason against");
}

/// vllm-project/vllm#55906: CUDA IPC between separate containers silently becomes TCP.
/// Story F79.
#[test]
fn containers_without_common_pid_namespace_are_named() {
    let hidden = SharingFacts { neighbour: Neighbour::Hidden, ..wrapped() };
    let words = ["another PID namespace", "agent.launch: Wrap", "shareProcessNamespace: true"];
    assert!(!refused(&hidden, &words).no_gpu(), "the GPU itself can be used");
    refused(&alongside(view(2)), &["another PID namespace (2, the agent is in 1)"]);
    assert!(sharing(&alongside(view(1))).gpus.is_ok());
    assert!(sharing(&alongside(ProcessView::default())).gpus.is_ok(), "a namespace that cannot be read is no reason against");
}

#[test]
fn a_container_without_a_gpu_says_what_is_missing() {
    let none = SharingFacts { gpu_files: Vec::new(), control_file: false, gpus: Err("no NVIDIA driver".into()), ..wrapped() };
    assert!(refused(&none, &["no /dev/nvidia0", "agent.launch: Wrap"]).no_gpu());
    let control = SharingFacts { control_file: true, ..none.clone() };
    refused(&control, &["/dev/nvidiactl exists, but no /dev/nvidia0"]);
    let mut void = none.clone();
    void.agent.nvidia_visible_devices = Some("void".into());
    refused(&void, &["NVIDIA_VISIBLE_DEVICES is \"void\""]);
    let broken = SharingFacts { gpus: Err("cuInit: 803, the driver is older than its library".into()), ..wrapped() };
    assert!(refused(&broken, &["803"]).no_gpu());
    let mut blind = SharingFacts { gpus: Ok(Vec::new()), ..wrapped() };
    blind.agent.cuda_visible_devices = Some("-1".into());
    refused(&blind, &["shows no GPU", "CUDA_VISIBLE_DEVICES is \"-1\""]);
}

#[test]
fn driver_without_compute_part_differs_from_missing_driver() {
    let with = |said: &str| {
        let mut facts = SharingFacts { gpus: Err("libcuda.so.1: no such file".into()), ..wrapped() };
        facts.agent.driver_capabilities = Some(said.into());
        facts
    };
    assert!(refused(&with("utility"), &["\"utility\"", "compute,utility"]).no_gpu());
    refused(&with("graphics, video"), &["NVIDIA_DRIVER_CAPABILITIES"]);
    for enough in ["all", "compute,utility", "utility, compute", ""] {
        refused(&with(enough), &["libcuda.so.1: no such file"]);
    }
}

/// ai-dynamo/modelexpress test plan rows 5.1 and 20: numbers of GPUs differ between processes, and MIG blocks NCCL.
/// Story F87.
#[test]
fn gpus_are_compared_by_uuid_and_a_mig_slice_is_refused() {
    let mut sliced = wrapped();
    sliced.gpus = Ok(vec![GpuFacts { refused: Some("MIG".into()), ..gpu("GPU-aaaa") }]);
    assert!(refused(&sliced, &["GPU-aaaa", "MIG"]).no_gpu());
    let mut with_slice = view(1);
    with_slice.nvidia_visible_devices = Some("MIG-1234".into());
    refused(&alongside(with_slice), &["MIG-1234"]);

    let named = |cuda: Option<&str>, nvidia: Option<&str>| {
        alongside(ProcessView {
            cuda_visible_devices: cuda.map(str::to_owned),
            nvidia_visible_devices: nvidia.map(str::to_owned),
            ..view(1)
        })
    };
    let words = ["the agent has GPU-aaaa", "has GPU-bbbb", "agent.launch: Wrap"];
    assert!(!refused(&named(None, Some("GPU-bbbb")), &words).no_gpu());
    refused(&named(Some("GPU-bbbb"), Some("GPU-aaaa,GPU-bbbb")), &["has GPU-bbbb"]);
    assert!(sharing(&named(Some("GPU-aa"), None)).gpus.is_ok(), "CUDA takes the first characters of a UUID");
    assert!(sharing(&named(Some("1,0"), Some("all"))).gpus.is_ok(), "numbers say nothing of another container's GPUs");
    let mut two = named(Some("GPU-bbbb, GPU-cccc"), None);
    two.gpus = Ok(vec![gpu("GPU-aaaa"), gpu("GPU-cccc"), gpu("GPU-bbbb")]);
    assert_eq!(sharing(&two).gpus, Ok(vec!["GPU-cccc".to_owned(), "GPU-bbbb".to_owned()]), "in the driver's order");
}

/// THUDM/slime#1305: failure 999 in an update, the allocator's segments cannot be shared.
/// Story F88.
#[test]
fn expandable_segments_and_small_shm_are_named() {
    let mut facts = alongside(ProcessView { allocator: Some("max_split_size_mb:64,expandable_segments:True".into()), ..view(1) });
    facts.shm_bytes = Some(64 << 20);
    let verdict = sharing(&facts);
    assert!(verdict.gpus.is_ok(), "a ring of the worker's own can be shared all the same");
    assert!(verdict.notes[0].contains("64 MiB") && verdict.notes[1].contains("expandable segments"), "{:?}", verdict.notes);
    let without = SharingFacts { shm_bytes: None, ..wrapped() };
    assert!(sharing(&without).notes[0].contains("no /dev/shm"));
    for (setting, expandable) in [
        ("expandable_segments:True", true),
        (" Expandable_Segments : true ", true),
        ("expandable_segments:False", false),
        ("backend:native", false),
        ("", false),
    ] {
        assert_eq!(expandable_segments(setting), expandable, "{setting}");
    }
}
