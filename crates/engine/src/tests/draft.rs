//! Draft models: which server can load one by which route, and the session for each of the two models.

use serde_json::{Value, json};

use super::group::{self, received_of};
use super::host::{Version, bench};
use super::support::{Bench, SOON, held};
use crate::{DraftWay, Holding};
use weightsync_core::protocol::Rendezvous;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Dtype, Layout, Section, TensorSpec};
use weightsync_testkit::simulator::{Fault, FaultRule, Faults};

async fn drafting() -> Bench {
    bench(|options| (options.draft, options.world_size) = (Some(options.model.clone()), 2)).await
}

/// A version whose draft model is that of another version.
fn both(bench: &Bench, model: u64, draft: u64) -> Version {
    let open = |version| Checkpoint::open(&bench.directory(version)).unwrap();
    Version::from(open(model).with_draft(open(draft)), model)
}

async fn served(bench: &Bench) -> (String, Value) {
    (bench.digest().await, bench.get("/simulator/digest").await["draft"].clone())
}

/// What a server serves with the models of these versions.
async fn expected(bench: &Bench, model: u64, draft: u64) -> (String, Value) {
    (bench.fresh_digest(model).await, bench.fresh(draft).await["tensors"].clone())
}

#[tokio::test]
async fn each_model_has_its_own_session_from_any_memory() {
    let bench = drafting().await;
    both(&bench, 2, 3).install(&bench).await.unwrap();
    assert_eq!(served(&bench).await, expected(&bench, 2, 3).await);
    assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::Version(held(2)));

    // One place for all tensors: each is copied before the next one is described.
    let version = both(&bench, 3, 2);
    let mut install = bench.engine.begin_host(&version.job()).await.unwrap();
    for index in 0..version.layout.entries.len() {
        let mut bucket = version.bucket(index, install.digest(), Some(0));
        bucket.copy = true;
        install.bucket(bucket).await.unwrap();
        let before = u32::try_from(index).unwrap();
        assert_eq!(install.taken(before).await.unwrap(), before + 1);
    }
    install.finish(held(3)).await.unwrap();
    assert_eq!(served(&bench).await, expected(&bench, 3, 2).await);
    assert!(!bench.is_paused().await);
}

#[tokio::test]
async fn engine_lost_between_two_sessions_holds_half_an_update() {
    let bench = drafting().await;
    let rule = FaultRule { path: "/start_draft_weight_update".into(), after: 0, times: Some(1), fault: Fault::Disconnect };
    bench.set_faults(Faults { rules: vec![rule], ..Faults::default() }).await;
    let error = both(&bench, 2, 3).install(&bench).await.unwrap_err();
    assert!(error.is_dirty() && bench.is_paused().await, "{error}");
    assert_eq!(bench.engine.holding(SOON).await.unwrap(), Holding::HalfAnUpdate(held(2)));
    both(&bench, 3, 2).install(&bench).await.unwrap();
    assert_eq!(served(&bench).await, expected(&bench, 3, 2).await);
}

#[tokio::test]
async fn who_takes_a_draft_model_is_known_before_a_byte_moves() {
    let draft = |bench: &Bench| Checkpoint::open(&bench.directory(2)).unwrap().specs();
    let with = drafting().await;
    let takes = async |bench: &Bench, way| match bench.engine.takes_draft(way, draft(bench), SOON).await {
        Ok(()) => String::new(),
        Err(error) => error.to_string(),
    };
    assert_eq!(takes(&with, DraftWay::HostMemory).await, "");
    assert_eq!(takes(&with, DraftWay::Group).await, "");
    assert!(takes(&with, DraftWay::Other).await.contains("set spec.delivery to Engine"));
    let mut lacking = draft(&with);
    lacking.pop();
    let lacks = with.engine.takes_draft(DraftWay::Group, lacking, SOON).await.unwrap_err().to_string();
    assert!(lacks.contains("lacks norm.weight"), "{lacks}");
    let without = bench(|_| {}).await;
    assert!(takes(&without, DraftWay::HostMemory).await.contains("--speculative-config"));
    let sglang = Bench::start_with("sglang", Faults::default(), |options| options.draft = Some(options.model.clone())).await;
    assert_eq!(takes(&sglang, DraftWay::Group).await, "");
    assert!(takes(&sglang, DraftWay::Other).await.contains("does not take from a directory"));
    assert!(takes(&Bench::start("sglang").await, DraftWay::Group).await.contains("--speculative-draft-model-path"));
    for kind in ["lmdeploy", "fastdeploy"] {
        assert!(takes(&Bench::start(kind).await, DraftWay::Group).await.contains("weightsync.with_draft"), "{kind}");
    }
}

#[tokio::test]
async fn group_sends_the_model_first_and_names_each_buckets_model() {
    let tensor = |section| TensorSpec { section, ..TensorSpec::new("w".into(), Dtype::BF16, vec![64]) };
    let layout = Layout::new("model", vec![tensor(Section::Model), tensor(Section::Draft)], 0).unwrap().cut_between_tensors();
    let (server, engine) = group::engine("vllm").await;
    received_of(&engine, Rendezvous::UniqueId, layout.clone()).await.unwrap();
    let sessions: Vec<_> = server.posts().into_iter().filter(|path| path.contains("update")).collect();
    let one = |start: &str| [start.to_owned(), "/update_weights".to_owned(), "/finish_weight_update".to_owned()];
    assert_eq!(sessions, [one("/start_weight_update"), one("/start_draft_weight_update")].concat());

    let (server, engine) = group::engine("sglang").await;
    received_of(&engine, Rendezvous::Store, layout).await.unwrap();
    let selectors: Vec<_> = server.bodies("/update_weights_from_distributed").iter().map(|body| body["selector"].clone()).collect();
    assert_eq!(selectors, [json!("target"), json!("draft")]);
    assert_eq!(server.bodies("/begin_weight_update"), [json!({"selector": "all"})]);
}
