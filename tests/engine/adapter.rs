//! The vLLM adapter against the real server: what it installed answers as a fresh server on the same checkpoint does, log-probs included.

use std::time::Duration;

use serde_json::json;
use tokio_util::sync::CancellationToken;
use weightsync_core::protocol::{CanaryPolicy, HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_engine::{EngineError, Holding, InstallJob, InstallTerms, Settling};

use super::client::KEPT;
use super::models::Models;
use super::real::{Server, adapter, release};
use super::shared::{Borrowed, PLAIN, fresh_answer, prompt};

/// Long enough for any call that works, on a busy machine too.
pub const SOON: Duration = Duration::from_secs(60);

pub fn job(models: &Models, name: &str, version: u64) -> InstallJob {
    InstallJob {
        terms: InstallTerms {
            version: HeldVersion { version, manifest: blake3::hash(name.as_bytes()).to_hex().to_string() },
            pause: PausePolicy::Keep,
            kv_cache: KvCachePolicy::Reset,
            canary: None,
            timeout: 2 * SOON,
            cancel: CancellationToken::new(),
        },
        directory: models.path(name),
        local_directory: models.path(name),
    }
}

/// The same with that policy for requests that run.
pub fn paused(pause: PausePolicy, mut job: InstallJob) -> InstallJob {
    job.terms.pause = pause;
    job
}

async fn server(models: &Models) -> Borrowed {
    PLAIN.or_simulator(models, || Server::simulator(&models.path("1"), r#"{"tokenMs":10}"#)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs vLLM: make engine-test"]
async fn installed_version_answers_as_a_fresh_server() {
    let models = Models::made();
    let expected = fresh_answer(models).await.clone();
    let mut server = server(models).await;
    let client = server.ready().await;
    let engine = adapter(&server, Some(models.path("1")));
    let facts = engine.probe(SOON).await.unwrap();
    assert_eq!((facts.server_version, facts.size), (release(), 1));
    assert_eq!(engine.holding(SOON).await.unwrap(), Holding::Startup);

    // What it leaves in the prefix cache must not be found after an install.
    let first = client.complete_with_cache(&prompt(), 16).await;
    assert_ne!(first, expected);
    for pause in [PausePolicy::Keep, PausePolicy::Drain, PausePolicy::Abort, PausePolicy::External] {
        let report = engine.install(&paused(pause, job(models, "2", 2))).await.unwrap();
        assert_eq!(report.start, engine.health(SOON).await.unwrap().start);
        assert_eq!(client.complete_with_cache(&prompt(), 16).await, expected, "{pause:?}");
        assert_eq!(engine.holding(SOON).await.unwrap(), Holding::Version(job(models, "2", 2).terms.version));
        engine.install(&paused(pause, job(models, "1", 3))).await.unwrap();
        assert_eq!(client.complete_with_cache(&prompt(), 16).await, first, "{pause:?}");
    }

    // A request that is kept through the switch ends; it began with the old weights.
    let (kept, installed) = tokio::join!(client.complete("A request that is kept", KEPT), async {
        client.busy().await;
        engine.install(&job(models, "2", 4)).await
    });
    installed.unwrap();
    assert_eq!(kept.1.len(), KEPT);
    assert_eq!(client.complete_with_cache(&prompt(), 16).await, expected);

    // Somebody else puts it to sleep (on CPU vLLM keeps its weights, and says that it sleeps): nothing is loaded, and it holds nothing any more.
    let held = engine.health(SOON).await.unwrap().start;
    assert_eq!(client.post("/sleep?level=2", &json!({})).await.status, Some(200));
    assert!(engine.health(SOON).await.unwrap().start != held && engine.asleep().is_some());
    assert!(matches!(engine.install(&job(models, "1", 5)).await.unwrap_err().source, EngineError::Asleep { .. }));
    assert_eq!(client.post("/wake_up", &json!({})).await.status, Some(200));
    let awake = engine.health(SOON).await.unwrap().start;
    assert!(awake != held && engine.asleep().is_none());
    // One that is over before anybody looks counts as well.
    for path in ["/sleep?level=1", "/wake_up"] {
        assert_eq!(client.post(path, &json!({})).await.status, Some(200));
    }
    assert_ne!(engine.health(SOON).await.unwrap().start, awake);
    engine.install(&job(models, "2", 5)).await.unwrap();
    assert_eq!(client.complete(&prompt(), 16).await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs vLLM: make engine-test"]
async fn canary_passes_a_version_or_holds_the_engine_with_figures() {
    let models = Models::made();
    let mut server = server(models).await;
    let client = server.ready().await;
    let engine = adapter(&server, Some(models.path("1")));
    // One token, and whatever log-prob a model can give.
    let canary = CanaryPolicy { prompt: "a".into(), max_tokens: 3, least_log_prob_milli: -20_000, greatest_log_prob_milli: 0 };
    let with = |canary: &CanaryPolicy, name, version| {
        let mut job = job(models, name, version);
        job.terms.canary = Some(canary.clone());
        job
    };
    assert!(engine.answers(&canary, SOON).await.unwrap());
    let report = engine.install(&with(&canary, "2", 2)).await.unwrap();
    assert_eq!(report.steps_ms.last().map(|(step, _)| step.as_str()), Some("canary"));
    let second = client.complete(&prompt(), 16).await;

    // Random weights are never that sure of a token.
    let sure = CanaryPolicy { least_log_prob_milli: -1, ..canary.clone() };
    let refused = engine.install(&with(&sure, "1", 3)).await.unwrap_err();
    assert!(refused.is_dirty() && refused.step == "canary", "{refused}");
    assert!(matches!(refused.source, EngineError::CanaryRefused { .. }), "{refused}");
    assert!(refused.to_string().contains("of 3 is -") && refused.to_string().contains("expected is -0.001 to 0"), "{refused}");
    assert_eq!(
        engine.settle(&Settling::LEFT_PAUSED, SOON).await.unwrap().holding,
        Holding::HalfAnUpdate(job(models, "1", 3).terms.version)
    );

    // A tensor of NaN: the server answers with an error of its own, and the version before makes it serve again.
    let poisoned = engine.install(&with(&canary, "nan", 4)).await.unwrap_err();
    assert!(poisoned.is_dirty() && matches!(poisoned.source, EngineError::CanaryRefused { .. }), "{poisoned}");
    engine.install(&with(&canary, "2", 5)).await.unwrap();
    assert_eq!(client.complete(&prompt(), 16).await, second);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs vLLM: make engine-test"]
async fn half_an_update_stays_paused_until_it_is_fed_or_put_back() {
    let models = Models::made();
    let mut server = server(models).await;
    let client = server.ready().await;
    let engine = adapter(&server, None);
    let first = client.complete(&prompt(), 16).await;
    engine.install(&job(models, "2", 2)).await.unwrap();
    let second = client.complete_with_cache(&prompt(), 16).await;

    // The agent's gate would never hand this directory over; the adapter is to survive it all the same: it can be read
    // from here (a whole copy), and the engine is sent to the one that is cut short.
    let cut_short = InstallJob { directory: models.path("half"), ..job(models, "3", 3) };
    let half = |held: HeldVersion| Holding::HalfAnUpdate(held);
    let failed = engine.install(&cut_short).await.unwrap_err();
    assert!(failed.is_dirty() && failed.step == "load", "{failed}");
    assert_eq!(engine.holding(SOON).await.unwrap(), half(cut_short.terms.version.clone()));
    assert_eq!(
        adapter(&server, None).settle(&Settling::LEFT_PAUSED, SOON).await.unwrap().holding,
        Holding::HalfAnUpdate(cut_short.terms.version.clone())
    );

    // Another life of the agent feeds it in full.
    adapter(&server, None).install(&job(models, "2", 4)).await.unwrap();
    assert_eq!(client.complete_with_cache(&prompt(), 16).await, second);

    // The next one cannot be fed, and goes back to what the server started with.
    assert!(engine.install(&cut_short).await.unwrap_err().is_dirty());
    engine.put_back(2 * SOON).await.unwrap();
    assert_eq!(engine.holding(SOON).await.unwrap(), Holding::Startup);
    assert_eq!(client.complete_with_cache(&prompt(), 16).await, first);

    // A server that was started with a whole checkpoint refuses a version that lacks a tensor, which vLLM itself does not.
    let strict = adapter(&server, Some(models.path("1")));
    let refused = strict.install(&job(models, "missing", 5)).await.unwrap_err();
    assert!(!refused.is_dirty() && refused.to_string().contains("model.layers.1.self_attn.v_proj.weight"), "{refused}");
    assert_eq!(client.complete(&prompt(), 16).await, first);
}
