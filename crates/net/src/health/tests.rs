use axum::body::{Body, to_bytes};
use axum::http::{Request, header};
use tower::ServiceExt;

use super::{Health, Metrics, alongside, is_local, router};

#[test]
fn only_the_loopback_interface_is_local() {
    for (address, local) in [
        ("127.0.0.1:1", true),
        ("[::1]:1", true),
        ("[::ffff:127.0.0.1]:1", true),
        // A mesh's proxy forwards requests of other pods from there.
        ("127.0.0.6:1", false),
        ("10.0.0.1:1", false),
        ("[::ffff:10.0.0.1]:1", false),
        ("0.0.0.0:1", false),
    ] {
        assert_eq!(is_local(address.parse().unwrap()), local, "{address}");
    }
}

#[test]
fn probes_are_on_the_port_after_the_pages() {
    for (status, probes) in [("0.0.0.0:8472", "0.0.0.0:8473"), ("127.0.0.1:0", "127.0.0.1:0"), ("[::]:65535", "[::]:0")] {
        assert_eq!(alongside(status.parse().unwrap()), probes.parse().unwrap(), "{status}");
    }
}

#[tokio::test]
async fn metrics_are_open_metrics_for_who_accepts_them() {
    let pages = router(Health::default(), Metrics::default());
    // As Prometheus 3 asks, and as curl does.
    let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1";
    for (accept, kind, first, last) in [
        (prometheus, "application/openmetrics-text; version=1.0.0; charset=utf-8", "# HELP weightsync_build ", "# EOF\n"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8", "# HELP weightsync_build_info ", "\n"),
    ] {
        let request = Request::get("/metrics").header(header::ACCEPT, accept).body(Body::empty()).unwrap();
        let response = pages.clone().oneshot(request).await.unwrap();
        assert_eq!(response.headers()[header::CONTENT_TYPE], kind);
        let text = String::from_utf8(to_bytes(response.into_body(), 1 << 20).await.unwrap().to_vec()).unwrap();
        assert!(text.starts_with(first) && text.ends_with(last), "{text}");
        assert_eq!(text.contains("# EOF"), accept == prometheus);
    }
}
