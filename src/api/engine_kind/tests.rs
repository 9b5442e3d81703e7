//! An engine that this file describes gets its rules, in the schema and in code, without a change anywhere else.

use kube::core::cel::Validator;
use serde_json::{Value, json};

use super::{EngineKind, rules};
use crate::api::{WeightSync, schema, validate};
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};
use weightsync_engine::{EngineDescriptor, Limit, connect};

const TOY: EngineDescriptor = EngineDescriptor {
    kind: "toy",
    api_kind: "Toy",
    port: 4000,
    needs: "a server of this test",
    limits: &[Limit {
        in_groups: false,
        pauses: &[PausePolicy::Keep],
        kv_caches: &[KvCachePolicy::Reset],
        cause: "the toy keeps requests and empties its cache",
        next_step: "set update.pause to Keep and update.kvCache to Reset",
    }],
    connect,
};

/// The schema with the rules of the toy engine.
fn with_toy() -> Value {
    let mut schema = schema().unwrap();
    let kinds = schema.pointer_mut("/properties/spec/properties/rollouts/items/properties/engine/properties/kind/enum").unwrap();
    kinds.as_array_mut().unwrap().push(json!(TOY.api_kind));
    let own = schema.pointer_mut("/properties/spec/x-kubernetes-validations").unwrap().as_array_mut().unwrap();
    own.extend(rules(&[&TOY]).iter().map(|rule| serde_json::to_value(rule).unwrap()));
    schema
}

#[test]
fn toy_engine_gets_the_same_rule_in_schema_and_code() {
    let schema = with_toy();
    for (pause, kv_cache, good) in [("Keep", "Reset", true), ("Abort", "Reset", false), ("Keep", "Keep", false)] {
        let mut object = crate::api::tests::least();
        object["spec"]["update"] = json!({"pause": pause, "kvCache": kv_cache});
        let mut typed: WeightSync = serde_json::from_value(object.clone()).unwrap();
        typed.spec.rollouts[0].engine.kind = EngineKind::from(&TOY);
        object["spec"]["rollouts"][0]["engine"]["kind"] = json!(TOY.api_kind);
        let refused = |message: &str| message.contains("the toy keeps requests and empties its cache");
        let cel = match Validator::new().validate(&schema, &object, None) {
            Ok(()) => Vec::new(),
            Err(errors) => errors.into_vec().into_iter().map(|error| error.message).collect(),
        };
        let code: Vec<String> = validate(&typed.spec).into_iter().map(|problem| problem.message).collect();
        assert_eq!((cel.is_empty(), code.is_empty()), (good, good), "{pause} {kv_cache}: {cel:?} {code:?}");
        assert!(cel.iter().chain(&code).all(|message| refused(message)), "{cel:?} {code:?}");
        assert_eq!(typed.spec.rollouts[0].engine.ports(), [i32::from(TOY.port)]);
    }
}
