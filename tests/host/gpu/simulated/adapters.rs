//! The adapters as they lead simulated engines through groups of which two claim one engine, or whose two ends do not find each other.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use weightsync_core::protocol::worker::{NcclId, Proof};
use weightsync_core::protocol::{GroupPlace, HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_core::weights::Layout;
use weightsync_engine::{DeviceBucket, DeviceJob, Engine, EngineConfig, GroupJoin, InstallError, InstallTerms, connect};
use weightsync_torch::store::nccl_id_keys;

use super::{A_WHILE, Bed, model};
use crate::model::Model;
use crate::world::SOON;

fn engine(bed: &Bed, kind: &str) -> Arc<dyn Engine> {
    let config = EngineConfig {
        kind: kind.to_owned(),
        url: bed.engine.url(),
        api_key: None,
        served_model: Some(bed.checkpoint.path().to_owned()),
        record: None,
        processes: PathBuf::from("/proc"),
        unproven_routes: false,
    };
    connect(config).unwrap()
}

/// Two buckets of two tensors.
fn job(bed: &Bed, model: &Model, silence: Duration) -> DeviceJob {
    DeviceJob {
        terms: InstallTerms {
            version: InstallTerms::mark(7, None),
            pause: PausePolicy::Abort,
            kv_cache: KvCachePolicy::Reset,
            canary: None,
            timeout: SOON,
            cancel: CancellationToken::new(),
        },
        layout: Arc::new(Layout::new("model", model.specs(), 128 << 10).unwrap().cut_between_tensors()),
        silence,
        sockets: bed.checkpoint.path().join("s"),
        sockets_in_engine: bed.checkpoint.path().join("s"),
    }
}

/// Brings rank 0 and the engine into a group; engines on torch only meet at the store.
async fn join(bed: &Bed, engine: &dyn Engine, number: u64) -> NcclId {
    let name = format!("weightsync-{number}");
    let id = bed.publish_id(&name).await;
    let by_id = engine.kind() == "vllm";
    let store = GroupPlace::Store { address: "127.0.0.1".into(), port: bed.store.address().port() };
    let place = if by_id { GroupPlace::UniqueId { id } } else { store };
    let join = GroupJoin { name, place, offset: 1, world: bed.world() };
    let group = engine.group().unwrap();
    let joined = tokio::join!(group.join(&join, SOON), async {
        if by_id {
            bed.join(number, id, Proof::AllReduce).await;
        }
    });
    joined.0.unwrap();
    id
}

/// An update in that group; `makes`: rank 0's communicator is made with the first bucket.
async fn update(bed: &Bed, engine: &dyn Engine, model: &Model, (number, makes): (u64, Option<NcclId>)) -> Result<(), InstallError> {
    let job = job(bed, model, SOON);
    let mut install = engine.group().unwrap().begin(&job, watch::Sender::new(None).subscribe()).await?;
    install.open().await?;
    for (bucket, first) in job.layout.buckets().zip([0, 2]) {
        let send = async {
            if let Some(id) = makes.filter(|_| first == 0) {
                bed.join(number, id, Proof::Nothing).await;
            }
            bed.send(number, &[model.bytes(first), model.bytes(first + 1)].concat()).await;
        };
        tokio::join!(install.bucket(DeviceBucket { bucket, places: Vec::new(), sums: Vec::new() }), send).0?;
    }
    install.finish(HeldVersion { version: 7, manifest: "7".repeat(64) }).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn f07_a_second_source_gets_a_group_of_its_own_and_what_the_first_sends_reaches_nobody() {
    for kind in ["vllm", "sglang"] {
        let bed = Bed::new(kind, 1).await;
        let engine = engine(&bed, kind);
        let stands = kind == "vllm";
        let first = join(&bed, engine.as_ref(), 1).await;
        let second = join(&bed, engine.as_ref(), 2).await;
        // The first is told by its own deadline, and holds nobody up.
        let alone = async {
            if stands {
                let slot = bed.zero.ring.take(SOON).await.unwrap();
                bed.zero.broadcast(1, &slot, 64, A_WHILE).await.map(drop)
            } else {
                bed.zero.worker.join_as(1, first, (0, bed.world()), Proof::Nothing, A_WHILE).await.map(drop)
            }
        };
        assert!(alone.await.is_err(), "{kind}");
        let new = model(7);
        update(&bed, engine.as_ref(), &new, (2, (!stands).then_some(second))).await.unwrap();
        assert!(bed.serves(&new).await, "{kind}");
        bed.abort(2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn f08_ranks_that_look_under_another_name_cost_the_deadline_and_the_store_knows_that_they_never_asked() {
    let bed = Bed::with("sglang", 1, |options| options.groups.as_mut().unwrap().patience = 4 * A_WHILE).await;
    let engine = engine(&bed, "sglang");
    // The id lies where a group of another name looks.
    bed.publish_id("default_pg").await;
    let place = GroupPlace::Store { address: "127.0.0.1".into(), port: bed.store.address().port() };
    let named = GroupJoin { name: "weightsync-1".into(), place, offset: 1, world: bed.world() };
    engine.group().unwrap().join(&named, SOON).await.unwrap();
    let new = model(7);
    let job = job(&bed, &new, 2 * A_WHILE);
    let mut install = engine.group().unwrap().begin(&job, watch::Sender::new(None).subscribe()).await.unwrap();
    install.open().await.unwrap();
    let bucket = job.layout.buckets().next().unwrap();
    let error = install.bucket(DeviceBucket { bucket, places: Vec::new(), sums: Vec::new() }).await.unwrap_err();
    assert!(error.to_string().contains("no answer within"), "{error}");
    assert_eq!(bed.store.readers(&nccl_id_keys("default_pg")[0]), 0);
    assert!(bed.serves(&model(0)).await, "nothing was written");
    // A new group of another name heals it, once the engine's torch has given up.
    let id = join(&bed, engine.as_ref(), 2).await;
    update(&bed, engine.as_ref(), &new, (2, Some(id))).await.unwrap();
    assert!(bed.serves(&new).await);
    bed.abort(2).await;
}
