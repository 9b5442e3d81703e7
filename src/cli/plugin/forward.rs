//! HTTP to a port of a pod through the API server's port-forward. It works wherever kubectl works, and needs the user's right
//! `pods/portforward`.

use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use tokio::io::DuplexStream;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

const DEADLINE: Duration = Duration::from_secs(15);
/// Longest answer in bytes.
const LONGEST: usize = 16 << 20;

pub(super) async fn open(pods: &Api<Pod>, pod: &str, port: u16) -> anyhow::Result<DuplexStream> {
    let forwarded = timeout(DEADLINE, pods.portforward(pod, &[port])).await.context("the cluster did not respond within 15 s")?;
    let mut forwarded = forwarded.with_context(|| format!("port {port} of pod {pod} cannot be forwarded"))?;
    forwarded.take_stream(port).with_context(|| format!("port {port} of pod {pod} was not forwarded"))
}

/// One `GET`; returns the body of a successful response. Any other response is an error with its text.
pub(super) async fn get(pods: &Api<Pod>, pod: &str, port: u16, path: &str) -> anyhow::Result<String> {
    let asked = async {
        let stream = open(pods, pod, port).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let _driver = AbortOnDropHandle::new(tokio::spawn(connection));
        let request = http::Request::get(path).header("host", "localhost").header("connection", "close");
        let answer = sender.send_request(request.body(Empty::<Bytes>::new())?).await?;
        let status = answer.status();
        let bytes = http_body_util::Limited::new(answer.into_body(), LONGEST).collect().await;
        let bytes = bytes.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if !status.is_success() {
            bail!("{status}: {}", text.trim());
        }
        Ok(text)
    };
    let answer = timeout(DEADLINE, asked).await.context("no response within 15 s")?;
    answer.with_context(|| format!("{pod}:{port}{path} cannot be read"))
}
