//! The canary's question, and the judgement of an engine's answer: a fixed prompt, and a log-prob for each token that follows it.
//!
//! Pure. Every log-prob must be a number within the range that the object expects. A missing, NaN or infinite one is refused, because
//! weights with a NaN give that. It never accepts an answer without log-probs: an engine that gives none cannot have a canary, and reports
//! that by [`EngineError::Unsupported`].

use serde_json::{Value, json};

use super::EngineError;
use super::http::{Answer, Reply};
use weightsync_core::protocol::CanaryPolicy;

/// Log-probs of the tokens of one answer, in their order; `None` where the engine wrote no number (JSON has no NaN).
pub(super) type LogProbs = Vec<Option<f64>>;

/// The body of `/v1/completions`: greedy decoding; `alternatives` is the number of additional log-probs for each token.
pub(super) fn question(model: &str, canary: &CanaryPolicy, alternatives: u32) -> Value {
    json!({"model": model, "prompt": canary.prompt, "max_tokens": canary.max_tokens, "temperature": 0, "logprobs": alternatives})
}

/// The log-probs in a response of `/v1/completions`. A server that refuses the question, or responds without log-probs, lacks `needs`.
pub(super) fn of_completions(reply: Reply, kind: &str, needs: &str) -> Result<LogProbs, EngineError> {
    let answer = answer(reply, kind, needs)?;
    let choice = answer.value().pointer("/choices/0");
    let log_probs = choice.and_then(|choice| choice.pointer("/logprobs/token_logprobs")).and_then(Value::as_array);
    let log_probs = log_probs.map(|numbers| numbers.iter().map(Value::as_f64).collect());
    let aborted = choice.and_then(|choice| choice.get("finish_reason")).and_then(Value::as_str) == Some("abort");
    answered(answer, log_probs, aborted, kind, needs)
}

/// A response that may contain an answer. A refusal of the question says nothing about the weights.
pub(super) fn answer(reply: Reply, kind: &str, needs: &str) -> Result<Answer, EngineError> {
    match reply.status() {
        400..=499 | 501 => {
            let what = format!("{kind} cannot be asked for log-probs: {}", reply.into_status());
            Err(EngineError::Unsupported { what, next_step: needs.to_owned() })
        }
        _ => reply.json(),
    }
}

/// The judgement of an answer; an answer that another client aborted has no result.
pub(super) fn answered(
    answer: Answer,
    log_probs: Option<LogProbs>,
    aborted: bool,
    kind: &str,
    needs: &str,
) -> Result<LogProbs, EngineError> {
    match log_probs {
        _ if aborted => Err(answer.not_success()),
        Some(log_probs) => Ok(log_probs),
        None => {
            let what = format!("{kind} gives no log-probs with its answers");
            Err(EngineError::Unsupported { what, next_step: needs.to_owned() })
        }
    }
}

/// Whether these log-probs are within the object's range; otherwise the measurement, as text.
pub(super) fn judge(canary: &CanaryPolicy, log_probs: &[Option<f64>]) -> Result<(), String> {
    let (least, greatest) = (f64::from(canary.least_log_prob_milli) / 1000.0, f64::from(canary.greatest_log_prob_milli) / 1000.0);
    let expected = format!("expected is {least} to {greatest}");
    if log_probs.is_empty() {
        return Err(format!("it answered without a token; {expected}"));
    }
    let tokens = log_probs.len();
    for (position, log_prob) in log_probs.iter().enumerate() {
        let which = format!("the log-prob of token {} of {tokens}", position + 1);
        match log_prob.filter(|number| number.is_finite()) {
            None => return Err(format!("{which} is no number; {expected}")),
            Some(number) if !(least..=greatest).contains(&number) => return Err(format!("{which} is {number:.3}; {expected}")),
            Some(_) => {}
        }
    }
    Ok(())
}

/// What a failed question shows about the weights. An engine that returns an error of its own, or no JSON (`NaN` in Python's), computed no
/// log-prob. Silence and a refused question show nothing.
pub(super) fn failed_to_compute(error: &EngineError) -> Option<String> {
    match error {
        EngineError::Status { status: 500..=599, .. } | EngineError::BadReply { .. } => {
            Some(format!("it failed to compute an answer: {error}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
