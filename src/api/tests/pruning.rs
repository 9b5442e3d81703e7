//! No field that the types write is dropped by an API server, and none is written as `null`.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use k8s_openapi::jiff::Timestamp;
use proptest::option::of;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::api::*;

const TEXT: &str = "[a-z]{1,8}";

fn selector() -> impl Strategy<Value = PodSelector> {
    let operator = prop::sample::select(vec![SelectorOperator::In, SelectorOperator::NotIn, SelectorOperator::Exists]);
    let requirement = (TEXT, operator, prop::collection::vec(TEXT, 0..3));
    let requirement = requirement.prop_map(|(key, operator, values)| SelectorRequirement { key, operator, values });
    (prop::collection::btree_map(TEXT, TEXT, 0..3), prop::collection::vec(requirement, 0..3))
        .prop_map(|(match_labels, match_expressions)| PodSelector { match_labels, match_expressions })
}

fn order() -> impl Strategy<Value = Order> {
    (of(TEXT), prop::collection::vec(TEXT, 0..3)).prop_map(|(label, names)| Order { label, names })
}

fn trainer() -> impl Strategy<Value = Trainer> {
    (selector(), of(order())).prop_map(|(selector, order)| Trainer { selector, order })
}

fn engine() -> impl Strategy<Value = Engine> {
    let kind = prop::sample::select(weightsync_engine::ENGINES.iter().map(|engine| EngineKind::from(*engine)).collect::<Vec<_>>());
    let key = of((TEXT, TEXT).prop_map(|(name, key)| SecretKey { name, key }));
    let discovery = prop::sample::select(vec![Discovery::Ports, Discovery::Registered]);
    let tensors = prop::collection::vec(TEXT, 0..3).prop_map(|ignore| EngineTensors { ignore });
    let ports = prop::collection::vec(1..65_536, 0..3);
    (kind, ports, discovery, tensors, key).prop_map(|(kind, ports, discovery, tensors, api_key_secret_ref)| Engine {
        max_registered: (discovery == Discovery::Registered).then_some(2),
        kind,
        ports,
        discovery,
        tensors,
        api_key_secret_ref,
    })
}

fn pool() -> impl Strategy<Value = Pool> {
    let replica = (1..9, TEXT, prop::collection::btree_map(TEXT, TEXT, 0..3));
    let replica = replica.prop_map(|(pods, group_label, head_labels)| Replica { pods, group_label, head_labels });
    (TEXT, selector(), engine(), 1..9, replica, of(order())).prop_map(|(name, selector, engine, ranks, replica, order)| Pool {
        name,
        selector,
        engine,
        ranks,
        replica,
        order,
    })
}

fn transport() -> impl Strategy<Value = Transport> {
    let kind = prop::sample::select(vec![TransportType::Auto, TransportType::Tcp, TransportType::Nccl, TransportType::Gdr]);
    let env = prop::collection::btree_map(TEXT, TEXT, 0..3);
    let preflight = prop::sample::select(vec![Preflight::Auto, Preflight::Off]);
    (kind, of(any::<bool>()), of(1..99), env, any::<bool>(), of(preflight)).prop_map(
        |(kind, tls, bucket_mib, nccl_env, allow_tcp, preflight)| Transport { kind, tls, bucket_mib, nccl_env, allow_tcp, preflight },
    )
}

prop_compose! {
    fn spec()(
        trainer in trainer(),
        rollouts in prop::collection::vec(pool(), 0..3),
        transport in transport(),
        suspend in any::<bool>(),
        [period_seconds, timeout_seconds, failure_threshold, keep] in [1..99, 1..99, 1..99, 1..99],
        min_ready in prop_oneof![(1..9).prop_map(IntOrString::Int), TEXT.prop_map(IntOrString::String)],
        (on_wedged, digest) in (prop::sample::select(vec![OnWedged::Report, OnWedged::RestartPod]), prop::sample::select(vec![Digest::Blake3, Digest::Xxh3])),
        delivery in prop::sample::select(vec![Delivery::Agent, Delivery::Engine, Delivery::External]),
        join in prop::sample::select(vec![Join::Immediate, Join::NextVersion]),
        pause in prop::sample::select(vec![Pause::Keep, Pause::Drain, Pause::Abort, Pause::AbortAwake, Pause::External]),
        kv_cache in prop::sample::select(vec![KvCache::Keep, KvCache::Reset]),
        retain in of(0_i64..99),
        launch in prop::sample::select(vec![Launch::Sidecar, Launch::Wrap, Launch::Ephemeral, Launch::External]),
        [target_version, max_skew] in [of(0_i64..9), of(0_i64..9)],
        max_unavailable in of(prop_oneof![(1..9).prop_map(IntOrString::Int), TEXT.prop_map(IntOrString::String)]),
        canary in of((TEXT, 1..9, -9_i32..0)),
        before in prop::sample::select(vec![BeforeFirstVersion::Serve, BeforeFirstVersion::Hold]),
    ) -> WeightSyncSpec {
        WeightSyncSpec {
            suspend,
            target_version,
            canary: canary.map(|(prompt, max_tokens, least)| Canary {
                prompt,
                max_tokens,
                min_log_prob: IntOrString::Int(least),
            }),
            trainer,
            rollouts,
            delivery,
            transport,
            health: Health { period_seconds, timeout_seconds, failure_threshold },
            membership: Membership { min_ready, max_unavailable, max_skew, keep, join },
            update: Update {
                pause,
                kv_cache,
                timeout_seconds,
                silence_seconds: period_seconds,
                retain_mib: retain,
                digest,
                on_wedged,
            },
            agent: Agent { launch },
            readiness: Readiness { before_first_version: before },
        }
    }
}

prop_compose! {
    fn member()(
        name in TEXT,
        pods in prop::collection::vec(TEXT, 0..3),
        rank_offset in of(0..9),
        state in prop::sample::select(vec![MemberStateName::Ready, MemberStateName::Out, MemberStateName::Dirty]),
        (version, proven_by) in (of(0_i64..9), of(prop::sample::select(vec![ProofName::Digests, ProofName::Engine, ProofName::Nothing]))),
        (paused, transfer, library) in (of(0_i64..9), of((TEXT, TEXT, 0_i64..9)), of(TEXT)),
        retained in prop::collection::vec(0_i64..9, 0..3),
        message in "[a-z]{0,4}",
    ) -> MemberStatus {
        let paused_until = paused.map(|seconds| Time(Timestamp::from_second(seconds).unwrap()));
        let last_transfer = transfer.map(|(from, transport, number)| TransferStatus {
            version: number,
            from,
            transport,
            bytes: number,
            milliseconds: number,
            bytes_per_second: number,
        });
        let gdr = library.map(|library| GdrStatus {
            version: version.map(|version| version.to_string()),
            plugin: library.clone(),
            transports: pods.clone(),
            devices: vec![GdrDevices { memory: library.clone(), names: pods.clone() }],
            library,
        });
        let reason = "MemberReady".to_owned();
        MemberStatus { name, pods, rank_offset, size: 1, state, version, proven_by, retained, paused_until, last_transfer, gdr, reason, message }
    }
}

prop_compose! {
    fn preflight()(
        [state, transport, request] in [TEXT, TEXT, "[a-z]{0,4}"],
        [bytes_per_second, round_trip_microseconds, clock_milliseconds] in [of(0_i64..9), of(0_i64..9), of(-9_i64..9)],
        mtu in of(0..9),
        verdict in prop::sample::select(vec![EdgeVerdict::Good, EdgeVerdict::Slow, EdgeVerdict::Broken, EdgeVerdict::Unmeasured]),
        names in prop::collection::vec((TEXT, TEXT, "[a-z]{0,4}"), 0..3),
    ) -> PreflightStatus {
        let edge = |(from, to, message): (String, String, String)| EdgeStatus {
            from_node: from.clone(),
            to_node: to.clone(),
            from,
            to,
            verdict,
            bytes_per_second,
            round_trip_microseconds,
            mtu,
            clock_milliseconds,
            message,
        };
        let edges = names.into_iter().map(edge).collect();
        PreflightStatus { state, transport, request, measured: 3, milliseconds: 4, edges }
    }
}

prop_compose! {
    fn status()(
        [observed_generation, epoch, term, version] in [of(0_i64..9), of(0_i64..9), of(0_i64..9), of(0_i64..9)],
        world_size in of(0..9),
        manifest in of(TEXT),
        (transport, preflight) in (of((TEXT, TEXT)), of(preflight())),
        update in of((TEXT, of(TEXT), any::<bool>(), prop::collection::vec((TEXT, 0_i64..9), 0..3))),
        counts in of((0_u32..9, 0_u32..9)),
        members in prop::collection::vec(member(), 0..3),
        trainer in of((TEXT, TEXT)),
        conditions in prop::collection::vec((TEXT, of(0_i64..9)), 0..3),
        refused in prop::collection::vec(0_i64..9, 0..3),
    ) -> WeightSyncStatus {
        WeightSyncStatus {
            observed_generation,
            conditions: conditions
                .into_iter()
                .map(|(word, observed_generation)| Condition {
                    last_transition_time: Time(Timestamp::UNIX_EPOCH),
                    message: word.clone(),
                    observed_generation,
                    reason: word.clone(),
                    status: "True".to_owned(),
                    type_: word,
                })
                .collect(),
            epoch,
            term,
            world_size,
            transport: transport.map(|(name, reason)| TransportStatus { name, reason }),
            preflight,
            version,
            manifest,
            rolled_back_from: term,
            refused,
            last_update: update.map(|(state, failure, feeding, phases)| LastUpdate {
                version: 3,
                attempt: 1,
                state,
                bytes: 5,
                feeding,
                phases: phases.into_iter().map(|(name, milliseconds)| PhaseTime { name, milliseconds }).collect(),
                failure,
            }),
            replicas: counts.map(|(ready, total)| ReplicaCount::new(ready, total)),
            members,
            trainer: trainer.map(|(pod, uid)| TrainerStatus { pod, uid }),
        }
    }
}

fn nulls(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.iter().any(nulls),
        Value::Object(fields) => fields.values().any(nulls),
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_the_types_write_is_what_an_api_server_keeps(spec in spec(), status in of(status())) {
        let mut object = WeightSync::new("grpo", spec);
        object.status = status;
        let mut written = serde_json::to_value(&object).unwrap();
        // The types of Kubernetes write an empty metadata field or none; they are not ours to judge.
        written["metadata"] = json!({"name": "grpo"});
        let schema = schema().unwrap();
        prop_assert_eq!(unknown_fields(&schema, &written), Vec::<String>::new());
        prop_assert_eq!(&prune(&schema, &written), &written);
        prop_assert!(!nulls(&written), "{}", written);
        prop_assert_eq!(serde_json::from_value::<WeightSync>(written).unwrap(), object);
    }
}

#[test]
fn unknown_field_is_dropped_and_named_by_its_path() {
    let mut object = super::least();
    object["spec"]["rolouts"] = json!([]);
    object["spec"]["rollouts"][0]["engine"]["prots"] = json!([1]);
    let schema = schema().unwrap();
    assert_eq!(
        unknown_fields(&schema, &object),
        ["spec.rolouts", "spec.rollouts[0].engine.prots"]
            .map(str::to_owned)
            .into_iter()
            .rev()
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .collect::<Vec<_>>()
    );
    assert_eq!(prune(&schema, &object), super::least());
    let labels = BTreeMap::from([("any.key/at-all".to_owned(), "kept".to_owned())]);
    object["spec"]["trainer"]["selector"]["matchLabels"] = json!(labels);
    assert_eq!(prune(&schema, &object)["spec"]["trainer"]["selector"]["matchLabels"], json!(labels));
}
