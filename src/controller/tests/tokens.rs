//! Which tokens prove which pod, and who may write the epoch.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use super::api_server::projected_token;
use crate::controller::epoch_store::{Found, judge};
use crate::controller::token_review::{proven, says_so_itself};
use weightsync_core::protocol::EpochId;

fn review(change: impl Fn(&mut Value)) -> Result<(String, String, String), String> {
    let mut status = json!({
        "authenticated": true,
        "audiences": ["weightsync.dev"],
        "user": {
            "username": "system:serviceaccount:team:trainer",
            "extra": {
                "authentication.kubernetes.io/pod-name": ["actor-0"],
                "authentication.kubernetes.io/pod-uid": ["uid-0"],
            },
        },
    });
    change(&mut status);
    proven(&serde_json::from_value(status).unwrap()).map(|pod| (pod.namespace, pod.pod, pod.pod_uid))
}

#[test]
fn a_projected_token_proves_its_pod() {
    assert_eq!(review(|_| {}), Ok(("team".into(), "actor-0".into(), "uid-0".into())));
}

#[test]
fn invalid_or_unbound_token_proves_nothing() {
    let refused: [fn(&mut Value); 6] = [
        |status| status["authenticated"] = json!(false),
        |status| status["audiences"] = json!(["https://kubernetes.default.svc"]),
        // An API server that knows no audiences answers without them.
        |status| status["audiences"] = Value::Null,
        |status| status["user"]["username"] = json!("admin"),
        |status| status["user"]["username"] = json!("system:node:one:two"),
        |status| status["user"]["extra"] = json!({}),
    ];
    for change in refused {
        assert!(review(change).is_err());
    }
}

#[test]
fn token_that_names_another_pod_costs_no_review() {
    assert_eq!(says_so_itself(&projected_token("actor-0", "uid-0"), "uid-0"), Ok(()));
    assert!(says_so_itself(&projected_token("actor-0", "uid-0"), "uid-1").unwrap_err().contains("uid-1"));
    let of = |claims: Value| says_so_itself(&format!("head.{}.signature", URL_SAFE_NO_PAD.encode(claims.to_string())), "uid-0");
    let pod = json!({"pod": {"name": "actor-0", "uid": "uid-0"}});
    assert_eq!(of(json!({"aud": "weightsync.dev", "kubernetes.io": pod})), Ok(()));
    for audience in [json!(["https://kubernetes.default.svc"]), json!("weightsync"), json!(7), Value::Null] {
        assert!(of(json!({"aud": audience, "kubernetes.io": pod})).unwrap_err().contains("audience"), "{audience}");
    }
    assert!(of(json!({"aud": ["weightsync.dev"]})).is_err(), "of no pod");
    for garbage in ["", "a.b", "a.b.c", "a.b.c.d", "wst2-none", "head.e30.signature"] {
        assert!(says_so_itself(garbage, "uid-0").is_err(), "{garbage}");
    }
}

fn id(term: u64, epoch: u64) -> EpochId {
    EpochId { weightsync: "ws".into(), created: 1, term, epoch }
}

#[test]
fn an_epoch_is_written_over_older_ones_only() {
    assert_eq!(judge(0, 0, &id(3, 1)), Found::Write);
    assert_eq!(judge(6, 2, &id(3, 7)), Found::Write);
    assert_eq!(judge(7, 3, &id(3, 7)), Found::WrittenAlready);
    // A leader that was stopped in the middle of its write may come late with the same number.
    assert_eq!(judge(7, 2, &id(3, 7)), Found::Write);
    assert!(matches!(judge(8, 2, &id(3, 7)), Found::Conflict(_)));
    assert!(matches!(judge(8, 3, &id(3, 7)), Found::Conflict(_)));
    assert!(matches!(judge(7, 4, &id(3, 7)), Found::Conflict(_)), "agents that know it refuse ours");
    // Left from a Lease that is gone: anyone who leads now goes on above it.
    assert_eq!(judge(6, 4, &id(3, 7)), Found::Write);
}
