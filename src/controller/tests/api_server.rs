//! An API server in memory: objects, watches, optimistic concurrency, UIDs, deletion, and server-side apply: what a manager applied before and
//! does not repeat is removed. It can answer 500, or nothing at all, and hold its watches back. It asserts that each right it is asked for is
//! one that the chart grants.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, OnceLock};

use axum::body::Body as Answer;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
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

/// One right: verb, resource, and the names that it is held to; any name where there are none.
type Right = (String, String, Vec<String>);

/// What the chart's roles grant the controller, as rendered in `deploy/install.yaml`.
fn granted() -> &'static [Right] {
    static GRANTED: OnceLock<Vec<Right>> = OnceLock::new();
    GRANTED.get_or_init(|| {
        let text = include_str!("../../../deploy/install.yaml");
        let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
        let ours = |role: &&Value| {
            let kind = role["kind"].as_str().unwrap_or_default();
            let name = role["metadata"]["name"].as_str().unwrap_or_default();
            (kind, name) == ("ClusterRole", "weightsync") || (kind, name) == ("Role", "weightsync-own")
        };
        let words = |rule: &Value, field: &str| -> Vec<String> {
            rule[field].as_array().into_iter().flatten().map(|word| word.as_str().unwrap().to_owned()).collect()
        };
        // The chart grants this where the controller serves the webhook (tests/host/chart.rs).
        let mut rights = vec![("get".to_owned(), "mutatingwebhookconfigurations".to_owned(), vec!["weightsync-inject".to_owned()])];
        for rule in documents.iter().filter(ours).flat_map(|role| role["rules"].as_array().unwrap()) {
            for resource in words(rule, "resources") {
                rights.extend(words(rule, "verbs").into_iter().map(|verb| (verb, resource.clone(), words(rule, "resourceNames"))));
            }
        }
        rights
    })
}

fn is_granted(verb: &str, resource: &str, name: &str) -> bool {
    granted().iter().any(|(may, of, names)| may == verb && of == resource && (names.is_empty() || names.iter().any(|one| one == name)))
}

type Key = (String, String, String);

struct Store {
    version: u64,
    objects: BTreeMap<Key, Value>,
    /// `(verb, resource, name)` of every call.
    calls: Vec<(String, String, String)>,
    /// Patches of a status that somebody else is to be ahead of.
    race: u32,
    /// The object that takes the place of its namesake before the next patch of its conditions.
    successor: Option<Value>,
    /// All changes, for watches: version, resource, event.
    log: Vec<(u64, String, Value)>,
    /// What each manager applied last to each object: what it does not repeat is removed.
    applied: BTreeMap<(Key, String), Value>,
    /// The last version that watches bring: what comes after it leaves caches stale.
    frozen: Option<u64>,
    /// The oldest version from which a watch can go on, and what others are answered with HTTP 410.
    oldest: (u64, &'static str),
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
    /// Who applies, where this is a server-side apply.
    manager: Option<String>,
}

fn failure(code: u16, reason: &str, message: &str) -> (u16, Value) {
    (code, json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason, "code": code}))
}

impl ApiServer {
    pub(crate) fn new() -> Self {
        let store = Store {
            version: 1,
            objects: BTreeMap::new(),
            calls: Vec::new(),
            race: 0,
            successor: None,
            log: Vec::new(),
            applied: BTreeMap::new(),
            frozen: None,
            oldest: (0, ""),
        };
        Self { store: Arc::new(Mutex::new(store)), changed: watch::Sender::new(0), mode: watch::Sender::new(Mode::Works) }
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Somebody else writes the object before each of the next so many status patches.
    pub(crate) fn race(&self, times: u32) {
        self.store.lock().race = times;
    }

    /// Before the next patch of its conditions, the object is deleted, and this one is created under its name.
    pub(crate) fn replace_before_conditions(&self, successor: Value) {
        self.store.lock().successor = Some(successor);
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
        store.remove(&(resource.to_owned(), namespace.to_owned(), name.to_owned()));
        self.changed.send_replace(store.version);
    }

    /// Watches bring nothing more from now on: caches stay as they are.
    pub(crate) fn freeze_watches(&self) {
        let mut store = self.store.lock();
        store.frozen = Some(store.version);
    }

    /// Forgets its history, and ends its watches: from what a client knows, no watch can go on. Such a one is answered 410 with that body.
    pub(crate) fn compact(&self, body: &'static str) {
        let mut store = self.store.lock();
        store.version += 1;
        store.oldest = (store.version, body);
        self.changed.send_replace(store.version);
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
        let applies = request.headers().get("content-type").is_some_and(|kind| kind.as_bytes().starts_with(b"application/apply-patch"));
        let mut call = Call::parse(request.method(), request.uri());
        call.manager = call.manager.filter(|_| applies);
        let full = match &call.subresource {
            Some(subresource) => format!("{}/{subresource}", call.resource),
            None => call.resource.clone(),
        };
        let name = call.name.clone().unwrap_or_default();
        assert!(is_granted(call.verb, &full, &name), "the chart does not grant: {} {full} {name}", call.verb);
        self.store.lock().calls.push((call.verb.to_owned(), full, name));
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
        let (oldest, body) = self.store.lock().oldest;
        if call.since < oldest {
            return Response::builder().status(410).body(Answer::from(body)).unwrap();
        }
        let mut mode = self.mode.subscribe();
        // A server that fails breaks its watches too.
        let failed = async move { mode.wait_for(|mode| *mode == Mode::Fails).await.map(drop).unwrap_or_default() };
        let state = (self.store.clone(), self.changed.subscribe(), call.resource.clone(), call.since);
        let lines = futures::stream::unfold(state, |(store, mut changed, resource, since)| async move {
            loop {
                changed.mark_unchanged();
                let next = {
                    let store = store.lock();
                    if since < store.oldest.0 {
                        return None;
                    }
                    let shown = |version: u64| version > since && store.frozen.is_none_or(|frozen| version <= frozen);
                    store.log.iter().find(|(version, of, _)| shown(*version) && *of == resource).cloned()
                };
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
        let manager = query.split('&').find_map(|pair| pair.strip_prefix("fieldManager=")).map(str::to_owned);
        let name = parts.get(1).map(|name| (*name).to_owned());
        let verb = match (method.as_str(), &name) {
            ("GET", None) if query.contains("watch=true") => "watch",
            ("GET", None) => "list",
            ("GET", Some(_)) => "get",
            ("POST", _) => "create",
            ("PUT", _) => "update",
            ("PATCH", _) => "patch",
            ("DELETE", Some(_)) => "delete",
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
            manager,
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
            "delete" => self.delete(call, &body),
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

    fn remove(&mut self, key: &Key) {
        let mut gone = self.objects.remove(key).unwrap();
        self.stamp(&mut gone);
        self.applied.retain(|(of, _), _| of != key);
        self.log.push((self.version, key.0.clone(), json!({"type": "DELETED", "object": gone})));
    }

    fn delete(&mut self, call: &Call, options: &Value) -> (u16, Value) {
        let Some(found) = self.objects.get(&call.key) else { return failure(404, "NotFound", "no such object") };
        if options["preconditions"]["uid"].as_str().is_some_and(|uid| found["metadata"]["uid"] != *uid) {
            return failure(409, "Conflict", "Precondition failed: UID in precondition: other, UID in object meta: this");
        }
        self.remove(&call.key);
        (200, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}))
    }

    fn write(&mut self, call: &Call, body: Value) -> (u16, Value) {
        let Some(found) = self.objects.get(&call.key).cloned() else { return failure(404, "NotFound", "no such object") };
        if call.subresource.as_deref() == Some("status") && self.race > 0 {
            self.race -= 1;
            self.put("MODIFIED", call.key.clone(), &mut found.clone());
        }
        if body["status"]["conditions"].is_array()
            && self.successor.as_ref().is_some_and(|successor| successor["metadata"]["name"] == found["metadata"]["name"])
            && let Some(mut successor) = self.successor.take()
        {
            self.remove(&call.key);
            self.put("ADDED", call.key.clone(), &mut successor);
        }
        let found = self.objects[&call.key].clone();
        let said = |field: &str| body["metadata"][field].as_str();
        if said("resourceVersion").is_some_and(|version| found["metadata"]["resourceVersion"] != *version) {
            return failure(409, "Conflict", "the object has been modified");
        }
        // The strategy of a custom resource's status takes all metadata from the object that is there (run: Kubernetes 1.36.3).
        let ignores_uid = call.subresource.as_deref() == Some("status") && call.resource == "weightsyncs";
        if !ignores_uid && said("uid").is_some_and(|uid| found["metadata"]["uid"] != *uid) {
            return failure(409, "Conflict", "Precondition failed: UID in precondition: other, UID in object meta: this");
        }
        let mut written = found.clone();
        let part = match call.subresource.as_deref() {
            Some("status") => "status",
            Some("ephemeralcontainers") => "spec",
            _ => "",
        };
        match (call.verb, part, &call.manager) {
            ("update", _, _) => written = body,
            (_, "", None) => merge(&mut written, &body),
            (_, part, None) => {
                let names = |object: &Value| object["spec"]["ephemeralContainers"].as_array().cloned().unwrap_or_default();
                let before = names(&found);
                let rewrites = |new: &Value| before.iter().any(|known| known["name"] == new["name"] && known != new);
                if part == "spec" && names(&body).iter().any(rewrites) {
                    return failure(422, "Invalid", "existing ephemeral containers may not be changed");
                }
                merge(&mut written[part], &body[part]);
            }
            (_, part, Some(manager)) => {
                let mut fields = body.clone();
                fields.as_object_mut().unwrap().remove("metadata");
                let before = self.applied.insert((call.key.clone(), manager.clone()), fields.clone()).unwrap_or_default();
                let others = self.applied.iter().filter(|((of, by), _)| *of == call.key && by != manager);
                let kept: Vec<&Value> = others.map(|(_, value)| value).chain([&fields]).collect();
                strip(&mut written, &before, &kept);
                if part.is_empty() { merge(&mut written, &body) } else { merge(&mut written[part], &body[part]) }
            }
        }
        if written == found {
            return (200, found);
        }
        self.put("MODIFIED", call.key.clone(), &mut written);
        (200, written)
    }
}

/// The key that identifies entries of a list, where the schema makes a map of it.
fn key(entry: &Value) -> Option<&Value> {
    entry.get("type").or_else(|| entry.get("name"))
}

/// Removes from an object what a manager applied before, and neither it nor another manager applies now.
fn strip(object: &mut Value, before: &Value, kept: &[&Value]) {
    match (object, before) {
        (Value::Object(object), Value::Object(before)) => {
            for (field, value) in before {
                let kept: Vec<&Value> = kept.iter().filter_map(|kept| kept.get(field)).collect();
                match object.get_mut(field) {
                    Some(_) if kept.is_empty() => _ = object.remove(field),
                    Some(inner) => strip(inner, value, &kept),
                    None => {}
                }
            }
        }
        (Value::Array(object), Value::Array(before)) => {
            for entry in before.iter().filter(|entry| key(entry).is_some()) {
                let same = |other: &&Value| key(other) == key(entry);
                let kept: Vec<&Value> = kept.iter().filter_map(|kept| kept.as_array()?.iter().find(same)).collect();
                match object.iter().position(|known| key(known) == key(entry)) {
                    Some(at) if kept.is_empty() => _ = object.remove(at),
                    Some(at) => strip(&mut object[at], entry, &kept),
                    None => {}
                }
            }
        }
        _ => {}
    }
}

/// Fields replace what was there, and `null` removes it; lists of entries with a type or name are merged by it, as the schema says, and others
/// are replaced.
fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (field, value) in from {
                if value.is_null() {
                    into.remove(field);
                } else {
                    merge(into.entry(field.clone()).or_insert(Value::Null), value);
                }
            }
        }
        (Value::Array(into), Value::Array(from)) if from.iter().all(|entry| key(entry).is_some()) => {
            for entry in from {
                match into.iter_mut().find(|known| key(known) == key(entry)) {
                    Some(known) => merge(known, entry),
                    None => into.push(entry.clone()),
                }
            }
        }
        // As a server stores it: without fields that say nothing.
        (into @ Value::Null, Value::Object(_)) => {
            *into = json!({});
            merge(into, from);
        }
        (into, from) => *into = from.clone(),
    }
}

/// A token as the kubelet projects it, without a signature.
pub(crate) fn projected_token(pod: &str, uid: &str) -> String {
    let claims = json!({"aud": ["weightsync.dev"], "kubernetes.io": {"pod": {"name": pod, "uid": uid}}});
    format!("head.{}.signature", URL_SAFE_NO_PAD.encode(claims.to_string()))
}

fn review(mut body: Value) -> (u16, Value) {
    let token = body["spec"]["token"].as_str().unwrap_or_default().to_owned();
    let claims = token.split('.').nth(1).and_then(|claims| URL_SAFE_NO_PAD.decode(claims).ok());
    let claims: Value = claims.and_then(|claims| serde_json::from_slice(&claims).ok()).unwrap_or_default();
    let of = &claims["kubernetes.io"]["pod"];
    body["status"] = match of["name"].as_str().zip(of["uid"].as_str()) {
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
