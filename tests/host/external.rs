//! A trainer that moves its weights itself (`delivery: External`), with real agents: informed of each epoch, and of its end.

use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use rustix::process::Signal;
use serde_json::json;
use weightsync_agent::client::trainer::TrainerClient;
use weightsync_core::protocol::{ClientReply, ClientRequest, MemberName, PublishErrorCode, PublishResult, ReplicaReport, Topology};

use crate::model::Model;
use crate::world::{Actor, SOON, World, until};

/// The trainer's side of the socket, on a thread of its own for each step.
struct Trainer(Option<TrainerClient>);

impl Trainer {
    async fn connect(world: &World, replicas: usize) -> Self {
        world.until_ready(replicas).await;
        let mut client = TrainerClient::connect(&world.socket.parse().unwrap(), "a test").unwrap();
        client.say(&ClientRequest::WatchEpochs).unwrap();
        Self(Some(client))
    }

    fn say(&mut self, request: &ClientRequest) {
        self.0.as_mut().unwrap().say(request).unwrap();
    }

    /// The next line of which something is wanted; signs of life come each second.
    async fn hear<T: Send + 'static>(&mut self, what: &str, wanted: impl Fn(ClientReply) -> Option<T> + Send + 'static) -> T {
        let mut client = self.0.take().unwrap();
        let heard = tokio::task::spawn_blocking(move || {
            let deadline = Instant::now() + SOON;
            loop {
                let found = wanted(client.hear().unwrap());
                if found.is_some() || Instant::now() > deadline {
                    return (client, found);
                }
            }
        });
        let (client, found) = heard.await.unwrap();
        self.0 = Some(client);
        found.unwrap_or_else(|| panic!("waited for {what}"))
    }

    /// The next epoch with so many replicas.
    async fn epoch(&mut self, replicas: usize) -> Topology {
        self.hear("an epoch", move |reply| match reply {
            ClientReply::Epoch { topology } if topology.replicas.len() == replicas => Some(topology),
            _ => None,
        })
        .await
    }

    fn begin(&mut self, epoch: &Topology, version: u64) {
        self.say(&ClientRequest::External { epoch: epoch.epoch, version, digest: None, engine_version: None, timeout_ms: 20_000 });
    }

    async fn open(&mut self) {
        self.hear("the engines to be marked", |reply| matches!(reply, ClientReply::Open { .. }).then_some(())).await;
    }

    /// Reports all, and hears the result.
    async fn conclude(&mut self, epoch: &Topology) -> PublishResult {
        for replica in &epoch.replicas {
            self.report(&replica.name);
        }
        self.say(&ClientRequest::Conclude);
        self.hear("the result", |reply| match reply {
            ClientReply::Done { result } => Some(result),
            ClientReply::Error { error } => panic!("{error:?}"),
            _ => None,
        })
        .await
    }

    fn report(&mut self, replica: &MemberName) {
        self.say(&ClientRequest::Report(ReplicaReport { replica: replica.clone(), ok: true, reason: String::new() }));
    }
}

/// What a data plane does to a simulated vLLM.
async fn feed(world: &World, number: usize, version: u64) -> Model {
    let model = Model::small(version);
    let checkpoint = model.save(&world.folder().join(format!("plane-{version}")));
    world.post(number, "/collective_rpc", &json!({"method": "reload_weights", "kwargs": {"weights_path": checkpoint}})).await;
    model
}

/// Story F21.
#[tokio::test(flavor = "multi_thread")]
async fn epochs_port_is_bound_before_it_is_announced() {
    let world = World::start_external(json!({}), [Actor::new(), Actor::new()]).await;
    let mut trainer = Trainer::connect(&world, 2).await;
    let epoch = trainer.epoch(2).await;
    let address = format!("{}:{}", epoch.address, epoch.port);
    assert!(TcpListener::bind(&address).is_err(), "no one else can take it");
    TcpStream::connect(&address).unwrap();
    assert!(epoch.group.ends_with(&format!("-{}", epoch.epoch)), "{}", epoch.group);
    assert_eq!(epoch.replicas.iter().map(|replica| (replica.rank_offset, replica.size)).collect::<Vec<_>>(), [(1, 1), (2, 1)]);
    drop(trainer);
    until("the port to refuse", || async { TcpStream::connect(&address).is_err() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_killed_in_external_update_is_named_and_retried() {
    let world = World::start_external(json!({}), [Actor::new(), Actor::new()]).await;
    let mut trainer = Trainer::connect(&world, 2).await;
    let first = trainer.epoch(2).await;
    trainer.begin(&first, 1);
    trainer.open().await;
    feed(&world, 0, 1).await;
    world.signal("actor-1", Signal::KILL).await;
    let reported = trainer
        .hear("the loss", |reply| match reply {
            ClientReply::Error { error } => Some(error),
            _ => None,
        })
        .await;
    // The trainer's agent sees the closed connection, or the next epoch comes first. Both name the pod.
    assert!(matches!(reported.code, PublishErrorCode::NotEnoughReplicas | PublishErrorCode::Fenced), "{reported:?}");
    assert!(reported.retryable, "{reported:?}");
    assert!(reported.message.contains("actor-1"), "{reported:?}");
    until("the survivor to be dirty", || async { world.replicas("dirty").await.contains(&"actor-0".to_owned()) }).await;

    let second = trainer.epoch(2).await;
    assert!(second.epoch > first.epoch);
    assert_eq!(second.replicas[0].version, None, "no one holds what was not proven");
    // A word about the epoch that is over does nothing.
    trainer.begin(&first, 1);
    let stale = trainer
        .hear("a refusal", |reply| match reply {
            ClientReply::Error { error } => Some(error.code),
            _ => None,
        })
        .await;
    assert_eq!(stale, PublishErrorCode::Fenced);
    trainer.begin(&second, 1);
    trainer.open().await;
    let model = feed(&world, 0, 1).await;
    feed(&world, 1, 1).await;
    let result = trainer.conclude(&second).await;
    assert_eq!((result.installed.len(), result.epoch), (2, second.epoch), "{result:?}");
    assert!(world.serves(0, &model).await && world.serves(1, &model).await);
    world.until_ready(2).await;
    assert_eq!(world.roster("trainer").await["version"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_with_half_an_external_update_is_not_ready() {
    let world = World::start_external(json!({}), [Actor::new()]).await;
    let mut trainer = Trainer::connect(&world, 1).await;
    let epoch = trainer.epoch(1).await;
    trainer.begin(&epoch, 1);
    trainer.open().await;
    trainer.say(&ClientRequest::Cancel { reason: "the link is down".into() });
    until("the pod not to be ready", || async { world.page("actor-0", "/readyz").await.0 == 503 }).await;
    let next = trainer.epoch(1).await;
    trainer.begin(&next, 1);
    trainer.open().await;
    feed(&world, 0, 1).await;
    trainer.conclude(&next).await;
    until("the pod to be ready", || async { world.page("actor-0", "/readyz").await.0 == 200 }).await;
}
