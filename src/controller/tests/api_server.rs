//! An API server in memory: objects, watches, optimistic concurrency, UIDs, and as much of server-side apply as one writer a field needs.
//! It can answer 500, or nothing at all. It asserts that each right it is asked for is one that the chart grants.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body as Answer;
use futures::StreamExt;
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Works,
    /// 500 for every call.
    Fails,
}

/// What the chart's roles grant (charts/weightsync/templates/rbac.yaml): verb and resource.
const GRANTED: [(&str, &str); 16] = [
    ("create", "tokenreviews"),
    ("list", "pods"),
    ("watch", "pods"),
    ("patch", "pods/ephemeralcontainers"),
    ("patch", "pods/status"),
    ("create", "events"),
    ("patch", "events"),
    ("list", "weightsyncs"),
    ("watch", "weightsyncs"),
    ("patch", "weightsyncs/status"),
    ("create", "leases"),
    ("get", "leases"),
    ("update", "leases"),
    ("get", "secrets"),
    ("update", "secrets"),
    ("patch", "configmaps"),
];

type Key = (String, String, String);

struct Store {
    version: u64,
    objects: BTreeMap<Key, Value>,
    /// `(verb, resource, name)` of every call.
    calls: Vec<(String, String, String)>,
    /// Patches of a status that somebody else is to be ahead of.
    race: u32,
    /// All changes, for watches: version, resource, event.
    log: Vec<(u64, String, Value)>,
}

/// The server. Clones are the same one.
#[derive(Clone)]
pub(crate) struct ApiServer {
    store: Arc<Mutex<Store>>,
    changed: watch::Sender<u64>,
    mode: watch::Sender<Mode>,
}

struct Call {
    verb: &'static str,
    resource: String,
    subresource: Option<String>,
    key: Key,
    name: Option<String>,
    /// Version from which a watch goes on.
    since: u64,
}

fn failure(code: u16, reason: &str, message: &str) -> (u16, Value) {
    (code, json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason, "code": code}))
}

impl ApiServer {
    pub(crate) fn new() -> Self {
        let store = Store { version: 1, objects: BTreeMap::new(), calls: Vec::new(), race: 0, log: Vec::new() };
        Self { store: Arc::new(Mutex::new(store)), changed: watch::Sender::new(0), mode: watch::Sender::new(Mode::Works) }
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Somebody else writes the object before each of the next so many status patches.
    pub(crate) fn race(&self, times: u32) {
        self.store.lock().race = times;
    }

    pub(crate) fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| server.clone().serve(request));
        Client::new(service, "system")
    }

    /// Makes or replaces an object, as a user or the kubelet would.
    pub(crate) fn put(&self, resource: &str, mut object: Value) {
        let text = |object: &Value, field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        let key = (resource.to_owned(), text(&object, "namespace"), text(&object, "name"));
        let mut store = self.store.lock();
        let kind = if store.objects.contains_key(&key) { "MODIFIED" } else { "ADDED" };
        store.put(kind, key, &mut object);
        self.changed.send_replace(store.version);
    }

    pub(crate) fn delete(&self, resource: &str, namespace: &str, name: &str) {
        let mut store = self.store.lock();
        let mut gone = store.objects.remove(&(resource.to_owned(), namespace.to_owned(), name.to_owned())).unwrap();
        store.stamp(&mut gone);
        let version = store.version;
        store.log.push((version, resource.to_owned(), json!({"type": "DELETED", "object": gone})));
        self.changed.send_replace(version);
    }

    pub(crate) fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        self.store.lock().objects.get(&(resource.to_owned(), namespace.to_owned(), name.to_owned())).cloned()
    }

    pub(crate) fn all(&self, resource: &str) -> Vec<Value> {
        let store = self.store.lock();
        store.objects.iter().filter(|((of, _, _), _)| of == resource).map(|(_, object)| object.clone()).collect()
    }

    pub(crate) fn calls(&self, verb: &str, resource: &str) -> usize {
        self.store.lock().calls.iter().filter(|(v, r, _)| v == verb && r == resource).count()
    }

    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let mut changed = self.changed.subscribe();
        let waited = tokio::time::timeout(std::time::Duration::from_secs(20), async {
            while !holds(self) {
                changed.changed().await.unwrap();
            }
        });
        assert!(waited.await.is_ok(), "not {what}: {:#?}", self.all("weightsyncs"));
    }

    async fn serve(self, request: Request<Body>) -> Result<Response<Answer>, Infallible> {
        let call = Call::parse(request.method(), request.uri());
        let full = match &call.subresource {
            Some(subresource) => format!("{}/{subresource}", call.resource),
            None => call.resource.clone(),
        };
        assert!(GRANTED.contains(&(call.verb, full.as_str())), "the chart does not grant: {} {full}", call.verb);
        self.store.lock().calls.push((call.verb.to_owned(), full, call.name.clone().unwrap_or_default()));
        let body = request.into_body().collect().await.unwrap().to_bytes();
        if *self.mode.borrow() == Mode::Fails {
            return Ok(answer(failure(500, "InternalError", "down")));
        }
        if call.verb == "watch" {
            return Ok(self.watch(&call));
        }
        let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let (outcome, version) = {
            let mut store = self.store.lock();
            (store.carry_out(&call, body), store.version)
        };
        self.changed.send_replace(version);
        Ok(answer(outcome))
    }

    fn watch(&self, call: &Call) -> Response<Answer> {
        let mut mode = self.mode.subscribe();
        // A server that fails breaks its watches too.
        let failed = async move { mode.wait_for(|mode| *mode == Mode::Fails).await.map(drop).unwrap_or_default() };
        let state = (self.store.clone(), self.changed.subscribe(), call.resource.clone(), call.since);
        let lines = futures::stream::unfold(state, |(store, mut changed, resource, since)| async move {
            loop {
                changed.mark_unchanged();
                let next = store.lock().log.iter().find(|(version, of, _)| *version > since && *of == resource).cloned();
                if let Some((version, _, event)) = next {
                    let line = Ok::<_, Infallible>(format!("{event}\n"));
                    return Some((line, (store, changed, resource, version)));
                }
                changed.changed().await.ok()?;
            }
        });
        Response::new(Answer::from_stream(lines.take_until(Box::pin(failed))))
    }
}

fn answer((code, body): (u16, Value)) -> Response<Answer> {
    Response::builder().status(code).body(Answer::from(serde_json::to_vec(&body).unwrap())).unwrap()
}

impl Call {
    fn parse(method: &Method, uri: &http::Uri) -> Self {
        let mut parts: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
        parts.drain(..if parts[0] == "api" { 2 } else { 3 });
        let mut namespace = String::new();
        if parts[0] == "namespaces" {
            namespace = parts[1].to_owned();
            parts.drain(..2);
        }
        let query = uri.query().unwrap_or_default();
        let by_name = query.split('&').find_map(|pair| pair.strip_prefix("fieldSelector=metadata.name%3D")).map(str::to_owned);
        let since = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion=")).and_then(|version| version.parse().ok());
        let name = parts.get(1).map(|name| (*name).to_owned());
        let verb = match (method.as_str(), &name) {
            ("GET", None) if query.contains("watch=true") => "watch",
            ("GET", None) => "list",
            ("GET", Some(_)) => "get",
            ("POST", _) => "create",
            ("PUT", _) => "update",
            ("PATCH", _) => "patch",
            other => panic!("{other:?} is not used"),
        };
        let key = (parts[0].to_owned(), namespace, name.clone().unwrap_or_default());
        Self {
            verb,
            resource: parts[0].to_owned(),
            subresource: parts.get(2).map(|part| (*part).to_owned()),
            key,
            name: name.or(by_name),
            since: since.unwrap_or(0),
        }
    }
}

impl Store {
    fn stamp(&mut self, object: &mut Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
    }

    fn put(&mut self, kind: &str, key: Key, object: &mut Value) {
        self.stamp(object);
        self.log.push((self.version, key.0.clone(), json!({"type": kind, "object": object})));
        self.objects.insert(key, object.clone());
    }

    fn carry_out(&mut self, call: &Call, body: Value) -> (u16, Value) {
        match call.verb {
            "list" => self.list(call),
            "get" => self.objects.get(&call.key).map_or_else(|| failure(404, "NotFound", "no such object"), |found| (200, found.clone())),
            "create" if call.resource == "tokenreviews" => review(body),
            "create" => self.create(call, body),
            _ => self.write(call, body),
        }
    }

    fn list(&self, call: &Call) -> (u16, Value) {
        let (resource, namespace, _) = &call.key;
        let items: Vec<&Value> = self
            .objects
            .iter()
            .filter(|((of, within, name), _)| {
                of == resource && (namespace.is_empty() || within == namespace) && call.name.as_ref().is_none_or(|wanted| wanted == name)
            })
            .map(|(_, object)| object)
            .collect();
        (200, json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": self.version.to_string()}, "items": items}))
    }

    fn create(&mut self, call: &Call, mut body: Value) -> (u16, Value) {
        let name = body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let key = (call.key.0.clone(), call.key.1.clone(), name);
        if self.objects.contains_key(&key) {
            return failure(409, "AlreadyExists", "it is there");
        }
        self.put("ADDED", key, &mut body);
        (201, body)
    }

    fn write(&mut self, call: &Call, body: Value) -> (u16, Value) {
        let Some(found) = self.objects.get(&call.key).cloned() else { return failure(404, "NotFound", "no such object") };
        if call.subresource.as_deref() == Some("status") && self.race > 0 {
            self.race -= 1;
            self.put("MODIFIED", call.key.clone(), &mut found.clone());
        }
        let found = self.objects[&call.key].clone();
        let said = |field: &str| body["metadata"][field].as_str();
        if said("resourceVersion").is_some_and(|version| found["metadata"]["resourceVersion"] != *version) {
            return failure(409, "Conflict", "the object has been modified");
        }
        if said("uid").is_some_and(|uid| found["metadata"]["uid"] != *uid) {
            return failure(409, "Conflict", "Precondition failed: UID in precondition differs");
        }
        let mut written = found.clone();
        match (call.verb, call.subresource.as_deref()) {
            ("update", _) => written = body,
            (_, Some("status")) => merge(&mut written["status"], &body["status"]),
            (_, Some("ephemeralcontainers")) => merge(&mut written["spec"], &body["spec"]),
            _ => merge(&mut written, &body),
        }
        if written == found {
            return (200, found);
        }
        self.put("MODIFIED", call.key.clone(), &mut written);
        (200, written)
    }
}

/// Fields of one writer replace what was there; lists of entries with a type or name are merged by it, as the schema says.
fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (field, value) in from {
                merge(into.entry(field.clone()).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(from)) => {
            let key = |entry: &Value| entry.get("type").or_else(|| entry.get("name")).cloned();
            for entry in from {
                match into.iter_mut().find(|known| key(known).is_some() && key(known) == key(entry)) {
                    Some(known) => *known = entry.clone(),
                    None => into.push(entry.clone()),
                }
            }
        }
        (into, from) => *into = from.clone(),
    }
}

/// Tokens read `POD/UID`.
fn review(mut body: Value) -> (u16, Value) {
    let token = body["spec"]["token"].as_str().unwrap_or_default().to_owned();
    body["status"] = match token.split_once('/') {
        Some((pod, uid)) => json!({
            "authenticated": true,
            "audiences": body["spec"]["audiences"],
            "user": {
                "username": "system:serviceaccount:default:default",
                "extra": {"authentication.kubernetes.io/pod-name": [pod], "authentication.kubernetes.io/pod-uid": [uid]},
            },
        }),
        None => json!({"authenticated": false, "error": "malformed"}),
    };
    (201, body)
}
