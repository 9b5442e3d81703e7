//! Injection as a whole controller does it: the webhook that the API server calls, and pods that got no agent.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::api_server::ApiServer;
use super::whole::{Controller, all_agents, cluster, condition, status};
use crate::controller::{Ui, WebhookSettings};

/// The certificate in the webhook's configuration, as PEM.
fn bundle(server: &ApiServer) -> Option<String> {
    let configuration = server.get("mutatingwebhookconfigurations", "", "weightsync-inject")?;
    let bundle = STANDARD.decode(configuration["webhooks"][0]["clientConfig"]["caBundle"].as_str()?).ok()?;
    String::from_utf8(bundle).ok()
}

#[tokio::test]
async fn webhook_is_reached_by_the_services_name_and_its_ca() {
    let server = cluster();
    let service = json!({"name": "weightsync", "namespace": "system", "port": 8443, "path": "/v1/inject"});
    let webhooks = json!([{"name": "inject.weightsync.dev", "clientConfig": {"service": service}, "sideEffects": "None", "admissionReviewVersions": ["v1"]}]);
    let settings: WebhookSettings = serde_json::from_value(json!({"imagePullSecrets": ["registry"]})).unwrap();
    let controller = Controller::start_at(&server, Ui::Local, "", Some(settings)).await;
    // helm makes it after the Deployment.
    server.until("a first look finds none", |server| server.calls("get", "mutatingwebhookconfigurations") > 0).await;
    server.put("mutatingwebhookconfigurations", json!({"metadata": {"name": "weightsync-inject"}, "webhooks": webhooks}));
    server.until("the configuration has the authority", |server| bundle(server).is_some()).await;
    let configuration = server.get("mutatingwebhookconfigurations", "", "weightsync-inject").unwrap();
    assert_eq!(configuration["webhooks"][0]["clientConfig"]["service"], service, "nothing else changed");

    // As the API server connects: by the Service's name, with the authority in the configuration, and without a certificate.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let authority = reqwest::Certificate::from_pem(bundle(&server).unwrap().as_bytes()).unwrap();
    let client = reqwest::Client::builder()
        .use_rustls_tls()
        .tls_built_in_root_certs(false)
        .add_root_certificate(authority)
        .resolve("weightsync.system.svc", controller.enroll.parse().unwrap())
        .no_proxy()
        .build()
        .unwrap();
    let port = controller.enroll.rsplit_once(':').unwrap().1;
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "labels": {"weightsync.dev/role": "rollout"}},
        "spec": {"containers": [{"name": "engine", "image": "any"}]}});
    let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": "CREATE", "userInfo": {}, "object": pod}});
    let asked = client.post(format!("https://weightsync.system.svc:{port}/v1/inject")).json(&review).send().await.unwrap();
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
    assert_eq!(ca["value"], bundle(&server).unwrap());
    assert_eq!(injected["spec"]["imagePullSecrets"], json!([{"name": "registry"}]));
    controller.stop().await;
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
