//! Replies of an engine, spoiled at random: every call ends in time with an answer or an error, and an install that is reported is served.
//! `make fuzz` runs this for a long time.

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use super::support::{Bench, ended_by};
use crate::Settling;
use weightsync_testkit::simulator::{Fault, FaultRule, Faults};

/// The paths that the adapters call, and all of them at once.
const PATHS: [&str; 20] = [
    "*",
    "/health",
    "/version",
    "/server_info",
    "/model_info",
    "/weight_info",
    "/metrics",
    "/flush_cache",
    "/v1/models",
    "/pause",
    "/resume",
    "/is_paused",
    "/collective_rpc",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/v1/completions",
    "/generate",
    "/weights_checker",
];

/// Each case starts a server, so there are fewer than usual, unless `make fuzz` requests more.
fn config() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse::<u32>().ok());
    ProptestConfig { cases: asked.map_or(24, |cases| cases / 20), max_shrink_iters: 40, ..ProptestConfig::default() }
}

fn bodies() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,10}".prop_map(Value::from),
    ];
    let word = select(vec![
        "success",
        "message",
        "status",
        "results",
        "error",
        "is_paused",
        "version",
        "data",
        "weight_version",
        "choices",
        "tp_size",
        "dp_size",
    ]);
    let nested = scalar.prop_recursive(3, 12, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(word.clone().prop_map(str::to_owned), inner, 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    });
    prop_oneof![
        4 => nested,
        1 => Just(json!({"success": true, "message": "", "results": [null], "status": "ok"})),
        1 => Just(json!({"is_paused": false})),
    ]
}

fn rules() -> impl Strategy<Value = FaultRule> {
    let status = select(vec![200_u16, 200, 200, 201, 400, 404, 500, 503]);
    let spoiled = (status, bodies()).prop_map(|(status, body)| Fault::Answer { status, body });
    let fault = prop_oneof![6 => spoiled, 1 => Just(Fault::Disconnect), 1 => Just(Fault::LoseReply)];
    (select(PATHS.to_vec()), 0_u32..4, prop::option::of(1_u32..4), fault).prop_map(|(path, after, times, fault)| FaultRule {
        path: path.to_owned(),
        after,
        times,
        fault,
    })
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_engine_answer_ends_in_time_and_reports_are_true(
        kind in select(vec!["vllm", "sglang"]), rules in prop::collection::vec(rules(), 1..3),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let bench = Bench::start(kind).await;
            bench.set_faults(Faults { rules, ..Faults::default() }).await;
            let limit = Duration::from_secs(2);
            let _ = ended_by(limit, bench.engine.probe(limit)).await;
            let _ = ended_by(limit, bench.engine.health(limit)).await;
            let _ = ended_by(limit, bench.engine.holding(limit)).await;
            let mut job = bench.job(2);
            job.terms.timeout = limit;
            let installed = ended_by(limit, bench.engine.install(&job)).await;
            let _ = ended_by(limit, bench.engine.settle(&Settling::LEFT_PAUSED, limit)).await;
            bench.set_faults(Faults::default()).await;
            if installed.is_ok() {
                prop_assert_eq!(bench.digest().await, bench.fresh_digest(2).await, "reported and not served");
            }
            Ok(())
        })?;
    }
}
