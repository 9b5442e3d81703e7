//! Reviews by table: which pods are changed, which are refused, and which requests are no reviews.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Request, Response, StatusCode};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tower::ServiceExt;

use super::shares::{Lane, PART, Share};
use super::{BODY, PATH, WebhookSettings, review, router};
use crate::inject::{Options, Resources, inject};
use weightsync_net::https::{Access, Limits, serve_https};
use weightsync_net::identity::{Ca, Made, PeerIdentity};
use weightsync_net::listen::listen;

fn options() -> Options {
    Options {
        image: "weightsync:1".into(),
        image_pull_policy: "IfNotPresent".into(),
        controller_url: "https://weightsync.ws.svc:8443".into(),
        controller_ca: "PEM".into(),
        resources: Resources::default(),
        shared_memory: None,
        image_pull_secrets: vec!["registry".into()],
    }
}

fn pod(annotations: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"generateName": "actor-", "labels": {"weightsync.dev/role": "rollout"}, "annotations": annotations, "creationTimestamp": null},
        "spec": {"containers": [{"name": "engine", "image": "any", "command": ["serve"]}], "initContainers": [{"name": "first", "image": "any"}]}})
}

fn request(pod: &Value) -> Value {
    json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "rl", "operation": "CREATE", "userInfo": {"username": "any"}, "object": pod, "dryRun": true}})
}

/// The response to a review that can be answered.
fn response(review_request: &Value) -> Value {
    let answer = review(review_request.to_string().as_bytes(), &options()).unwrap();
    assert_eq!((&answer["apiVersion"], &answer["kind"]), (&json!("admission.k8s.io/v1"), &json!("AdmissionReview")));
    assert_eq!(answer["response"]["uid"], "u");
    answer["response"].clone()
}

#[test]
fn labelled_pod_is_patched_as_the_plugin_would_write_it() {
    for annotations in [json!({}), json!({"weightsync.dev/inject": "wrap"})] {
        let mut before = pod(&annotations);
        let answer = response(&request(&before));
        assert_eq!((&answer["allowed"], &answer["patchType"]), (&json!(true), &json!("JSONPatch")));
        let k8s_openapi::ByteString(patch) = serde_json::from_value(answer["patch"].clone()).unwrap();
        let mut expected = before.clone();
        assert_eq!(inject(&mut expected, &options()).unwrap().templates, 1);
        json_patch::patch(&mut before, &serde_json::from_slice::<json_patch::Patch>(&patch).unwrap()).unwrap();
        assert_eq!(before, expected, "{annotations}");
    }
}

#[test]
fn other_pods_and_operations_are_admitted_unchanged() {
    let mut unlabelled = pod(&json!({}));
    unlabelled["metadata"]["labels"] = json!({"app": "any"});
    let mut twice = pod(&json!({}));
    inject(&mut twice, &options()).unwrap();
    let mut updated = request(&pod(&json!({})));
    updated["request"]["operation"] = json!("UPDATE");
    let mut part = request(&pod(&json!({})));
    part["request"]["subResource"] = json!("ephemeralcontainers");
    let mut deployment = request(&pod(&json!({})));
    deployment["request"]["kind"] = json!({"group": "apps", "version": "v1", "kind": "Deployment"});
    let mut deleted = request(&Value::Null);
    deleted["request"]["operation"] = json!("DELETE");
    let opts_out = request(&pod(&json!({"weightsync.dev/inject": "false"})));
    for asked in [request(&unlabelled), request(&twice), opts_out, updated, part, deployment, deleted] {
        let answer = response(&asked);
        assert_eq!(answer["allowed"], true, "{asked}");
        assert!(answer.get("patch").is_none(), "{asked}");
    }
}

#[test]
fn pod_that_cannot_be_injected_is_refused_with_the_remedy() {
    let mut in_image = pod(&json!({"weightsync.dev/inject": "wrap"}));
    in_image["spec"]["containers"][0].as_object_mut().unwrap().remove("command");
    for (refused, parts) in [
        (in_image, ["Pod/actor-: container engine cannot be wrapped", "command: [vllm, serve]"]),
        (pod(&json!({"weightsync.dev/inject": "rap"})), ["\"rap\"", "it must be sidecar, wrap or false"]),
        (pod(&json!({"weightsync.dev/container": "engin"})), ["names \"engin\"", "[\"engine\"]"]),
        (pod(&json!({"weightsync.dev/api-key-secret": "key"})), ["\"key\"", "SECRET/KEY"]),
    ] {
        let answer = response(&request(&refused));
        assert_eq!(answer["allowed"], false);
        let message = answer["status"]["message"].as_str().unwrap();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

async fn send(body: Body, length: Option<usize>) -> Response<Body> {
    let mut request = Request::post(PATH);
    if let Some(length) = length {
        request = request.header("content-length", length);
    }
    router(options()).oneshot(request.body(body).unwrap()).await.unwrap()
}

#[tokio::test]
async fn request_that_is_no_review_is_refused_with_the_cause() {
    let mut old = request(&pod(&json!({})));
    old["apiVersion"] = json!("admission.k8s.io/v1beta1");
    let bare = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"});
    let text = |value: &Value| (value.to_string(), StatusCode::BAD_REQUEST);
    for ((body, status), part) in [
        (text(&old), "admission.k8s.io/v1beta1"),
        (text(&bare), "no request"),
        (text(&json!([])), "no AdmissionReview"),
        (("no JSON".into(), StatusCode::BAD_REQUEST), "no AdmissionReview"),
    ] {
        let length = body.len();
        let answer = send(Body::from(body), Some(length)).await;
        assert_eq!((answer.status(), &answer.headers()["connection"]), (status, &"close".parse().unwrap()));
        let message = String::from_utf8(to_bytes(answer.into_body(), BODY).await.unwrap().to_vec()).unwrap();
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(send(Body::from("{}"), None).await.status(), StatusCode::LENGTH_REQUIRED);
    assert_eq!(send(Body::empty(), Some(BODY + 1)).await.status(), StatusCode::PAYLOAD_TOO_LARGE);
}

/// A body that brings so many bytes and nothing more.
fn stalled(bytes: usize) -> Body {
    let first = futures::stream::iter((bytes > 0).then(|| Ok::<_, std::io::Error>(Bytes::from(vec![b' '; bytes]))));
    Body::from_stream(first.chain(futures::stream::pending()))
}

#[tokio::test(start_paused = true)]
async fn body_that_stops_ends_soon_and_holds_what_it_brought() {
    for (bytes, milliseconds) in [(0, 250), (1, 1_000), (PART, 1_000)] {
        let began = tokio::time::Instant::now();
        let answer = send(stalled(bytes), Some(BODY)).await;
        assert_eq!((answer.status(), began.elapsed().as_millis()), (StatusCode::REQUEST_TIMEOUT, milliseconds), "{bytes}");
        let message = String::from_utf8(to_bytes(answer.into_body(), BODY).await.unwrap().to_vec()).unwrap();
        assert!(message.contains(&format!("after {bytes} bytes")), "{message}");
    }
    let longer = send(Body::from("x".repeat(11)), Some(10)).await;
    assert_eq!(longer.status(), StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test(start_paused = true)]
async fn address_takes_a_quarter_of_a_lane_and_leaves_the_rest() {
    let lane = Lane::new(8 * PART);
    let at = |last: u8| IpAddr::from([10, 0, 0, last]);
    let grown = async |share: &mut Share<'_>| tokio::time::timeout(Duration::from_secs(1), share.grow()).await.is_ok();
    let mut greedy = lane.share(at(1));
    assert!(grown(&mut greedy).await && grown(&mut greedy).await && !grown(&mut greedy).await, "a quarter");
    let mut mapped = lane.share("::ffff:10.0.0.1".parse().unwrap());
    assert!(!grown(&mut mapped).await, "the same address");
    let mut others: Vec<Share> = (2..=4).map(|last| lane.share(at(last))).collect();
    for other in &mut others {
        assert!(grown(other).await && grown(other).await);
    }
    let mut late = lane.share(at(5));
    assert!(!grown(&mut late).await, "all are taken");
    // One that waits gets what is freed.
    let ((), waited) = tokio::join!(async { drop(others.pop()) }, grown(&mut late));
    assert!(waited);
    assert_eq!((late.bytes(), greedy.bytes()), (PART, 2 * PART));
}

/// The webhook on a real listener, as a controller serves it.
struct Listening {
    address: SocketAddr,
    authority: String,
    _end: tokio_util::sync::DropGuard,
}

const NAME: &str = "weightsync.system.svc";
/// A review takes no longer on any machine, so that a fast one does not make the limit too short.
const LEAST: Duration = Duration::from_millis(25);

fn listening() -> Listening {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let hour = Duration::from_secs(3600);
    let identity = Ca::generate().unwrap().issue(&PeerIdentity::Controller, hour).unwrap();
    let made = Made::new(NAME, hour).unwrap();
    identity.serve_as(NAME, &made.chain, &made.key).unwrap();
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let (address, cancel) = (listener.local_addr().unwrap(), CancellationToken::new());
    tokio::spawn(serve_https(listener, identity, Access::Open, router(options()), Limits::enrollment(), cancel.clone()));
    Listening { address, authority: made.authority, _end: cancel.drop_guard() }
}

impl Listening {
    /// A client of its own connection, from 127.0.0.LAST.
    fn client(&self, last: u8) -> reqwest::Client {
        reqwest::Client::builder()
            .use_rustls_tls()
            .tls_built_in_root_certs(false)
            .add_root_certificate(reqwest::Certificate::from_pem(self.authority.as_bytes()).unwrap())
            .resolve(NAME, self.address)
            .local_address(IpAddr::from([127, 0, 0, last]))
            .no_proxy()
            .build()
            .unwrap()
    }

    fn url(&self) -> String {
        format!("https://{NAME}:{}{PATH}", self.address.port())
    }

    /// How long one review of a pod takes, with its connection.
    async fn reviewed(&self) -> Duration {
        let (client, began) = (self.client(1), Instant::now());
        let answer = client.post(self.url()).json(&request(&pod(&json!({})))).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        let answer: Value = answer.json().await.unwrap();
        assert_eq!(answer["response"]["patchType"], "JSONPatch");
        began.elapsed()
    }

    /// Clients that announce a body of that length, and bring so many bytes of it. Returns once each sent its head, or was sent away.
    async fn strangers(&self, count: u8, length: usize, bytes: usize) -> Vec<AbortOnDropHandle<()>> {
        let (tell, mut begun) = tokio::sync::mpsc::unbounded_channel();
        let asked = (0..count).map(|number| {
            // Four addresses: a quarter each is all there is. The listener keeps 64 of one.
            let (client, url, tell) = (self.client(2 + number / 45), self.url(), tell.clone());
            // The client asks for the body once it has a connection.
            let sent = tell.clone();
            let first = futures::stream::once(async move {
                let _ = sent.send(number);
                Ok::<_, std::io::Error>(vec![b' '; bytes])
            });
            let body = reqwest::Body::wrap_stream(first.chain(futures::stream::pending()));
            AbortOnDropHandle::new(tokio::spawn(async move {
                let _refused = client.post(url).header("content-length", length).body(body).send().await;
                let _ = tell.send(number);
            }))
        });
        let asked = asked.collect();
        let mut heard = BTreeSet::new();
        while heard.len() < usize::from(count) {
            heard.extend(tokio::time::timeout(Duration::from_secs(30), begun.recv()).await.expect("all are heard of"));
        }
        asked
    }
}

/// Both times are of one run on one machine: what the machine does takes part in both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_is_reviewed_at_once_among_silent_strangers() {
    let server = listening();
    let mut alone = Duration::ZERO;
    for _ in 0..3 {
        alone = alone.max(server.reviewed().await);
    }
    for (count, length, bytes) in [(60, BODY, 0), (180, BODY, 0), (180, BODY, 1), (180, PART, 1)] {
        let _held = server.strangers(count, length, bytes).await;
        // The best of some: one may meet a moment of the machine.
        let mut among = Duration::MAX;
        for _ in 0..3 {
            among = among.min(server.reviewed().await);
        }
        assert!(among < 10 * alone.max(LEAST), "{count} that bring {bytes} of {length} bytes: {among:?}, alone {alone:?}");
    }
}

#[test]
fn settings_are_read_as_the_chart_writes_them() {
    let text = r#"{"imagePullSecrets":["registry"],"resources":{"limits":{},"requests":{"cpu":"100m"}},"sharedMemory":"8Gi"}"#;
    let settings: WebhookSettings = serde_json::from_str(text).unwrap();
    assert_eq!(settings.resources.requests.get("cpu").map(String::as_str), Some("100m"));
    assert_eq!((settings.shared_memory.as_deref(), settings.image_pull_secrets), (Some("8Gi"), vec!["registry".to_owned()]));
    assert!(serde_json::from_str::<WebhookSettings>(r#"{"resource":{}}"#).is_err(), "an unknown setting would do nothing");
}
