//! What leaves a cluster in a report: manifests without values that may be secret, and text without what was found in them or looks like one.
//!
//! Rather too much than too little: of environment variables only those stay whose names are known to hold none. Pure.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// In the place of what was taken out.
const OUT: &str = "[REDACTED]";

/// Variables whose values stay: they say how transports and engines are set up, and hold no secret.
const HARMLESS: [&str; 9] = ["NCCL_", "CUDA_VISIBLE", "NVIDIA_", "VLLM_SERVER", "VLLM_CPU", "VLLM_TARGET", "POD_", "UCX_", "OMP_"];
/// Our own variables that are secret.
const OUR_SECRETS: [&str; 2] = ["WEIGHTSYNC_TOKEN", "WEIGHTSYNC_ENGINE_API_KEY"];

/// Parts of names behind which a secret stands.
const SECRET_WORDS: [&str; 9] = ["token", "secret", "password", "passwd", "api-key", "api_key", "apikey", "credential", "authorization"];
/// Words in front of a secret in the middle of a text.
const SCHEMES: [&str; 2] = ["Bearer ", "Basic "];
/// A value shorter than this is too common to be looked for everywhere.
const LEAST: usize = 6;

/// Takes secrets out, and remembers them.
#[derive(Debug, Default)]
pub(super) struct Redactor {
    known: BTreeSet<String>,
    taken: usize,
}

impl Redactor {
    /// How many values were taken out of manifests.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// A manifest without what may be secret.
    pub(super) fn manifest(&mut self, mut value: Value) -> Value {
        self.walk(&mut value);
        value
    }

    fn walk(&mut self, value: &mut Value) {
        match value {
            Value::Object(object) => {
                Self::metadata(object);
                self.variable(object);
                for (name, inner) in object.iter_mut() {
                    match inner {
                        Value::Array(words) if name == "args" || name == "command" => self.arguments(words),
                        // References to Secrets are names; the API server fills no value in.
                        Value::String(text) if is_secret(name) && !name.ends_with("Name") => self.out(text),
                        inner => self.walk(inner),
                    }
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.walk(item)),
            _ => {}
        }
    }

    /// What was applied holds everything once more; who wrote which field says nothing.
    fn metadata(object: &mut Map<String, Value>) {
        object.remove("managedFields");
        if let Some(annotations) = object.get_mut("annotations").and_then(Value::as_object_mut) {
            annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
        }
    }

    /// `{"name": ..., "value": ...}`, as environment variables are written.
    fn variable(&mut self, object: &mut Map<String, Value>) {
        let Some(name) = object.get("name").and_then(Value::as_str) else { return };
        let ours = name.starts_with("WEIGHTSYNC_") && !OUR_SECRETS.contains(&name);
        if ours || (HARMLESS.iter().any(|harmless| name.starts_with(harmless)) && !is_secret(name)) {
            return;
        }
        if let Some(Value::String(value)) = object.get_mut("value") {
            self.out(value);
        }
    }

    /// `--api-key VALUE`, `--api-key=VALUE`, and `NAME=VALUE` before a command.
    fn arguments(&mut self, words: &mut [Value]) {
        let mut follows = false;
        for word in words {
            let Value::String(text) = word else { continue };
            if std::mem::take(&mut follows) && !text.starts_with("--") {
                self.out(text);
                continue;
            }
            match text.split_once('=') {
                Some((name, value)) if is_secret(name) => {
                    let (name, mut value) = (name.to_owned(), value.to_owned());
                    self.out(&mut value);
                    *text = format!("{name}={value}");
                }
                Some(_) => {}
                None => follows = text.starts_with('-') && is_secret(text),
            }
        }
    }

    fn out(&mut self, value: &mut String) {
        if value.is_empty() || value == OUT {
            return;
        }
        self.taken += 1;
        // Log lines hold single words of it.
        if value.len() >= LEAST {
            self.known.insert(std::mem::take(value));
        }
        OUT.clone_into(value);
    }

    /// Text without secrets that manifests held, and without what looks like one.
    pub(super) fn text(&self, text: &str) -> String {
        let mut text = text.to_owned();
        // The longest first: one may be a part of another.
        let mut known: Vec<&String> = self.known.iter().collect();
        known.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        for secret in known {
            text = text.replace(secret.as_str(), OUT);
            // As it stands in JSON.
            let quoted = json!(secret).to_string();
            text = text.replace(quoted.trim_matches('"'), OUT);
        }
        text.split_inclusive('\n').map(line).collect()
    }
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

/// One line without tokens: what follows a scheme of HTTP, what a secret's name is set to, JSON web tokens, and private keys.
fn line(text: &str) -> String {
    let mut text = text.to_owned();
    for scheme in SCHEMES {
        text = after(&text, scheme, |from| from.find(ends_value).unwrap_or(from.len()));
    }
    for start in ["eyJ", "hf_", "sk-", "ghp_", "glpat-", "xox"] {
        text = tokens(&text, start);
    }
    for word in SECRET_WORDS {
        for form in ["=", "\": \"", "\":\"", ": "] {
            text = after(&text, &format!("{word}{form}"), |from| from.find(ends_value).unwrap_or(from.len()));
        }
    }
    if text.contains("PRIVATE KEY") {
        let ended = if text.ends_with('\n') { "\n" } else { "" };
        return format!("{OUT}{ended}");
    }
    text
}

fn ends_value(c: char) -> bool {
    c.is_whitespace() || matches!(c, '"' | '\'' | ',' | ';' | '}' | ')' | '\\')
}

/// Takes out what follows each `before`, whatever its case, up to where `end` says.
fn after(text: &str, before: &str, end: impl Fn(&str) -> usize) -> String {
    let lower = text.to_ascii_lowercase();
    let before = before.to_ascii_lowercase();
    let (mut out, mut at) = (String::with_capacity(text.len()), 0);
    while let Some(found) = lower.get(at..).and_then(|rest| rest.find(&before)) {
        let start = at + found + before.len();
        let rest = text.get(start..).unwrap_or_default();
        let length = end(rest);
        out.push_str(text.get(at..start).unwrap_or_default());
        if length > 0 && !rest.starts_with(OUT) {
            out.push_str(OUT);
            at = start + length;
        } else {
            at = start;
        }
    }
    out.push_str(text.get(at..).unwrap_or_default());
    out
}

/// Takes out words that begin as tokens of well-known kinds do, if they are long enough to be one.
fn tokens(text: &str, start: &str) -> String {
    let (mut out, mut at) = (String::with_capacity(text.len()), 0);
    while let Some(found) = text.get(at..).and_then(|rest| rest.find(start)) {
        let begin = at + found;
        let rest = text.get(begin..).unwrap_or_default();
        let length = rest.find(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '-' | '_' | '.' | '=')).unwrap_or(rest.len());
        let inside = text.get(..begin).and_then(|before| before.chars().next_back()).is_some_and(char::is_alphanumeric);
        out.push_str(text.get(at..begin).unwrap_or_default());
        if length >= 16 && !inside {
            out.push_str(OUT);
        } else {
            out.push_str(rest.get(..length).unwrap_or_default());
        }
        at = begin + length.max(1);
        if length == 0 {
            out.push_str(rest.get(..1).unwrap_or_default());
        }
    }
    out.push_str(text.get(at..).unwrap_or_default());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLANTED: [&str; 9] = [
        "hunter2-of-the-engine",
        "applied-secret-9",
        "wst-single-use-token",
        "sk-live-0123456789abcdef",
        "hf_abcdefghijklmnopqrstuv",
        "behind-an-equals-sign",
        "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl",
        "MIIEvQIBADANBg",
        "database-pass-1",
    ];

    fn pod() -> Value {
        json!({
            "metadata": {
                "name": "a", "managedFields": [{"manager": "x"}],
                "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{\"env\": \"applied-secret-9\"}", "weightsync.dev/api-key-secret": "keys/engine"},
            },
            "spec": {
                "containers": [{
                    "name": "engine", "image": "vllm:1",
                    "command": ["vllm", "serve", "--api-key", "hunter2-of-the-engine", "--port", "8000"],
                    "args": ["--hf-token=behind-an-equals-sign", "--tensor-parallel-size=2"],
                    "env": [
                        {"name": "DATABASE_URL", "value": "database-pass-1"}, {"name": "NCCL_DEBUG", "value": "INFO"},
                        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "engine"}}},
                    ],
                }],
                "ephemeralContainers": [{"name": "weightsync-agent-1", "env": [
                    {"name": "WEIGHTSYNC_TOKEN", "value": "wst-single-use-token"}, {"name": "WEIGHTSYNC_ROLE", "value": "rollout"},
                ]}],
            },
        })
    }

    #[test]
    fn no_planted_secret_is_left_and_what_helps_stays() {
        let mut redactor = Redactor::default();
        let manifest = redactor_manifest(&mut redactor);
        let manifest = redactor.text(&manifest);
        let log = "asked with hunter2-of-the-engine\nAuthorization: Bearer sk-live-0123456789abcdef\n\
                   {\"token\":\"eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl\",\"epoch\":3}\nHF_TOKEN=hf_abcdefghijklmnopqrstuv x\n\
                   -----BEGIN PRIVATE KEY----- MIIEvQIBADANBg\npassword: database-pass-1\nversion 7 of actors/a installed\n";
        let log = redactor.text(log);
        for secret in PLANTED {
            assert!(!manifest.contains(secret), "{secret} in {manifest}");
            assert!(!log.contains(secret), "{secret} in {log}");
        }
        for kept in ["NCCL_DEBUG", "INFO", "--tensor-parallel-size=2", "8000", "vllm:1", "rollout", "\"key\": \"engine\""] {
            assert!(manifest.contains(kept), "{kept} in {manifest}");
        }
        assert!(log.contains("\"epoch\":3") && log.contains("version 7 of actors/a installed"), "{log}");
        assert!(!manifest.contains("managedFields") && !manifest.contains("last-applied"), "{manifest}");
        // The annotation is a mere reference; it goes all the same, by its name.
        assert_eq!(redactor.taken(), 5);
    }

    fn redactor_manifest(redactor: &mut Redactor) -> String {
        serde_json::to_string_pretty(&redactor.manifest(pod())).unwrap()
    }

    #[test]
    fn text_without_secrets_stays_as_it_is() {
        let text = "epoch 3: world size 4\nsk-short eyJ hf_\nöä token of ü\n";
        assert_eq!(Redactor::default().text(text), text);
    }
}
