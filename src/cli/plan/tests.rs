//! What `weightsync plan` reads and says.

use std::path::{Path, PathBuf};

use clap::Parser;
use serde_json::{Value, json};

use super::file::Manifests;
use super::units::{parse_bytes, parse_rate, show_micros};
use super::{PlanArgs, Report, table};
use weightsync_core::plan::show_bytes;
use weightsync_core::plan::{LeftOutCode, PlanRefusal};
use weightsync_core::weights::{Dtype, Layout, TensorSpec};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: PlanArgs,
}

fn args(words: &[&str]) -> PlanArgs {
    Line::try_parse_from([&["plan"], words].concat()).unwrap().args
}

fn plan_text(text: &str, words: &[&str]) -> Vec<Report> {
    let mut manifests = Manifests::default();
    manifests.parse(text).unwrap();
    args(&[&["-f", "-"], words].concat()).reports(&manifests).unwrap()
}

fn example(name: &str, words: &[&str]) -> Report {
    let mut manifests = Manifests::default();
    manifests.read(&[Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/examples").join(name)]).unwrap();
    args(&[&["-f", "-"], words].concat()).reports(&manifests).unwrap().remove(0)
}

fn ranks(report: &Report) -> Vec<(&str, u32, u32)> {
    report.explanation.members.iter().map(|m| (m.member.name.0.as_str(), m.member.rank_offset, m.member.size)).collect()
}

#[test]
fn every_example_can_be_planned_in_full() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/examples");
    let files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 6);
    for path in files {
        let report = example(path.file_name().unwrap().to_str().unwrap(), &[]);
        assert!(report.is_fine(), "{}: {report:?}", path.display());
        if path.ends_with("ray.yaml") {
            continue;
        }
        assert!(report.plan.left_out.is_empty(), "{}: {report:?}", path.display());
        assert!(report.plan.rollouts().count() >= 1);
    }
}

#[test]
fn the_examples_have_the_ranks_that_they_promise() {
    let quickstart = example("quickstart", &[]);
    assert_eq!(ranks(&quickstart), [("trainer/trainer-0", 0, 1), ("actors/actor-0", 1, 1), ("actors/actor-1", 2, 1)]);
    let groups = example("lws-group.yaml", &[]);
    assert_eq!(ranks(&groups), [("trainer/trainer", 0, 1), ("large/large-0", 1, 16), ("large/large-1", 17, 16), ("large/large-2", 33, 16)]);
    let explicit = example("explicit-order.yaml", &[]);
    assert_eq!(ranks(&explicit)[0].0, "trainer/trainer-1");
    assert_eq!(explicit.plan.followers[0].name, "trainer-0");
    assert_eq!(ranks(&explicit)[1..], [("actors/actor-2", 1, 1), ("actors/actor-0", 2, 1), ("actors/actor-1", 3, 1)]);
    assert_eq!(ranks(&example("several-ports.yaml", &[])).len(), 9);
}

/// Engines that register are known to the agents of a cluster only.
#[test]
fn pods_of_a_ray_cluster_wait_for_engines_that_register() {
    let ray = example("ray.yaml", &[]);
    assert_eq!(ranks(&ray), [("trainer/rl-trainer-worker-0", 0, 1)]);
    let out: Vec<_> = ray.plan.left_out.iter().map(|left| (left.who.0.as_str(), left.code)).collect();
    assert_eq!(out, [("actors/rl-rollouts-worker-0", LeftOutCode::NotReported), ("actors/rl-rollouts-worker-1", LeftOutCode::NotReported)]);
    assert!(ray.plan.left_out[0].message.contains("not reported yet which engines"), "{}", ray.plan.left_out[0].message);
}

#[test]
fn measured_edges_give_the_floor_of_the_slowest() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/examples/quickstart");
    let text = ["weightsync.yaml", "pods.yaml"].map(|name| std::fs::read_to_string(folder.join(name)).unwrap()).join("\n---\n");
    let edge = |from: &str, to: &str, rate: u64| json!({"from": from, "to": to, "fromNode": "n", "toNode": "n", "verdict": "Good", "bytesPerSecond": rate});
    let preflight = |edges: Value| json!({"state": "Done", "transport": "tcp", "measured": 2, "milliseconds": 5, "edges": edges});
    let edges = json!([
        edge("trainer/trainer-0", "actors/actor-0", 2_000_000_000),
        edge("actors/actor-0", "actors/actor-1", 500_000_000),
        edge("trainer/trainer-0", "actors/actor-1", 1_000_000),
    ]);
    let mut documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    for document in documents.iter_mut().filter(|document| document["kind"] == "WeightSync") {
        document["status"] = json!({"preflight": preflight(edges.clone())});
    }
    let text: Vec<String> = documents.iter().map(Value::to_string).collect();
    let report = plan_text(&text.join("\n---\n"), &["--size", "1GB"]).remove(0);
    let floor = report.explanation.floors.last().unwrap();
    assert_eq!(floor.bandwidth.name, "500.0 MB/s, measured from actors/actor-0 to actors/actor-1 over tcp");
    assert_eq!(floor.chain_us, 2_000_000, "an edge that is no part of the chain does not count");
    assert_eq!(report.explanation.floors.len(), 4);
}

#[test]
fn pods_as_a_cluster_lists_them_are_planned_as_they_are() {
    let pod = |name: &str, role: &str, status: Value| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "rl", "uid": name, "labels": {"app": role, "weightsync.dev/role": role}},
               "spec": {"nodeName": format!("node-of-{name}"), "containers": [{"name": "c"}]}, "status": status})
    };
    let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
    let not_ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}]});
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync", "metadata": {"name": "a", "namespace": "rl"}, "spec": {
            "trainer": {"selector": {"matchLabels": {"app": "trainer"}}},
            "rollouts": [{"name": "p", "selector": {"matchLabels": {"app": "rollout"}}, "engine": {"kind": "VLLM"}}]}},
        pod("t", "trainer", ready.clone()),
        pod("a", "rollout", ready),
        pod("b", "rollout", not_ready),
        pod("c", "rollout", json!({"phase": "Failed"})),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "passed-over"}},
    ]});
    let report = plan_text(&list.to_string(), &[]).remove(0);
    assert_eq!(ranks(&report), [("trainer/t", 0, 1), ("p/a", 1, 1)]);
    let out: Vec<_> = report.plan.left_out.iter().map(|left| (left.who.0.as_str(), left.code)).collect();
    assert_eq!(out, [("p/b", LeftOutCode::NotReady), ("p/c", LeftOutCode::Terminal)]);
    let text = table::render(&report);
    for part in
        ["rl/a: 1 replicas, world size 2", "node-of-t", "p/b  PodNotReady  pod b: not ready (ContainersNotReady)", "p/c  MemberLeft"]
    {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
}

const SMALL: &str = "\
apiVersion: weightsync.dev/v1alpha1
kind: WeightSync
metadata: {name: NAME}
spec:
  trainer: {selector: {matchLabels: {app: t}}}
  rollouts: [{name: p, selector: {matchLabels: {app: r}}, engine: {kind: VLLM}}]
---
";

const PODS: &str = "
apiVersion: v1
kind: Pod
metadata: {name: t, labels: {app: t, weightsync.dev/role: trainer}}
spec: {containers: [{name: c}]}
---
apiVersion: v1
kind: Pod
metadata: {name: r, labels: {app: r, weightsync.dev/role: rollout}}
spec: {containers: [{name: c}]}
";

#[test]
fn later_of_two_objects_on_one_pod_is_refused_by_name() {
    let text = [SMALL.replace("NAME", "first"), SMALL.replace("NAME", "second"), PODS.to_owned()].concat();
    let reports = plan_text(&text, &[]);
    assert!(reports[0].is_fine(), "{:?}", reports[0]);
    assert!(!reports[1].is_fine());
    match &reports[1].plan.refusal {
        Some(PlanRefusal::PodClaimed { by, .. }) => assert_eq!(by.name, "first"),
        other => panic!("{other:?}"),
    }
    assert!(table::render(&reports[1]).contains("refused (PodClaimed): pod r belongs to the older WeightSync default/first"));
}

#[test]
fn typing_errors_and_broken_rules_are_named_first() {
    let text = [SMALL.replace("engine: {kind: VLLM}", "engine: {kind: VLLM, prots: [1]}, rangs: 2"), PODS.to_owned()].concat();
    let report = plan_text(&text, &[]).remove(0);
    assert_eq!(report.problems, ["spec.rollouts[0].engine.prots: no such field", "spec.rollouts[0].rangs: no such field"]);
    assert!(!report.is_fine() && report.plan.candidates.is_empty());
    let text = [SMALL.replace("kind: VLLM", "kind: VLLM, ports: [0]"), PODS.to_owned()].concat();
    let report = plan_text(&text, &[]).remove(0);
    assert_eq!(report.problems, ["spec.rollouts[p].engine.ports: 0 is not from 1 to 65535"]);
}

#[test]
fn a_file_that_makes_no_sense_is_an_error_with_its_place() {
    let wrong = |text: &str| format!("{:#}", Manifests::default().parse(text).unwrap_err());
    assert!(wrong("kind: [").contains("line"), "{}", wrong("kind: ["));
    assert!(wrong("kind: WeightSync\napiVersion: weightsync.dev/v9").contains("v9"));
    assert!(wrong("kind: StatefulSet\nmetadata: {name: big}\nspec: {replicas: 100000}").contains("StatefulSet big"));
    assert!(wrong("kind: Deployment\nmetadata: {name: d}\nspec: {replicas: -1}").contains("not a count"));
}

#[test]
fn a_checkpoint_gives_bytes_buckets_and_floor_times() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = vec![TensorSpec::new("w".to_owned(), Dtype::F32, vec![1000])];
    let layout = Layout::new("model", tensors, 0).unwrap();
    let header = json!({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend([0; 4000]);
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    let text = [SMALL, PODS].concat();
    let path = folder.path().to_str().unwrap();
    let report = plan_text(&text, &["--checkpoint", path, "--bandwidth", "1MB/s", "--bandwidth", "8Mbit"]).remove(0);
    let model = report.explanation.model.unwrap();
    assert_eq!((model.tensors, model.bytes), (Some(1), layout.total_bytes));
    assert_eq!(report.explanation.buckets, Some(1));
    let floors: Vec<u64> = report.explanation.floors.iter().map(|floor| floor.chain_us).collect();
    assert_eq!(floors, [layout.total_bytes, layout.total_bytes], "8 Mbit are 1 MB");
    let text = table::render(&report);
    assert!(text.contains("an update: 1 tensors, ") && text.contains("at 8Mbit"), "{text}");
    let missing = args(&["-f", "-", "--checkpoint", "/nowhere"]);
    let mut manifests = Manifests::default();
    manifests.parse(&[SMALL, PODS].concat()).unwrap();
    assert!(format!("{:#}", missing.reports(&manifests).unwrap_err()).contains("/nowhere"));
}

#[test]
fn the_table_shows_what_a_person_needs() {
    let text = table::render(&example("sglang.yaml", &["--size", "16GB"]));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "WeightSync default/ppo: 4 replicas, world size 9");
    for part in ["MEMBER", "sglang/sglang-3    7-8", "trainer pods that hand their parts to the source: learner-1", "at 100Gbit"] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
}

#[test]
fn json_is_one_object_with_the_plan_and_its_explanation() {
    let value = serde_json::to_value(super::Reports { plans: vec![example("quickstart", &["--size", "1GiB"])] }).unwrap();
    let plan = &value["plans"][0];
    assert_eq!(plan["weightsync"]["name"], "grpo");
    assert_eq!(plan["explanation"]["worldSize"], 3);
    assert_eq!(plan["explanation"]["members"][1]["rankOffset"], 1);
    assert_eq!(plan["explanation"]["model"]["bytes"], 1 << 30);
    assert_eq!(plan["plan"]["leftOut"], json!([]));
}

#[test]
fn sizes_and_speeds_are_read_exactly_or_refused() {
    for (text, bytes) in [("16GB", 16_000_000_000), ("1.5GiB", 3 << 29), ("0.001KB", 1), ("7B", 7), ("2 MiB", 2 << 20)] {
        assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
    }
    for text in ["", "GB", "12", "1,5GB", "-1GB", "1.2.3GB", "99999999999TB", "1e3GB", "5.GB", "١GB"] {
        assert!(parse_bytes(text).is_err(), "{text}");
    }
    for (text, bytes) in [("25Gbit", 3_125_000_000), ("25Gbit/s", 3_125_000_000), ("3GB/s", 3_000_000_000), ("1.5Gbit", 187_500_000)] {
        assert_eq!(parse_rate(text).unwrap().bytes_per_second, bytes, "{text}");
    }
    for text in ["0GB", "fast", "1Gbit/h"] {
        assert!(parse_rate(text).is_err(), "{text}");
    }
}

#[test]
fn numbers_for_people_are_rounded_up() {
    for (bytes, text) in
        [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1 << 20, "1 MiB"), ((1 << 20) + 1, "1.1 MiB"), (3 << 29, "1.5 GiB")]
    {
        assert_eq!(show_bytes(bytes), text);
    }
    for (micros, text) in [(999, "999 µs"), (1_001, "2 ms"), (9_999_999, "10000 ms"), (10_000_001, "10.1 s")] {
        assert_eq!(show_micros(micros), text);
    }
}

#[test]
fn memory_of_gpus_and_hosts_is_shown_or_refused() {
    let report = example("wrap-gpus.yaml", &["--size", "16GiB", "--gpu-free", "20GiB"]);
    assert!(report.is_fine(), "{report:?}");
    let text = table::render(&report);
    for part in [
        "EXTRA ON EACH GPU",
        "4 GiB",
        "on each GPU: 3 slots of 1 GiB, in addition to about 512 MiB for NCCL",
        "about 512 MiB for the worker (both by estimate)",
        "kept by the source to retry and to feed joiners: 32 GiB, pinned",
    ] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    let tight = example("wrap-gpus.yaml", &["--size", "16GiB", "--gpu-free", "600MiB"]);
    assert!(!tight.is_fine());
    let text = table::render(&tight);
    assert!(text.contains("invalid: the tightest GPU: 514 MiB are needed") && text.contains("88 MiB of 600 MiB are free"), "{text}");
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/examples/wrap-gpus.yaml")).unwrap();
    let asked = text.replace("agent: {launch: Wrap}", "agent: {launch: Wrap}\n  transport: {type: NCCL, bucketMiB: 256}");
    let shown = table::render(&plan_text(&asked, &["--size", "16GiB"])[0]);
    assert!(shown.contains("on each GPU: 3 slots of 256 MiB") && shown.contains("their length as the object says"), "{shown}");
    let refused = table::render(&plan_text(&asked, &["--size", "16GiB", "--gpu-free", "1500MiB"])[0]);
    assert!(refused.contains("1 GiB are needed"), "{refused}");
    let plain = table::render(&example("wrap-gpus.yaml", &["--size", "16GiB"]));
    assert!(plain.contains("EXTRA MEMORY") && !plain.contains("GPU:"), "{plain}");
}
