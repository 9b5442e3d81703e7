//! `POST /v1/completions` of both simulated engines, as vLLM 0.32 answers it: one choice, no stream.
//!
//! Decides what a request may ask; what is generated is [`super::model`]'s business.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::{Map, Value, json};

use super::core::Kind;
use super::front::Front;
use super::model::Generated;
use super::vllm_reply::{dead, error};

/// As in vLLM and OpenAI.
const DEFAULT_TOKENS: usize = 16;
/// Tokens of a prompt whose products are large enough that what asks the kernel for AMX computes them.
const AMX_TOKENS: usize = 5;

struct Asked {
    prompt: String,
    prompt_tokens: usize,
    max_tokens: usize,
    logprobs: Option<u64>,
}

pub(super) async fn completions(State(front): State<Arc<Front>>, body: Bytes) -> Response {
    let asked = match read(&front, &body) {
        Ok(asked) => asked,
        Err(refusal) => return *refusal,
    };
    if std::mem::take(&mut front.core.state().faults.cold_amx) && asked.prompt_tokens < AMX_TOKENS {
        front.core.change(|state| state.dead = true);
    }
    match front.core.generate(&asked.prompt, asked.max_tokens).await {
        // vLLM writes no number that JSON does not have, and calls that a bad request (seen on 0.32); the others write null for it.
        Ok(generated) if front.core.kind() == Kind::Vllm && asked.logprobs.is_some() && generated.is_nan() => {
            error(StatusCode::BAD_REQUEST, "BadRequestError", None, "Out of range float values are not JSON compliant")
        }
        Ok(generated) => Json(answer(&front, &asked, &generated)).into_response(),
        Err(cause) => {
            // The API server ends itself soon after its engine core broke down.
            let crash = front.crash.clone();
            tokio::spawn(async move {
                tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                crash.cancel();
            });
            dead(cause)
        }
    }
}

fn read(front: &Front, body: &[u8]) -> Result<Asked, Box<Response>> {
    let bad = |param: &str, message: &str| Box::new(error(StatusCode::BAD_REQUEST, "BadRequestError", Some(param), message));
    let Ok(body) = serde_json::from_slice::<Map<String, Value>>(body) else {
        let message = "1 validation error:\n  JSON decode error";
        return Err(Box::new(error(StatusCode::BAD_REQUEST, "Bad Request", Some("body"), message)));
    };
    if let Some(model) = body.get("model").and_then(Value::as_str)
        && model != front.model
    {
        let message = format!("The model `{model}` does not exist. Valid aliases: {}.", front.model);
        return Err(Box::new(error(StatusCode::NOT_FOUND, "NotFoundError", Some("model"), &message)));
    }
    let number = |name: &str| body.get(name).and_then(Value::as_u64);
    let (prompt, prompt_tokens) = match body.get("prompt") {
        Some(Value::String(text)) if !text.is_empty() => (text.clone(), text.split_whitespace().count().max(1)),
        Some(Value::Array(tokens)) if !tokens.is_empty() && tokens.iter().all(Value::is_u64) => {
            (Value::Array(tokens.clone()).to_string(), tokens.len())
        }
        Some(Value::Array(_)) => return Err(bad("prompt", "the simulator takes one prompt: a text, or a list of token numbers")),
        _ => return Err(bad("prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)")),
    };
    if body.get("stream").and_then(Value::as_bool) == Some(true) || number("n").is_some_and(|n| n != 1) {
        return Err(bad("stream", "the simulator answers one choice, in one piece"));
    }
    let max_tokens = number("max_tokens").and_then(|number| usize::try_from(number).ok()).unwrap_or(DEFAULT_TOKENS);
    if max_tokens > front.max_model_len {
        let message = format!("max_tokens={max_tokens} cannot be greater than max_model_len={}.", front.max_model_len);
        return Err(bad("max_tokens", &message));
    }
    Ok(Asked { prompt, prompt_tokens, max_tokens, logprobs: number("logprobs") })
}

fn answer(front: &Front, asked: &Asked, generated: &Generated) -> Value {
    let tokens = &generated.tokens;
    let text: String = tokens.iter().map(|token| token.text).collect();
    let offsets: Vec<usize> = tokens
        .iter()
        .scan(0, |end, token| {
            let offset = *end;
            *end += token.text.len();
            Some(offset)
        })
        .collect();
    let logprobs = asked.logprobs.map(|_| {
        json!({
            "text_offset": offsets,
            "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
            "tokens": tokens.iter().map(|token| token.text).collect::<Vec<_>>(),
            "top_logprobs": tokens.iter().map(|token| json!({token.text: token.logprob})).collect::<Vec<_>>(),
        })
    });
    let choice = json!({
        "index": 0, "text": text, "logprobs": logprobs, "finish_reason": if generated.aborted { "abort" } else { "length" },
        "stop_reason": null, "token_ids": null, "prompt_logprobs": null, "prompt_token_ids": null, "routed_experts": null,
    });
    json!({
        "id": "cmpl-0", "object": "text_completion", "created": 0, "model": front.model, "choices": [choice], "service_tier": null,
        "system_fingerprint": null,
        "usage": {
            "prompt_tokens": asked.prompt_tokens, "total_tokens": asked.prompt_tokens + tokens.len(), "completion_tokens": tokens.len(),
            "prompt_tokens_details": null, "completion_tokens_details": null,
        },
        "kv_transfer_params": null, "ec_transfer_params": null, "metrics": null,
    })
}
