//! Versions that no engine can serve: what the server says of each, and that it takes the next right one. The agent compares tensors before it
//! touches an engine; here nothing is compared, as where the engine's checkpoint cannot be read and no version came before.

use super::adapter::{SOON, job};
use super::models::Models;
use super::real::{Server, adapter, venv};

const PROMPT: &str = "The trainer sends its weights to every rollout.";

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
