//! HTTP to a port of a pod, through the API server's port-forward: works wherever kubectl works.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use std::time::Duration;

use super::cluster::{Cluster, MINUTE};

/// One request; `Err` says why there was no answer.
pub async fn request(
    cluster: &Cluster,
    pod: &str,
    port: u16,
    method: &str,
    path: &str,
    body: Option<&Value>,
    timeout: Duration,
) -> Result<(u16, Value), String> {
    tokio::time::timeout(timeout, ask(cluster, pod, port, method, path, body))
        .await
        .map_err(|_| format!("{pod}:{port}{path}: no answer within {timeout:?}"))?
}

async fn ask(cluster: &Cluster, pod: &str, port: u16, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, Value), String> {
    let text = |error: &dyn std::fmt::Display| format!("{pod}:{port}{path}: {error}");
    let mut forward = cluster.api::<Pod>().portforward(pod, &[port]).await.map_err(|error| text(&error))?;
    let stream = forward.take_stream(port).ok_or("the port was not forwarded")?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| text(&error))?;
    let driver = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("connection", "close");
    let bytes = body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
    let answer = sender.send_request(request.body(Full::new(bytes)).unwrap()).await.map_err(|error| text(&error))?;
    let status = answer.status().as_u16();
    let bytes = answer.into_body().collect().await.map_err(|error| text(&error))?.to_bytes();
    driver.abort();
    let value = serde_json::from_slice(&bytes).unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
    Ok((status, value))
}

/// `GET` of a port that must answer.
pub async fn get(cluster: &Cluster, pod: &str, port: u16, path: &str) -> (u16, Value) {
    request(cluster, pod, port, "GET", path, None, MINUTE).await.unwrap()
}

/// `POST` to a port that must answer.
pub async fn post(cluster: &Cluster, pod: &str, port: u16, path: &str, body: &Value) -> (u16, Value) {
    request(cluster, pod, port, "POST", path, Some(body), 2 * MINUTE).await.unwrap()
}
