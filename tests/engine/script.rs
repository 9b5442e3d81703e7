//! One script of calls, errors included, with equal statuses and body shapes on the simulator and on the real vLLM 0.32.

use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Client, KEPT, KEY, Reply};
use super::models::Models;
use super::real::Server;
use super::shape::differences;
use super::shared::{PLAIN, WITH_BACKEND};

/// A call is given up after this long where no answer is expected: a request while the engine is paused.
const NO_ANSWER: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(120);

/// One call and the status that both servers give; none: no answer.
struct Step {
    call: String,
    body: Option<Vec<u8>>,
    key: Option<&'static str>,
    status: Option<u16>,
}

fn step(call: &str, status: u16) -> Step {
    Step { call: call.to_owned(), body: None, key: Some(KEY), status: Some(status) }
}

fn with(call: &str, body: &Value, status: u16) -> Step {
    Step { body: Some(body.to_string().into_bytes()), ..step(call, status) }
}

fn raw(call: &str, body: &str, status: u16) -> Step {
    Step { body: Some(body.as_bytes().to_vec()), ..step(call, status) }
}

fn reload(models: &Models, name: &str, status: u16) -> Step {
    with("POST /collective_rpc", &json!({"method": "reload_weights", "kwargs": {"weights_path": models.path(name)}}), status)
}

fn clear(status: u16) -> Step {
    with("POST /collective_rpc", &json!({"method": "reload_weights", "kwargs": {"weights_iterator": []}}), status)
}

fn ask(status: u16) -> Step {
    with("POST /v1/completions", &json!({"model": "m", "prompt": "The quick", "max_tokens": 2, "temperature": 0, "logprobs": 1}), status)
}

/// What the server is, and what it refuses.
fn questions() -> Vec<Step> {
    let version = "POST /update_weight_version";
    let rpc = "POST /collective_rpc";
    let completions = "POST /v1/completions";
    vec![
        step("GET /health", 200),
        step("GET /version", 200),
        step("GET /v1/models", 200),
        Step { key: None, ..step("GET /v1/models", 401) },
        Step { key: Some("wrong"), ..step("GET /v1/models", 401) },
        // The key guards nothing else.
        Step { key: None, ..step("GET /weight_info", 200) },
        step("GET /is_paused", 200),
        step("GET /is_sleeping", 200),
        step("GET /weight_info", 200),
        step("GET /get_world_size", 200),
        step("GET /get_world_size?include_dp=true", 200),
        step("GET /get_world_size?include_dp=maybe", 400),
        step("POST /sleep?level=3", 400),
        step("POST /sleep?level=1", 200),
        step("GET /is_sleeping", 200),
        step("POST /wake_up", 200),
        step("GET /is_sleeping", 200),
        step("GET /nonsense", 404),
        step("GET /pause", 405),
        step("POST /pause?mode=bogus", 400),
        step("POST /pause?mode=keep&clear_cache=perhaps", 400),
        step(rpc, 400),
        with(rpc, &json!({}), 400),
        with(rpc, &json!([]), 400),
        raw(rpc, "{nope", 400),
        with(rpc, &json!({"method": "no_such_method"}), 500),
        with(rpc, &json!({"method": "reload_weights", "kwargs": {"nonsense": "x"}}), 500),
        with(version, &json!({}), 400),
        with(version, &json!({"new_version": 7}), 400),
        with(version, &json!({"new_version": "7+abc"}), 200),
        step("GET /weight_info", 200),
        step("POST /reset_prefix_cache", 200),
        step("POST /reset_prefix_cache?reset_running_requests=true&reset_external=true", 200),
        step("POST /reset_prefix_cache?reset_running_requests=perhaps", 400),
        step("POST /resume", 200),
        ask(200),
        with(completions, &json!({"model": "another", "prompt": "x"}), 404),
        with(completions, &json!({"model": "m"}), 400),
        raw(completions, "{", 400),
        with(completions, &json!({"model": "m", "prompt": "x", "max_tokens": 1000}), 400),
        with(completions, &json!({"model": "m", "prompt": vec![0; 16], "max_tokens": 1, "temperature": 0, "logprobs": 0}), 200),
    ]
}

/// Pauses of an idle server: each kind queues new requests, and none refuses them.
fn idle_pauses() -> Vec<Step> {
    let mut steps = Vec::new();
    for mode in ["keep&clear_cache=false", "abort", "wait"] {
        steps.push(step(&format!("POST /pause?mode={mode}"), 200));
        steps.push(step(&format!("POST /pause?mode={mode}"), 200));
        steps.push(step("GET /is_paused", 200));
        steps.push(step("GET /health", 200));
        steps.push(Step { status: None, ..ask(200) });
        steps.push(step("POST /resume", 200));
        steps.push(step("POST /resume", 200));
        steps.push(step("GET /is_paused", 200));
        steps.push(ask(200));
    }
    steps
}

/// Reloads, those that fail included. The last ones leave a broken server.
fn reloads(models: &Models) -> Vec<Step> {
    vec![
        reload(models, "2", 200),
        ask(200),
        // A tensor that is missing is no error to vLLM.
        reload(models, "missing", 200),
        reload(models, "2", 200),
        reload(models, "nonexistent", 500),
        clear(200),
        ask(200),
        reload(models, "half", 500),
        clear(200),
        reload(models, "3", 200),
        ask(200),
        step("GET /weight_info", 200),
        // What does not fit is kept and tried again with every load.
        reload(models, "misfit", 500),
        clear(500),
        reload(models, "2", 500),
        step("GET /health", 200),
    ]
}

async fn play(client: &Client, steps: &[Step]) -> Vec<Reply> {
    let mut replies = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let (method, path) = step.call.split_once(' ').unwrap();
        let within = if step.status.is_none() { NO_ANSWER } else { PATIENCE };
        let reply = client.call(method, path, step.body.clone(), step.key, within).await;
        let body = String::from_utf8_lossy(step.body.as_deref().unwrap_or_default());
        assert_eq!(reply.status, step.status, "step {index}: {} {body} -> {}", step.call, reply.text);
        replies.push(reply);
    }
    replies
}

/// A running request under each pause: what becomes of it, and when its cache can be emptied.
async fn busy_pauses(client: &Client) -> Vec<Value> {
    let mut seen = Vec::new();
    for (mode, finish) in [("keep&clear_cache=false", "length"), ("abort", "abort"), ("wait", "length")] {
        let body = json!({"model": "m", "prompt": format!("A long request under {mode}"), "max_tokens": KEPT, "ignore_eos": true});
        let (answer, resets) = tokio::join!(client.post("/v1/completions", &body), async {
            client.busy().await;
            let paused = client.call("POST", &format!("/pause?mode={mode}"), None, Some(KEY), PATIENCE).await;
            assert_eq!(paused.json(), json!({"status": "paused"}), "{mode}");
            let held = client.call("POST", "/reset_prefix_cache", None, Some(KEY), PATIENCE).await.json();
            let preempted = client.call("POST", "/reset_prefix_cache?reset_running_requests=true", None, Some(KEY), PATIENCE).await.json();
            client.call("POST", "/resume", None, Some(KEY), PATIENCE).await;
            json!([held, preempted])
        });
        assert_eq!(answer.status, Some(200), "{}", answer.text);
        assert_eq!(answer.json()["choices"][0]["finish_reason"], finish, "{mode}");
        assert_eq!(resets, json!([{"success": mode != "keep&clear_cache=false"}, {"success": true}]), "{mode}");
        seen.push(resets);
    }
    seen
}

async fn whole_script(server: &mut Server, models: &Models) -> (Vec<Step>, Vec<Reply>) {
    let client = server.ready().await;
    let metrics = client.get("/metrics").await;
    assert!(metrics.text.lines().any(|line| line.starts_with("process_start_time_seconds ")), "{}", metrics.text);
    let (mut steps, mut replies) = (Vec::new(), Vec::new());
    for part in [questions(), idle_pauses()] {
        replies.extend(play(&client, &part).await);
        steps.extend(part);
    }
    busy_pauses(&client).await;
    let part = reloads(models);
    replies.extend(play(&client, &part).await);
    steps.extend(part);
    (steps, replies)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs vLLM: make engine-test"]
async fn one_script_gives_equal_answers_on_simulator_and_server() {
    let models = Models::made();
    let mut simulator = Server::simulator(&models.path("1"), r#"{"tokenMs":10}"#);
    let mut vllm = PLAIN.real(models).await.expect("the real server is compared with the simulator");
    let ((steps, simulated), (_, real)) = tokio::join!(whole_script(&mut simulator, models), whole_script(&mut vllm, models));
    vllm.end();
    let mut wrong = Vec::new();
    for ((step, simulated), real) in steps.iter().zip(&simulated).zip(&real) {
        let differences = differences(&simulated.json(), &real.json());
        wrong.extend(differences.into_iter().map(|difference| format!("{}: {difference}", step.call)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs vLLM: make engine-test"]
async fn a_server_that_generates_after_a_failed_load_breaks_down() {
    let models = Models::made();
    breaks_down(&mut Server::simulator(&models.path("1"), "{}"), models).await;
    // The calls are vLLM's own, whatever back end it has.
    if let Some(mut vllm) = WITH_BACKEND.real(models).await {
        breaks_down(&mut vllm, models).await;
        vllm.end();
    }
}

async fn breaks_down(server: &mut Server, models: &Models) {
    let client = server.ready().await;
    play(&client, &[reload(models, "unknown", 500), ask(500)]).await;
    let gone = async {
        // 503 at first, then no one listens.
        while client.get("/health").await.status == Some(200) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the server still calls itself healthy");
}
