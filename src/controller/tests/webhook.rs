//! Injection as a whole controller does it: the webhook that the API server calls, and pods that got no agent.

use std::path::Path;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;

use super::api_server::ApiServer;
use super::whole::{Controller, all_agents, cluster, condition, status};
use crate::controller::calls::Calls;
use crate::controller::metrics::ControllerMetrics;
use crate::controller::webhook::{Served, judge, keep};
use crate::controller::{Injection, Ui, WebhookSettings};
use weightsync_net::identity::{Ca, Identity, Made};
use weightsync_net::metrics::Metrics;
use weightsync_testkit::support::until;

const NAME: &str = "weightsync.system.svc";

/// What the Secret's volume has.
fn mounted(folder: &Path, made: &Made) {
    for (name, text) in [("ca.crt", &made.authority), ("tls.crt", &made.chain), ("tls.key", &made.key)] {
        std::fs::write(folder.join(name), text).unwrap();
    }
}

/// The chart's configuration with this bundle.
fn configuration(bundle: &str) -> Value {
    let service = json!({"name": "weightsync", "namespace": "system", "port": 8443, "path": "/v1/inject"});
    let client = json!({"service": service, "caBundle": STANDARD.encode(bundle)});
    let webhooks =
        json!([{"name": "inject.weightsync.dev", "clientConfig": client, "sideEffects": "None", "admissionReviewVersions": ["v1"]}]);
    json!({"metadata": {"name": "weightsync-inject"}, "webhooks": webhooks})
}

/// As the API server connects: by the Service's name, with that authority, and without a certificate.
fn api_server(authority: &str, controller: &Controller) -> reqwest::Client {
    reqwest::Client::builder()
        .use_rustls_tls()
        .tls_built_in_root_certs(false)
        .add_root_certificate(reqwest::Certificate::from_pem(authority.as_bytes()).unwrap())
        .resolve(NAME, controller.enroll.parse().unwrap())
        .no_proxy()
        .build()
        .unwrap()
}

async fn until_trusted(controller: &Controller, trusted: u8) {
    let line = format!("weightsync_webhook_trusted {trusted}\n");
    until(&format!("the metric to say {trusted}"), || async { controller.page("/metrics").await.1.contains(&line) }).await;
}

#[tokio::test]
async fn webhook_is_reached_by_the_services_name_and_its_ca() {
    let server = cluster();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let made = Made::new(NAME, Duration::from_secs(3650 * 86400)).unwrap();
    mounted(folder.path(), &made);
    let lines: WebhookSettings = serde_json::from_value(json!({"imagePullSecrets": ["registry"]})).unwrap();
    let injection = Injection { lines, certificate: folder.path().to_owned() };
    server.put("mutatingwebhookconfigurations", configuration(&made.authority));
    let controller = Controller::start_at(&server, Ui::Local, "", Some(injection)).await;
    until_trusted(&controller, 1).await;
    let client = api_server(&made.authority, &controller);
    let port = controller.enroll.rsplit_once(':').unwrap().1;
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "labels": {"weightsync.dev/role": "rollout"}},
        "spec": {"containers": [{"name": "engine", "image": "any"}]}});
    let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": "CREATE", "userInfo": {}, "object": pod}});
    let asked = client.post(format!("https://{NAME}:{port}/v1/inject")).json(&review).send().await.unwrap();
    let answer: Value = asked.json().await.unwrap();
    assert_eq!((&answer["response"]["uid"], &answer["response"]["allowed"]), (&json!("u"), &json!(true)), "{answer}");
    let patch = STANDARD.decode(answer["response"]["patch"].as_str().unwrap()).unwrap();
    let mut injected = pod;
    json_patch::patch(&mut injected, &serde_json::from_slice::<json_patch::Patch>(&patch).unwrap()).unwrap();
    let sidecar = &injected["spec"]["initContainers"][0];
    assert_eq!(
        (&sidecar["name"], &sidecar["image"], &sidecar["imagePullPolicy"]),
        (&json!("weightsync-agent"), &json!("ours:1"), &json!("Never"))
    );
    let ca = sidecar["env"].as_array().unwrap().iter().find(|entry| entry["name"] == "WEIGHTSYNC_CONTROLLER_CA").unwrap();
    let authority = server.get("configmaps", "system", "weightsync-ca").unwrap()["data"]["ca.crt"].clone();
    assert_eq!(ca["value"], authority, "agents trust the operator's authority, which signs no webhook");
    assert_ne!(ca["value"], made.authority.as_str());
    assert_eq!(injected["spec"]["imagePullSecrets"], json!([{"name": "registry"}]));
    controller.stop().await;
}

#[test]
fn configuration_is_judged_as_the_api_server_would() {
    let (made, other) = (Made::new(NAME, Duration::from_secs(60 * 86400)).unwrap(), Made::new(NAME, Duration::from_secs(60)).unwrap());
    let found = |value: Value| serde_json::from_value::<MutatingWebhookConfiguration>(value).unwrap();
    let judged = |value: Value, days: u64| {
        let at = SystemTime::now() + Duration::from_secs(days * 86400);
        judge(&found(value), "weightsync-inject", &made.chain, NAME, at).map_err(|error| error.to_string())
    };
    let both = format!("{}{}", other.authority, made.authority);
    for bundle in [&made.authority, &both] {
        assert_eq!(judged(configuration(bundle), 0), Ok(()));
    }
    let mut without = configuration("");
    without["webhooks"][0]["clientConfig"]["caBundle"] = Value::Null;
    let none = json!({"metadata": {"name": "weightsync-inject"}, "webhooks": []});
    for (value, days, part) in [
        (configuration(&other.authority), 0, "does not trust the webhook's certificate"),
        (configuration("no PEM"), 0, "does not trust the webhook's certificate"),
        (without, 0, "has no caBundle"),
        (none, 0, "has no webhook"),
        (configuration(&made.authority), 45, "ends within 30 days"),
        (configuration(&made.authority), 61, "does not trust the webhook's certificate"),
    ] {
        let error = judged(value, days).unwrap_err();
        assert!(error.contains(part) && error.contains("helm upgrade"), "{part}: {error}");
    }
}

/// The fake API server refuses every call that the chart does not grant: a write to the configuration is one.
#[tokio::test(start_paused = true)]
async fn stale_bundle_is_reported_and_never_written() {
    let server = cluster();
    let folder = tempfile::tempdir().unwrap();
    let made = Made::new(NAME, Duration::from_secs(3650 * 86400)).unwrap();
    let identity = Identity::new(Ca::generate().unwrap().certificate_pem()).unwrap();
    let metrics = ControllerMetrics::new(&Metrics::default());
    let (name, of) = (NAME.to_owned(), "weightsync-inject".to_owned());
    let served = Served { folder: folder.path().to_owned(), name, configuration: of };
    let _keeping = AbortOnDropHandle::new(tokio::spawn(keep(served, identity, server.client(), Calls, metrics.clone())));
    let trusted = async |trusted: i64| {
        until(&format!("the metric to say {trusted}"), || async { metrics.webhook_trusted.get() == trusted }).await;
    };
    mounted(folder.path(), &made);
    server.put("mutatingwebhookconfigurations", configuration(&made.authority));
    trusted(1).await;
    let other = Made::new(NAME, Duration::from_secs(3650 * 86400)).unwrap();
    server.put("mutatingwebhookconfigurations", configuration(&other.authority));
    trusted(0).await;
    // helm upgrade brings both.
    mounted(folder.path(), &other);
    trusted(1).await;
    assert_eq!(server.calls("patch", "mutatingwebhookconfigurations") + server.calls("update", "mutatingwebhookconfigurations"), 0);
}

#[tokio::test]
async fn pod_that_was_not_injected_is_named_in_status() {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let message = |server: &ApiServer| {
        let conditions = status(server)["conditions"].as_array().cloned().unwrap_or_default();
        let degraded = conditions.iter().find(|condition| condition["type"] == "Degraded").cloned().unwrap_or_default();
        degraded["message"].as_str().unwrap_or_default().to_owned()
    };
    let named = |server: &ApiServer| {
        let message = message(server);
        ["pod actor-0 has the label and no agent", "pod actor-1", "recreate it"].iter().all(|part| message.contains(part))
    };
    server.until("the pods are named with the next step", named).await;
    assert_eq!(condition(&server, "Degraded"), ("True".into(), "AgentMissing".into()));
    // Agents that came in another way are no problem.
    let _agents = all_agents(&server, &controller).await;
    server.until("they are named no more", |server| !message(server).contains("has the label and no agent")).await;
    controller.stop().await;
}
