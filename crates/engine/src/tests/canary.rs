//! Canaries: each engine's response with good weights and with a tensor of NaN, and the state of an engine whose response is refused.

use serde_json::json;

use super::support::{Bench, SOON, adapter, held};
use crate::{EngineError, Holding, InstallJob, Settling};
use weightsync_core::protocol::{CanaryPolicy, PausePolicy};
use weightsync_testkit::simulator::{Fault, FaultRule, Faults};

const KINDS: [&str; 2] = ["vllm", "sglang"];

/// The range of every simulated model: its log-probs are between -4 and 0.
fn canary() -> CanaryPolicy {
    CanaryPolicy { prompt: "the same prompt".into(), max_tokens: 4, least_log_prob_milli: -4000, greatest_log_prob_milli: 0 }
}

fn asking(bench: &Bench, version: u64, canary: CanaryPolicy) -> InstallJob {
    let mut job = bench.job(version);
    job.terms.canary = Some(canary);
    job
}

fn job(bench: &Bench, version: u64) -> InstallJob {
    asking(bench, version, canary())
}

/// Fills one tensor of a version's checkpoint with NaN.
fn poison(bench: &Bench, version: u64) {
    let file = bench.directory(version).join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let tensors: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let floats = tensors.values().find(|tensor| tensor["dtype"] == "F32" || tensor["dtype"] == "BF16").expect("a tensor of floats");
    let at = |end: usize| 8 + header + usize::try_from(floats["data_offsets"][end].as_u64().unwrap()).unwrap();
    // All bits set is a NaN in every type of float.
    let (first, end) = (at(0), at(1));
    bytes[first..end].fill(0xff);
    std::fs::write(file, bytes).unwrap();
}

/// Gives this response to every request for tokens.
fn answering(kind: &str, status: u16, body: serde_json::Value) -> Faults {
    let path = if kind == "sglang" { "/generate" } else { "/v1/completions" };
    let rule = FaultRule { path: path.into(), after: 0, times: None, fault: Fault::Answer { status, body } };
    Faults { rules: vec![rule], ..Faults::default() }
}

#[tokio::test]
async fn a_good_version_passes_and_the_engine_is_asked_once() {
    for kind in KINDS {
        let bench = Bench::start(kind).await;
        assert!(bench.engine.answers(&canary(), SOON).await.unwrap(), "{kind}");
        let before = bench.calls().await.len();
        let report = bench.engine.install(&job(&bench, 2)).await.unwrap();
        let steps: Vec<_> = report.steps_ms.iter().map(|(step, _)| step.as_str()).collect();
        assert_eq!(steps, ["pause", "load", "check", "resume", "canary"], "{kind}");
        let calls = bench.calls().await.split_off(before);
        let asked = if kind == "sglang" { "POST /generate" } else { "POST /v1/completions" };
        assert_eq!(calls.iter().filter(|call| *call == asked).count(), 1, "{kind}: {calls:?}");
        assert!(!bench.is_paused().await, "{kind}");
    }
}

#[tokio::test]
async fn version_with_nan_is_refused_and_previous_serves_again() {
    for kind in KINDS {
        let bench = Bench::start(kind).await;
        bench.engine.install(&job(&bench, 2)).await.unwrap();
        poison(&bench, 3);
        let error = bench.engine.install(&job(&bench, 3)).await.unwrap_err();
        assert_eq!((error.step, error.is_dirty()), ("canary", true), "{kind}: {error}");
        let EngineError::CanaryRefused { measured } = &error.source else { panic!("{kind}: {error}") };
        let says = if kind == "vllm" { "not JSON compliant" } else { "token 1 of 4 is no number" };
        assert!(measured.contains(says), "{kind}: {measured}");
        assert!(bench.is_paused().await, "{kind}: nothing more is computed with it");
        // A later agent of this engine finds that it must not serve.
        let successor = adapter(kind, &bench.simulator.url(), None, None);
        assert_eq!(successor.holding(SOON).await.unwrap(), Holding::HalfAnUpdate(held(3)), "{kind}");
        assert_eq!(successor.settle(&Settling::LEFT_PAUSED, SOON).await.unwrap().holding, Holding::HalfAnUpdate(held(3)), "{kind}");
        assert!(!bench.engine.answers(&canary(), SOON).await.unwrap(), "{kind}: it is held, so nothing is known");
        bench.engine.install(&job(&bench, 2)).await.unwrap();
        assert!(!bench.is_paused().await, "{kind}");
        assert_eq!(bench.digest().await, bench.fresh_digest(2).await, "{kind}");
    }
}

/// Without a canary.
#[tokio::test]
async fn engine_that_computes_nan_is_held_after_one_token() {
    for (kind, says) in [("vllm", "a number that JSON does not have"), ("sglang", "no token with a finite log-prob")] {
        let bench = Bench::start(kind).await;
        bench.engine.install(&bench.job(2)).await.unwrap();
        poison(&bench, 3);
        let error = bench.engine.install(&bench.job(3)).await.unwrap_err();
        assert_eq!((error.step, error.is_dirty()), ("probe", true), "{kind}: {error}");
        assert!(error.to_string().contains(says), "{kind}: {error}");
        assert!(bench.is_paused().await, "{kind}");
    }
}

#[tokio::test]
async fn answer_out_of_range_is_refused_with_the_measurement() {
    for kind in KINDS {
        let bench = Bench::start(kind).await;
        let narrow = CanaryPolicy { least_log_prob_milli: -1, max_tokens: 16, ..canary() };
        let error = bench.engine.install(&asking(&bench, 2, narrow)).await.unwrap_err();
        let EngineError::CanaryRefused { measured } = &error.source else { panic!("{kind}: {error}") };
        assert!(measured.contains("of 16 is -") && measured.contains("expected is -0.001 to 0"), "{kind}: {measured}");
    }
}

#[tokio::test]
async fn engine_without_log_probs_is_never_counted_as_good() {
    let without = [
        ("vllm", 200, json!({"choices": [{"text": "a", "logprobs": null, "finish_reason": "length"}]}), "gives no log-probs"),
        ("vllm", 400, json!({"error": {"message": "max_logprobs"}}), "max_logprobs"),
        ("sglang", 200, json!({"text": "a", "meta_info": {"finish_reason": {"type": "length"}}}), "gives no log-probs"),
        ("sglang", 400, json!({"error": {"message": "embedding model"}}), "embedding model"),
    ];
    for (kind, status, body, says) in without {
        let bench = Bench::start(kind).await;
        bench.set_faults(answering(kind, status, body)).await;
        let lacks = bench.engine.answers(&canary(), SOON).await.unwrap_err();
        assert!(matches!(lacks, EngineError::Unsupported { .. }) && lacks.to_string().contains(says), "{kind}: {lacks}");
        let error = bench.engine.install(&job(&bench, 2)).await.unwrap_err();
        assert!(error.is_dirty() && matches!(error.source, EngineError::Unsupported { .. }), "{kind}: it refuses nothing: {error}");
        assert!(bench.is_paused().await, "{kind}");
    }
}

#[tokio::test]
async fn answer_cut_off_proves_nothing_and_engine_is_held() {
    let cut_off = [
        ("vllm", json!({"choices": [{"text": "", "logprobs": {"token_logprobs": []}, "finish_reason": "abort"}]})),
        ("sglang", json!({"text": "", "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}})),
    ];
    for (kind, body) in cut_off {
        let bench = Bench::start(kind).await;
        bench.set_faults(answering(kind, 200, body)).await;
        let error = bench.engine.install(&job(&bench, 2)).await.unwrap_err();
        assert!(error.is_dirty() && !matches!(error.source, EngineError::CanaryRefused { .. }), "{kind}: {error}");
        assert!(bench.is_paused().await, "{kind}");
    }
}

#[tokio::test]
async fn an_engine_that_its_trainer_pauses_is_not_asked() {
    let bench = Bench::start("vllm").await;
    let mut external = job(&bench, 2);
    external.terms.pause = PausePolicy::External;
    let report = bench.engine.install(&external).await.unwrap();
    assert!(report.steps_ms.iter().all(|(step, _)| step != "canary" && step != "resume"), "{:?}", report.steps_ms);
}
