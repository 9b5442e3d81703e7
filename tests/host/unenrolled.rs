//! A trainer whose agent reaches no controller.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::process::Command;
use weightsync_net::identity::Ca;

use crate::model::Model;
use crate::world::{PROGRAM, SOON};

#[tokio::test(flavor = "multi_thread")]
async fn publish_without_a_controller_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("@weightsync/unenrolled-{}", std::process::id());
    // Bound and closed: nothing listens there.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let environment = [
        ("WEIGHTSYNC_ROLE", "trainer".to_owned()),
        ("POD_NAME", "t".to_owned()),
        ("POD_UID", format!("unenrolled-{}", std::process::id())),
        ("POD_IP", "127.0.0.1".to_owned()),
        ("WEIGHTSYNC_CONTROLLER_URL", closed.to_string()),
        ("WEIGHTSYNC_CONTROLLER_CA", Ca::generate().unwrap().certificate_pem().to_owned()),
        ("WEIGHTSYNC_TOKEN", "t".to_owned()),
        ("WEIGHTSYNC_SOCKET", socket.clone()),
        ("WEIGHTSYNC_STATUS_ADDRESS", "127.0.0.1:0".to_owned()),
        ("WEIGHTSYNC_VERSION_DIR", folder.path().join("versions").to_string_lossy().into_owned()),
        ("WEIGHTSYNC_GPUS", "none".to_owned()),
    ];
    let mut agent = Command::new(PROGRAM);
    let _agent = agent.arg("agent").envs(environment).stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true).spawn().unwrap();
    let checkpoint = Model::small(1).save(&folder.path().join("v1"));
    let published = async {
        loop {
            let mut publish = Command::new(PROGRAM);
            publish.arg("publish").arg(&checkpoint).args(["--version", "1", "--socket", &socket, "--output", "json", "--timeout", "2"]);
            let output = publish.stdin(Stdio::null()).kill_on_drop(true).output().await.unwrap();
            let outcome: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            // The agent may not listen yet.
            if outcome["error"]["code"] != json!("AgentLost") {
                return (output.status.code(), outcome["error"].clone());
            }
        }
    };
    let (code, error) = tokio::time::timeout(SOON, published).await.expect("a publish ends");
    assert_eq!((code, &error["code"]), (Some(75), &json!("NotEnoughReplicas")), "{error}");
    let message = error["message"].as_str().unwrap();
    for word in ["not enrolled", &closed.to_string(), "Connection refused", "check that the controller runs"] {
        assert!(message.contains(word), "{word}: {message}");
    }
    assert!(!message.contains("earlier publish"), "{message}");
}
