//! Reviews by table: which pods are changed, which are refused, and which requests are no reviews. And when the configuration is written.

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Request, Response, StatusCode};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::{BODY, PATH, WebhookSettings, bundle, review, router};
use crate::inject::{Options, Resources, inject};

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
    let answer = review(&Bytes::from(review_request.to_string()), &options()).unwrap();
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

#[tokio::test(start_paused = true)]
async fn bodies_that_never_end_hold_their_share_for_seconds_only() {
    let webhook = router(options());
    let stalled = || Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>());
    let asked = |body: Body, length: usize| {
        let request = Request::post(PATH).header("content-length", length).body(body).unwrap();
        webhook.clone().oneshot(request)
    };
    // Four bodies of the longest length are all that is read at once.
    let held: Vec<_> = (0..4).map(|_| tokio::spawn(asked(stalled(), BODY))).collect();
    tokio::task::yield_now().await;
    tokio::time::advance(std::time::Duration::from_secs(1)).await;
    let body = request(&pod(&json!({}))).to_string();
    let (length, began) = (body.len(), tokio::time::Instant::now());
    assert_eq!(asked(Body::from(body), length).await.unwrap().status(), StatusCode::OK, "it waited for a share");
    assert_eq!(began.elapsed().as_secs(), 3, "until the others ended");
    for one in held {
        assert_eq!(one.await.unwrap().unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
    }
}

#[test]
fn configuration_is_written_when_it_lacks_the_authority() {
    let found = |webhooks: Value| -> MutatingWebhookConfiguration {
        serde_json::from_value(json!({"metadata": {"name": "c", "resourceVersion": "7"}, "webhooks": webhooks})).unwrap()
    };
    let webhook = |bundle: Value| json!([{"name": "inject.weightsync.dev", "clientConfig": {"caBundle": bundle}, "sideEffects": "None", "admissionReviewVersions": ["v1"]}]);
    // "PEM" and "old" in base64.
    for lacks in [Value::Null, json!("b2xk")] {
        let patch = bundle::change(&found(webhook(lacks)), "PEM").unwrap();
        let expected = json!({"metadata": {"resourceVersion": "7"}, "webhooks": [{"name": "inject.weightsync.dev", "clientConfig": {"caBundle": "UEVN"}}]});
        assert_eq!(patch, expected);
    }
    assert_eq!(bundle::change(&found(webhook(json!("UEVN"))), "PEM"), None, "it has it");
    assert_eq!(bundle::change(&found(json!([])), "PEM"), None, "the chart's webhook is not in it");
}

#[test]
fn settings_are_read_as_the_chart_writes_them() {
    let text = r#"{"imagePullSecrets":["registry"],"resources":{"limits":{},"requests":{"cpu":"100m"}},"sharedMemory":"8Gi"}"#;
    let settings: WebhookSettings = serde_json::from_str(text).unwrap();
    assert_eq!(settings.resources.requests.get("cpu").map(String::as_str), Some("100m"));
    assert_eq!((settings.shared_memory.as_deref(), settings.image_pull_secrets), (Some("8Gi"), vec!["registry".to_owned()]));
    assert!(serde_json::from_str::<WebhookSettings>(r#"{"resource":{}}"#).is_err(), "an unknown setting would do nothing");
}
