//! A script of calls for each engine: what each must answer, errors included, as read in its sources and seen on the servers that were run.
//!
//! Calls that only look, or that the server must refuse, are played on any server; those that pause it or change what it holds only where that
//! is allowed. Decides whether an answer is the expected one by its status, and where it matters by fields or words of its body.

mod fastdeploy;
mod lmdeploy;
mod sglang;
mod vllm;

use serde_json::{Value, json};

use super::fixture::Fixture;
use super::{ConformanceError, Row};

/// One call and what must come.
#[derive(Debug, Clone)]
struct Call {
    /// `GET /health`.
    call: String,
    body: Option<Value>,
    status: u16,
    /// JSON pointers into the body, and what must be there.
    fields: Vec<(&'static str, Value)>,
    /// Words that must be in the body.
    words: Option<&'static str>,
    /// Whether it pauses the server, ends requests or changes what it holds.
    disturbs: bool,
    /// Whether the key is shown.
    with_key: bool,
}

fn call(call: &str, status: u16) -> Call {
    Call { call: call.to_owned(), body: None, status, fields: Vec::new(), words: None, disturbs: false, with_key: true }
}

impl Call {
    fn body(mut self, body: Value) -> Self {
        self.body = Some(body);
        self
    }

    fn field(mut self, pointer: &'static str, value: Value) -> Self {
        self.fields.push((pointer, value));
        self
    }

    fn says(mut self, words: &'static str) -> Self {
        self.words = Some(words);
        self
    }

    fn disturbs(mut self) -> Self {
        self.disturbs = true;
        self
    }

    fn without_key(mut self) -> Self {
        self.with_key = false;
        self
    }

    fn expected(&self) -> String {
        let fields = self.fields.iter().map(|(pointer, value)| format!(", {}: {value}", pointer.trim_start_matches('/')));
        let words = self.words.iter().map(|words| format!(", {words:?}"));
        fields.chain(words).fold(self.status.to_string(), |all, more| all + &more)
    }

    fn step(&self) -> String {
        let key = if self.with_key { "" } else { " without the key" };
        match &self.body {
            Some(body) => format!("{} {}{key}", self.call, body.to_string().chars().take(80).collect::<String>()),
            None => format!("{}{key}", self.call),
        }
    }
}

/// A greedy completion of one token.
fn one_token(model: &str) -> Value {
    json!({"model": model, "prompt": "x", "max_tokens": 1, "temperature": 0})
}

/// The calls of a kind, in their order; each leaves the server as it found it, or a later one puts it back.
fn calls(engine: &str, model: &str, has_key: bool) -> Vec<Call> {
    let calls = match engine {
        "vllm" => vllm::calls(model, has_key),
        "sglang" => sglang::calls(model, has_key),
        "lmdeploy" => lmdeploy::calls(model, has_key),
        _ => fastdeploy::calls(model, has_key),
    };
    calls.into_iter().chain([call("GET /a-route-that-is-not-there", 404)]).collect()
}

/// The calls of a kind about groups that its own workers join: order rules and refusals, for which no group is needed. The first one is
/// refused whatever the state of the server, so that it shows whether there are such routes at all.
fn group_calls(engine: &str) -> Vec<Call> {
    match engine {
        "vllm" => vllm::group_calls(),
        "sglang" => sglang::group_calls(),
        "lmdeploy" => lmdeploy::group_calls(),
        _ => Vec::new(),
    }
}

pub(super) async fn play(fixture: &Fixture) -> Result<Vec<Row>, ConformanceError> {
    let model = match fixture.model_name().await {
        Ok(model) => model,
        Err(why) => return Ok(vec![Row::new("script", "the name of its model", "one", Err(why))]),
    };
    let mut rows = Vec::new();
    for call in calls(&fixture.engine, &model, fixture.client.has_key()) {
        if call.disturbs && !fixture.destructive {
            rows.push(Row::skipped("script", call.step(), "it disturbs the server: --destructive"));
            continue;
        }
        rows.push(Row::new("script", call.step(), call.expected(), answer(fixture, &call).await));
    }
    let calls = group_calls(&fixture.engine);
    if let Some(first) = calls.first() {
        let part = "script, groups";
        let there = fixture.client.call(&first.call, first.body.as_ref(), true).await;
        if there.is_ok_and(|reply| matches!(reply.status, 404 | 405)) {
            rows.push(Row::skipped(part, first.step(), "the server has no such routes: it joins no group by itself"));
            return Ok(rows);
        }
        for call in &calls {
            rows.push(if call.disturbs && !fixture.destructive {
                Row::skipped(part, call.step(), "it disturbs the server: --destructive")
            } else {
                Row::new(part, call.step(), call.expected(), answer(fixture, call).await)
            });
        }
    }
    Ok(rows)
}

async fn answer(fixture: &Fixture, call: &Call) -> Result<String, String> {
    let reply = fixture.client.call(&call.call, call.body.as_ref(), call.with_key).await?;
    let found = format!("{} {}", reply.status, reply.shown()).trim_end().to_owned();
    if reply.status != call.status {
        return Err(found);
    }
    let body = reply.json();
    for (pointer, value) in &call.fields {
        if body.pointer(pointer) != Some(value) {
            return Err(found);
        }
    }
    match call.words {
        Some(words) if !reply.text.contains(words) => Err(found),
        _ if call.fields.is_empty() && call.words.is_none() => Ok(reply.status.to_string()),
        _ => Ok(call.expected()),
    }
}
