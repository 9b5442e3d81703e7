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

use super::{A_WHILE, Fixture, model};
use crate::model::Model;
use crate::world::SOON;

fn engine(fixture: &Fixture, kind: &str) -> Arc<dyn Engine> {
    let config = EngineConfig {
        kind: kind.to_owned(),
        url: fixture.engine.url(),
        api_key: None,
        served_model: Some(fixture.checkpoint.path().to_owned()),
        record: None,
        owner: "test".into(),
        processes: PathBuf::from("/proc"),
        unproven_routes: false,
    };
    connect(config).unwrap()
}

/// Two buckets of two tensors.
fn job(fixture: &Fixture, model: &Model, silence: Duration) -> DeviceJob {
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
        sockets: fixture.checkpoint.path().join("s"),
        sockets_in_engine: fixture.checkpoint.path().join("s"),
    }
}

/// Brings rank 0 and the engine into a group; engines on torch only meet at the store.
async fn join(fixture: &Fixture, engine: &dyn Engine, number: u64) -> NcclId {
    let name = format!("weightsync-{number}");
    let id = fixture.publish_id(&name).await;
    let by_id = engine.kind() == "vllm";
    let store = GroupPlace::Store { address: "127.0.0.1".into(), port: fixture.store.address().port() };
    let place = if by_id { GroupPlace::UniqueId { id } } else { store };
    let join = GroupJoin { name, place, offset: 1, world: fixture.world() };
    let group = engine.group().unwrap();
    let joined = tokio::join!(group.join(&join, SOON), async {
        if by_id {
            fixture.join(number, id, Proof::AllReduce).await;
        }
    });
    joined.0.unwrap();
    id
}

/// An update in that group; `makes`: rank 0's communicator is made with the first bucket.
async fn update(fixture: &Fixture, engine: &dyn Engine, model: &Model, (number, makes): (u64, Option<NcclId>)) -> Result<(), InstallError> {
    let job = job(fixture, model, SOON);
    let mut install = engine.group().unwrap().begin(&job, watch::Sender::new(None).subscribe()).await?;
    install.open().await?;
    for (bucket, first) in job.layout.buckets().zip([0, 2]) {
        let send = async {
            if let Some(id) = makes.filter(|_| first == 0) {
                fixture.join(number, id, Proof::Nothing).await;
            }
            fixture.send(number, &[model.bytes(first), model.bytes(first + 1)].concat()).await;
        };
        tokio::join!(install.bucket(DeviceBucket { bucket, places: Vec::new(), sums: Vec::new() }), send).0?;
    }
    install.finish(HeldVersion { version: 7, manifest: "7".repeat(64) }).await.map(drop)
}

/// Story F07.
#[tokio::test(flavor = "multi_thread")]
async fn second_source_gets_its_own_group_and_first_reaches_none() {
    for kind in ["vllm", "sglang"] {
        let fixture = Fixture::new(kind, 1).await;
        let engine = engine(&fixture, kind);
        let stands = kind == "vllm";
        let first = join(&fixture, engine.as_ref(), 1).await;
        let second = join(&fixture, engine.as_ref(), 2).await;
        // The first is reported by its own deadline, and holds no one up.
        let alone = async {
            if stands {
                let slot = fixture.zero.ring.take(SOON).await.unwrap();
                fixture.zero.broadcast(1, &slot, 64, A_WHILE).await.map(drop)
            } else {
                fixture.zero.worker.join_as(1, first, (0, fixture.world()), Proof::Nothing, A_WHILE).await.map(drop)
            }
        };
        assert!(alone.await.is_err(), "{kind}");
        let new = model(7);
        update(&fixture, engine.as_ref(), &new, (2, (!stands).then_some(second))).await.unwrap();
        assert!(fixture.serves(&new).await, "{kind}");
        fixture.abort(2).await;
    }
}

/// Story F08.
#[tokio::test(flavor = "multi_thread")]
async fn ranks_with_another_group_name_end_at_the_deadline() {
    let fixture = Fixture::with("sglang", 1, |options| options.groups.as_mut().unwrap().patience = 4 * A_WHILE).await;
    let engine = engine(&fixture, "sglang");
    // The id lies where a group of another name looks.
    fixture.publish_id("default_pg").await;
    let place = GroupPlace::Store { address: "127.0.0.1".into(), port: fixture.store.address().port() };
    let named = GroupJoin { name: "weightsync-1".into(), place, offset: 1, world: fixture.world() };
    engine.group().unwrap().join(&named, SOON).await.unwrap();
    let new = model(7);
    let job = job(&fixture, &new, 2 * A_WHILE);
    let mut install = engine.group().unwrap().begin(&job, watch::Sender::new(None).subscribe()).await.unwrap();
    install.open().await.unwrap();
    let bucket = job.layout.buckets().next().unwrap();
    let error = install.bucket(DeviceBucket { bucket, places: Vec::new(), sums: Vec::new() }).await.unwrap_err();
    assert!(error.to_string().contains("did not respond within"), "{error}");
    assert_eq!(fixture.store.readers(&nccl_id_keys("default_pg")[0]), 0);
    assert!(fixture.serves(&model(0)).await, "nothing was written");
    // A new group of another name heals it, once the engine's torch has given up.
    let id = join(&fixture, engine.as_ref(), 2).await;
    update(&fixture, engine.as_ref(), &new, (2, Some(id))).await.unwrap();
    assert!(fixture.serves(&new).await);
    fixture.abort(2).await;
}
