//! Watches that end because the server has forgotten what they know.

use serde_json::json;

use super::api_server::ApiServer;
use super::fixtures::{object, plain};
use crate::controller::metrics::ControllerMetrics;
use crate::controller::stores::Stores;
use weightsync_net::metrics::Metrics;
use weightsync_testkit::support::until;

/// As kube-apiserver answers, and as proxies do.
const GONE: [&str; 4] = [
    r#"{"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "too old resource version", "reason": "Expired", "code": 410}"#,
    "<html>410 Gone</html>",
    r#"{"error": "gone"}"#,
    "",
];

#[tokio::test(flavor = "multi_thread")]
async fn watch_that_begins_with_http_410_lists_again() {
    let server = ApiServer::new();
    server.put("weightsyncs", serde_json::to_value(object("a", 1)).unwrap());
    let stores = Stores::start(&server.client(), &[], &ControllerMetrics::new(&Metrics::default()));
    assert!(stores.synced().await);
    for (number, body) in GONE.into_iter().enumerate() {
        let (lists, name) = (server.calls("list", "pods"), format!("actor-{number}"));
        server.compact(body);
        server.put("pods", serde_json::to_value(plain(&name)).unwrap());
        let pod = || async { stores.scopes[0].pods_in("default").iter().any(|pod| pod.metadata.name.as_deref() == Some(&name)) };
        until(&format!("the pod to be known after {body:?}"), pod).await;
        assert_eq!(server.calls("list", "pods"), lists + 1, "{body:?}");
        // The next change comes by the watch.
        server.put("weightsyncs", json!(object(&name, 1)));
        until("the object to be known", || async { stores.scopes[0].objects_in("default").len() == number + 2 }).await;
    }
}
