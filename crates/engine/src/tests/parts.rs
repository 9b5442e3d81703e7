//! The parts of this crate alone: labels, keys, the registry, comparisons, faults.

use proptest::prelude::*;

use super::support::held;
use crate::{ApiKey, EngineConfig, EngineError, Holding, connect, kinds};
use weightsync_core::protocol::HeldVersion;
use weightsync_testkit::simulator::{Fault, FaultRule, Faults, Simulator, SimulatorOptions};

proptest! {
    #[test]
    fn what_is_written_into_an_engine_is_read_back(version in any::<u64>(), digest in "[0-9a-f]{64}", half in any::<bool>()) {
        let version = HeldVersion { version, manifest: digest };
        let holding = if half { Holding::HalfAnUpdate(version) } else { Holding::Version(version) };
        prop_assert_eq!(Holding::parse(&holding.text()), holding);
    }

    #[test]
    fn any_text_of_another_program_is_foreign_and_kept(text in "\\PC{0,80}") {
        let holding = Holding::parse(&text);
        prop_assert_eq!(holding.text(), text);
    }
}

#[test]
fn texts_that_only_look_like_ours_are_foreign() {
    let digest = held(1).manifest;
    let upper = digest.to_uppercase();
    for text in
        ["7", "7+abc", &format!("+7+{digest}"), &format!("-7+{digest}"), &format!("7+{digest}0"), &format!("7+{upper}"), "installing:", ""]
    {
        assert_eq!(Holding::parse(text), Holding::Foreign(text.to_owned()), "{text}");
    }
}

#[test]
fn the_registry_names_what_there_is() {
    let config = |kind: &str, url: &str| EngineConfig {
        kind: kind.into(),
        url: url.into(),
        api_key: None,
        served_model: None,
        record: None,
        owner: "test".into(),
        processes: "/proc".into(),
        unproven_routes: false,
    };
    for kind in kinds() {
        assert_eq!(connect(config(kind, "http://127.0.0.1:8000")).unwrap().kind(), kind);
    }
    let error = connect(config("vlm", "http://127.0.0.1:8000")).err().unwrap().to_string();
    assert!(error.contains("vllm, sglang, lmdeploy, fastdeploy"), "{error}");
    for url in ["https://127.0.0.1:8000", "127.0.0.1:8000", "http://127.0.0.1:8000/v1", "http://", "http://h/?a=b"] {
        assert!(matches!(connect(config("vllm", url)), Err(EngineError::Unsupported { .. })), "{url}");
    }
}

#[test]
fn key_unfit_for_a_header_is_refused_unprinted() {
    for text in ["", "  \n", "two words", "línea", "a\tb"] {
        let error = ApiKey::new(text).unwrap_err().to_string();
        assert!(text.trim().is_empty() || !error.contains(text.trim()), "{error}");
    }
    assert!(ApiKey::from_env("WEIGHTSYNC_TEST_KEY_THAT_NOBODY_SETS").unwrap().is_none());
    let missing = ApiKey::from_file(std::path::Path::new("/nonexistent/key")).unwrap_err().to_string();
    assert!(missing.contains("/nonexistent/key"), "{missing}");
}

#[tokio::test]
async fn faults_are_set_as_json_and_nonsense_is_refused() {
    let folder = tempfile::TempDir::new().unwrap();
    super::support::write_checkpoint(folder.path(), &super::support::TENSORS, 1);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let simulator = Simulator::start(SimulatorOptions::new("vllm", folder.path().into()), listener).await.unwrap();
    let url = format!("{}/simulator/faults", simulator.url());
    let (status, answer) = super::support::post(&url, &serde_json::json!({"loadMz": 1})).await;
    assert_eq!(status, 400, "{answer}");
    let rule = |after, times| FaultRule { path: "/version".into(), after, times, fault: Fault::unavailable() };
    let faults = Faults { rules: vec![rule(1, Some(1))], load_ms: 5, ..Faults::default() };
    let (status, answer) = super::support::post(&url, &serde_json::to_value(&faults).unwrap()).await;
    assert_eq!((status, serde_json::from_value::<Faults>(answer).unwrap()), (200, faults));
    let mut statuses = Vec::new();
    for _ in 0..3 {
        let reply = super::support::client().get(format!("{}/version", simulator.url())).send().await.unwrap();
        statuses.push(reply.status().as_u16());
    }
    assert_eq!(statuses, [200, 503, 200], "one call passes, one is spoiled, the rest pass");
}

#[tokio::test]
async fn a_simulator_of_an_unknown_engine_or_without_a_model_says_so() {
    let listener = || async { tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap() };
    let folder = tempfile::TempDir::new().unwrap();
    let unknown = Simulator::start(SimulatorOptions::new("trt", folder.path().into()), listener().await).await.err().unwrap();
    assert!(unknown.to_string().contains("trt"), "{unknown}");
    let empty = Simulator::start(SimulatorOptions::new("vllm", folder.path().into()), listener().await).await.err().unwrap();
    assert!(empty.to_string().contains("model cannot be loaded"), "{empty}");
}

#[test]
fn signs_of_a_new_start_count_once_and_our_own_writes_are_none() {
    use crate::start::StartWatch;
    let watch = StartWatch::default();
    let version = Holding::Version(held(1));
    let first = watch.answered(watch.look(), "1.5", &Holding::Startup);
    assert_eq!(watch.answered(watch.look(), "1.5", &Holding::Startup), first);

    // Checks that overlap a write, at its start or its end.
    let before = watch.look();
    watch.writing();
    let during = watch.look();
    watch.wrote(Some(version.clone()));
    for look in [before, during] {
        assert_eq!(watch.answered(look, "1.5", &Holding::Startup), first);
    }
    assert_eq!(watch.answered(watch.look(), "1.5", &version), first);

    let second = watch.answered(watch.look(), "1.5", &Holding::Startup);
    assert_ne!(second, first, "what we wrote is gone");
    assert_eq!(watch.answered(watch.look(), "1.5", &Holding::Startup), second);
    assert_ne!(watch.answered(watch.look(), "2.5", &Holding::Startup), second, "another start time");
}

/// uvicorn sets `IPV6_V6ONLY` on `::`, so that such an engine answers at ::1 alone.
#[tokio::test]
async fn engine_of_either_family_is_found_at_localhost() {
    use super::support::{SOON, TENSORS, adapter, write_checkpoint};
    use crate::lifeline::Lifeline;
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &TENSORS, 1);
    for host in ["127.0.0.1", "::1"] {
        let listener = tokio::net::TcpListener::bind((host, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let simulator = Simulator::start(SimulatorOptions::new("vllm", folder.path().into()), listener).await.unwrap();
        let url = format!("http://{}:{port}", crate::LOCALHOST);
        let engine = adapter("vllm", &url, None, None);
        assert!(engine.holding(SOON).await.is_ok(), "{host}");
        assert!(Lifeline::open(&url, SOON).await.unwrap().stands(), "{host}");
        simulator.stop().await;
    }
}

#[tokio::test]
async fn equal_starts_differ_by_their_connection() {
    use crate::lifeline::Lifeline;
    use crate::start::StartWatch;
    let watch = StartWatch::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let url = format!("http://{address}");
    let line = || Lifeline::open(&url, super::support::SOON);
    let looked = || watch.answered(watch.look(), "unknown", &Holding::Startup);

    watch.hold(line().await);
    let first = looked();
    let begun = watch.look();
    watch.hold(line().await);
    assert_eq!(looked(), first, "another connection to the same process");
    assert!(watch.is_still(&first) && watch.stood_since(begun));

    // The server never accepted its connections; they end with it all the same.
    drop(listener);
    assert!(!watch.is_still(&first) && !watch.stood_since(begun));
    let old = watch.look();
    let _listener = tokio::net::TcpListener::bind(address).await.unwrap();
    watch.hold(line().await);
    assert!(!watch.is_still(&first), "somebody listens, and no one asked who");
    watch.answered(old, "unknown", &Holding::Startup);
    assert!(!watch.is_still(&watch.last()), "what was read before says nothing of it");
    let second = looked();
    assert_ne!(second, first);
    assert!(watch.is_still(&second) && !watch.stood_since(begun));
    watch.hold(None);
    assert!(!watch.is_still(&second), "no one takes a connection");
}
