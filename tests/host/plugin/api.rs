//! An API server for the plugin: objects by path, logs, merge patches, and the websocket after `port-forward`.
//!
//! A forwarded port leads to a real port of this machine.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use http::header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, UPGRADE};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

#[derive(Default)]
struct State {
    /// Answers of GET, by path.
    objects: BTreeMap<String, Value>,
    /// `POD/CONTAINER` to its log.
    logs: BTreeMap<String, String>,
    /// `POD:PORT` to a port of this machine.
    ports: BTreeMap<String, u16>,
    /// Everything that was asked: method and path with query.
    asked: Vec<String>,
}

/// The server.
#[derive(Clone)]
pub struct Api {
    state: Arc<Mutex<State>>,
    kubeconfig: Arc<(tempfile::TempDir, PathBuf)>,
}

impl Api {
    /// Serves until the test ends; the kubeconfig's namespace is `rl`.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "rl"}}],
        });
        std::fs::write(&path, config.to_string()).unwrap();
        let state: Arc<Mutex<State>> = Arc::default();
        let served = state.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let state = served.clone();
                tokio::spawn(async move {
                    let service = hyper::service::service_fn(move |request| answer(state.clone(), request));
                    let _ =
                        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).with_upgrades().await;
                });
            }
        });
        Self { state, kubeconfig: Arc::new((folder, path)) }
    }

    pub fn kubeconfig(&self) -> &PathBuf {
        &self.kubeconfig.1
    }

    pub fn put(&self, path: &str, object: Value) {
        self.state.lock().unwrap().objects.insert(path.to_owned(), object);
    }

    pub fn list(&self, path: &str, items: &[Value]) {
        self.put(path, json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}));
    }

    pub fn get(&self, path: &str) -> Value {
        self.state.lock().unwrap().objects[path].clone()
    }

    pub fn log(&self, container: &str, text: &str) {
        self.state.lock().unwrap().logs.insert(container.to_owned(), text.to_owned());
    }

    pub fn forward(&self, port: &str, to: u16) {
        self.state.lock().unwrap().ports.insert(port.to_owned(), to);
    }

    pub fn asked(&self) -> Vec<String> {
        self.state.lock().unwrap().asked.clone()
    }
}

type Answer = Response<Full<Bytes>>;

fn text(code: StatusCode, body: impl Into<Bytes>) -> Answer {
    Response::builder().status(code).header("content-type", "application/json").body(Full::new(body.into())).unwrap()
}

fn missing(what: &str) -> Answer {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404, "message": what});
    text(StatusCode::NOT_FOUND, status.to_string())
}

async fn answer(state: Arc<Mutex<State>>, mut request: Request<Incoming>) -> Result<Answer, Infallible> {
    let (path, query) = (request.uri().path().to_owned(), request.uri().query().unwrap_or_default().to_owned());
    state.lock().unwrap().asked.push(format!("{} {path}?{query}", request.method()));
    let words: Vec<&str> = path.split('/').collect();
    let parameter = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(&format!("{name}="))).map(str::to_owned);
    match (request.method().as_str(), words.as_slice()) {
        ("GET", [.., "pods", pod, "log"]) => {
            let key = format!("{pod}/{}", parameter("container").unwrap_or_default());
            let found = state.lock().unwrap().logs.get(&key).cloned().filter(|_| parameter("previous").is_none());
            Ok(found.map_or_else(|| missing(&key), |log| text(StatusCode::OK, log)))
        }
        ("GET", [.., "pods", pod, "portforward"]) => {
            let (pod, port) = ((*pod).to_owned(), parameter("ports").unwrap_or_default());
            let key = request.headers().get(SEC_WEBSOCKET_KEY).unwrap().as_bytes().to_vec();
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move { forward(&state, &pod, &port, upgrade).await });
            let switched =
                Response::builder().status(StatusCode::SWITCHING_PROTOCOLS).header(UPGRADE, "websocket").header(CONNECTION, "Upgrade");
            let switched =
                switched.header(SEC_WEBSOCKET_ACCEPT, derive_accept_key(&key)).header(SEC_WEBSOCKET_PROTOCOL, "v4.channel.k8s.io");
            Ok(switched.body(Full::default()).unwrap())
        }
        ("GET", _) => {
            let found = state.lock().unwrap().objects.get(&path).cloned();
            Ok(found.map_or_else(|| missing(&path), |object| text(StatusCode::OK, object.to_string())))
        }
        ("PATCH", _) => {
            let patch: Value = serde_json::from_slice(&request.into_body().collect().await.unwrap().to_bytes()).unwrap();
            let mut state = state.lock().unwrap();
            let Some(object) = state.objects.get_mut(&path) else { return Ok(missing(&path)) };
            for (field, value) in patch["spec"].as_object().into_iter().flatten() {
                let spec = object["spec"].as_object_mut().unwrap();
                // A merge patch takes away what it says null of.
                let _ = if value.is_null() { spec.remove(field) } else { spec.insert(field.clone(), value.clone()) };
            }
            object["metadata"]["generation"] = json!(object["metadata"]["generation"].as_i64().unwrap_or(1) + 1);
            Ok(text(StatusCode::OK, object.to_string()))
        }
        _ => Ok(text(StatusCode::METHOD_NOT_ALLOWED, "")),
    }
}

async fn websocket(upgrade: OnUpgrade) -> WebSocketStream<TokioIo<hyper::upgrade::Upgraded>> {
    WebSocketStream::from_raw_socket(TokioIo::new(upgrade.await.unwrap()), Role::Server, None).await
}

/// Channel 0 is the port's data, 1 its errors; each begins with the port's number.
async fn forward(state: &Mutex<State>, pod: &str, port: &str, upgrade: OnUpgrade) {
    let socket = websocket(upgrade).await;
    let (mut out, mut from) = socket.split();
    let number: u16 = port.parse().unwrap();
    for channel in [0_u8, 1] {
        out.send(Message::binary([&[channel], &number.to_le_bytes()[..]].concat())).await.unwrap();
    }
    let to = state.lock().unwrap().ports.get(&format!("{pod}:{port}")).copied();
    let Some(to) = to else {
        out.send(Message::binary([&[1_u8], &b"no one listens"[..]].concat())).await.unwrap();
        let _ = out.close().await;
        return;
    };
    let (mut near, mut far) = TcpStream::connect(("127.0.0.1", to)).await.unwrap().into_split();
    let back = tokio::spawn(async move {
        let mut buffer = vec![0_u8; 16 << 10];
        while let Ok(count @ 1..) = near.read(&mut buffer).await {
            if out.send(Message::binary([&[0_u8], &buffer[..count]].concat())).await.is_err() {
                return;
            }
        }
        let _ = out.close().await;
    });
    while let Some(Ok(message)) = from.next().await {
        if let Message::Binary(bytes) = message
            && let Some((0, data)) = bytes.split_first()
            && far.write_all(data).await.is_err()
        {
            break;
        }
    }
    drop(far);
    let _ = back.await;
}
