//! Versions that no engine can serve: what the server says of each, and that it takes the next right one. The agent compares tensors before it
//! touches an engine; here nothing is compared, as where the engine's checkpoint cannot be read and no version came before.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use weightsync_core::protocol::{HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_engine::InstallJob;

use super::models::Models;
use super::real::{Server, adapter, venv};

const SOON: Duration = Duration::from_secs(60);
const PROMPT: &str = "The trainer sends its weights to every rollout.";

fn job(models: &Models, name: &str, version: u64) -> InstallJob {
    InstallJob {
        version: HeldVersion { version, manifest: blake3::hash(name.as_bytes()).to_hex().to_string() },
        directory: models.path(name),
        local_directory: models.path(name),
        pause: PausePolicy::Keep,
        kv_cache: KvCachePolicy::Reset,
        canary: None,
        timeout: 2 * SOON,
        cancel: CancellationToken::new(),
    }
}

async fn play(mut server: Server, models: &Models) {
    let client = server.ready().await;
    let engine = adapter(&server, None);
    engine.install(&job(models, "2", 1)).await.unwrap();
    let right = client.complete(PROMPT, 8).await;
    let mut version = 2;
    for (name, refused) in [("unknown", true), ("nan", false), ("missing", false)] {
        let outcome = engine.install(&job(models, name, version)).await;
        println!("{name}: {outcome:?}");
        match &outcome {
            Err(error) => assert!(error.repeats(), "{name}: {error}"),
            Ok(_) => assert!(!refused, "{name} was taken"),
        }
        engine.install(&job(models, "2", version + 1)).await.unwrap_or_else(|error| panic!("behind {name}: {error}"));
        assert_eq!(client.complete(PROMPT, 8).await, right, "behind {name}");
        version += 2;
    }

    // A tensor of another shape stays in vLLM's loader: it refuses every load after that, and only another start helps.
    let error = engine.install(&job(models, "misfit", version)).await.unwrap_err();
    assert!(error.repeats() && error.is_dirty(), "{error}");
    let again = engine.install(&job(models, "2", version + 1)).await.unwrap_err();
    assert!(again.is_dirty(), "{again}");
    engine.put_back(2 * SOON).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn right_version_is_taken_after_each_wrong_one() {
    let models = Models::make(venv().as_deref());
    play(Server::simulator(&models.path("1"), "{}"), &models).await;
    if let Some(venv) = venv() {
        play(Server::vllm(&venv, &models.path("1")), &models).await;
    }
}
