//! Every delivery gives the same bytes: for any model, each way into each engine serves what a fresh server on the checkpoint serves.

use std::time::Duration;

use proptest::prelude::*;

use crate::conformance::fixture::Fixture;
use crate::conformance::model::Model;
use crate::conformance::{Options, ways};
use weightsync_core::weights::Dtype;
use weightsync_engine::kinds;

/// Those that torch and Paddle both have a name for.
const DTYPES: [Dtype; 12] = [
    Dtype::BF16,
    Dtype::F16,
    Dtype::F32,
    Dtype::F64,
    Dtype::F8_E4M3,
    Dtype::F8_E5M2,
    Dtype::I8,
    Dtype::U8,
    Dtype::I16,
    Dtype::I32,
    Dtype::I64,
    Dtype::BOOL,
];

/// Up to ten tensors, scalars and empty ones among them; one has bytes, so that there is something to hand over.
fn model() -> impl Strategy<Value = Model> {
    let shape = proptest::collection::vec(0..9_u64, 0..4);
    let tensor = (proptest::sample::select(DTYPES.to_vec()), shape);
    (proptest::collection::vec(tensor, 0..10), proptest::sample::select(DTYPES.to_vec()), any::<bool>()).prop_map(
        |(tensors, dtype, tied)| {
            let named = |(index, (dtype, shape))| (format!("model.layers.{index}.weight"), dtype, shape);
            let mut tensors: Vec<_> = tensors.into_iter().enumerate().map(named).collect();
            tensors.push(("model.embed_tokens.weight".to_owned(), dtype, vec![17, 3]));
            if !tied {
                tensors.push(("lm_head.weight".to_owned(), dtype, vec![17, 3]));
            }
            Model { tensors, tied }
        },
    )
}

async fn serves_the_same(model: &Model) -> Result<(), TestCaseError> {
    let mut references = Vec::new();
    for engine in kinds() {
        let (patience, silence) = (Duration::from_secs(60), Duration::from_secs(1));
        let options = Options { engine: engine.to_owned(), live: None, patience, silence, sources: None, only_groups: false };
        for way in ways(engine) {
            let fixture = Fixture::simulated_with(&options, *way, model).await.unwrap();
            let adapter = fixture.adapter(&fixture.url).unwrap();
            adapter.probe(options.patience).await.unwrap();
            let installed = fixture.install(adapter.as_ref(), 2, options.patience).await;
            prop_assert!(installed.is_ok(), "{engine}, {way:?}: {}", installed.unwrap_err());
            let reference = fixture.reference(2).await.unwrap().unwrap();
            prop_assert_eq!(fixture.serves().await.unwrap(), reference.clone(), "{}, {:?}", engine, way);
            references.push(reference);
        }
    }
    references.dedup();
    prop_assert_eq!(references.len(), 1, "the same checkpoint is the same to every engine");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn every_delivery_gives_the_same_bytes_to_every_engine(model in model()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(serves_the_same(&model))?;
    }
}
