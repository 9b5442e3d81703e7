//! What simulated engines read is what is written for real ones.

mod fastdeploy;
mod traps;

use proptest::prelude::*;

use super::unpickle;
use weightsync_torch::pickle::Value;

fn value() -> impl Strategy<Value = Value> {
    let global = prop_oneof![Just(Value::Global("torch", "bfloat16")), Just(Value::Global("torch.storage", "TypedStorage"))];
    let leaf = prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::Bool),
        any::<u64>().prop_map(Value::Int),
        proptest::collection::vec(any::<u8>(), 0..400).prop_map(Value::Bytes),
        "\\PC{0,20}".prop_map(Value::Text),
        global.clone(),
    ];
    leaf.prop_recursive(4, 64, 6, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::Tuple),
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::List),
            proptest::collection::vec((inner.clone(), inner.clone()), 0..6).prop_map(Value::Dict),
            (global.clone(), proptest::collection::vec(inner.clone(), 0..6)).prop_map(|(name, with)| Value::Call(Box::new(name), with)),
            (global.clone(), inner).prop_map(|(name, state)| Value::Instance(Box::new(name), vec![("shape", state)])),
        ]
    })
}

proptest! {
    #[test]
    fn every_pickle_that_is_written_is_read_back(value in value()) {
        prop_assert_eq!(unpickle::read(&value.pickle()), Some(value));
    }

    #[test]
    fn nonsense_is_no_pickle_and_does_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut pickle = vec![0x80, 3];
        pickle.extend(bytes);
        unpickle::read(&pickle);
    }
}

/// Story F89.
#[test]
fn a_global_that_is_not_ours_is_refused_and_runs_nothing() {
    assert_eq!(unpickle::read(b"\x80\x03cos\nsystem\n(X\x02\x00\x00\x00lstR."), None);
}
