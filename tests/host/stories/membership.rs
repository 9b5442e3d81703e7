//! Groups that change while something is under way.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use tokio::task::JoinHandle;
use weightsync_agent::client::trainer::TrainerClient;
use weightsync_core::protocol::{Activation, ClientRequest, PublishResult, QueuePolicy};

use crate::model::Model;
use crate::world::{Actor, SOON, World, installed, short, spoiled, unavailable, until};

/// A trainer that stops in the middle of its stream until it is asked to go on.
struct Halfway {
    gate: Arc<(Mutex<[bool; 2]>, Condvar)>,
    task: JoinHandle<PublishResult>,
}

impl Halfway {
    async fn publish(world: &World, version: u64, model: Model) -> Self {
        let gate: Arc<(Mutex<[bool; 2]>, Condvar)> = Arc::default();
        let (socket, theirs) = (world.socket.parse().unwrap(), Arc::clone(&gate));
        let task = tokio::task::spawn_blocking(move || {
            let mut client = TrainerClient::connect(&socket, "a test").unwrap();
            let request = ClientRequest::Publish {
                version,
                tensors: model.specs(),
                queue: QueuePolicy::Wait,
                activation: Activation::Auto,
                repeatable: false,
                timeout_ms: 30_000,
                gpu: None,
            };
            let mut fill = |layout: &weightsync_core::weights::Layout, bucket: weightsync_core::weights::Bucket, into: &mut [u8]| {
                if bucket.offset * 2 >= layout.total_bytes {
                    let mut states = theirs.0.lock().unwrap();
                    states[0] = true;
                    let (states, waited) = theirs.1.wait_timeout_while(states, SOON, |states| !states[1]).unwrap();
                    drop(states);
                    assert!(!waited.timed_out(), "no one opened the gate");
                }
                model.fill(layout, bucket, into);
                Ok(())
            };
            client.publish(&request, &mut fill, &mut |_| ()).unwrap()
        });
        let halfway = Self { gate, task };
        until("half of the stream to be written", || async { halfway.gate.0.lock().unwrap()[0] }).await;
        halfway
    }

    async fn go_on(self) -> PublishResult {
        self.gate.0.lock().unwrap()[1] = true;
        self.gate.1.notify_all();
        tokio::time::timeout(SOON, self.task).await.expect("a publish ends").unwrap()
    }
}

fn names(result: &PublishResult) -> Vec<&str> {
    result.installed.iter().map(|name| short(&name.0)).collect()
}

/// llm-d-rl: requests to engines go out one after the other, and each waits for all ranks.
/// Story F05.
#[tokio::test(flavor = "multi_thread")]
async fn slow_engine_does_not_delay_the_next_call() {
    let world = World::start(json!({}), [Actor::new(), Actor::new()]).await;
    world.until_ready(2).await;
    // Each engine is the slow one once: code that goes one by one fails in one of the two orders.
    for (version, slow, quick) in [(1, 0, 1), (2, 1, 0)] {
        // Once `minReady` replicas serve a version, a publish waits for the others until they are silent for 5 s.
        world.spoil(slow, &json!({"loadMs": 2500})).await;
        let model = Model::small(version);
        let checkpoint = model.save(&world.folder().join(format!("v{version}")));
        let publishing = world.publish(&checkpoint, version, &[]);
        let meanwhile = async {
            world.until_serves(quick, &model).await;
            assert!(!world.serves(slow, &model).await, "version {version}: the slow engine had ended before the quick one");
        };
        let (published, ()) = tokio::join!(publishing, meanwhile);
        assert_eq!(installed(&published.done()).len(), 2);
        world.spoil(slow, &json!({})).await;
    }
}

/// radixark/miles#947: members read the list of engines at different moments and disagree.
/// Story F09.
#[tokio::test(flavor = "multi_thread")]
async fn members_that_change_while_a_group_forms_end_in_one_epoch() {
    let world = World::start(json!({}), [Actor::new(), Actor::new(), Actor::new()]).await;
    for pod in ["actor-1", "actor-2"] {
        let before = world.agent(pod).await;
        rustix::process::kill_process(before, Signal::KILL).unwrap();
        until("the agent to be started again", || async { world.agent(pod).await != before }).await;
    }
    world.until_ready(3).await;
    let one = Model::small(1);
    let checkpoint = one.save(&world.folder().join("v1"));
    let result = world.publish(&checkpoint, 1, &[]).await.done();
    assert_eq!(installed(&result).len(), 3, "{result}");
    for (number, pod) in ["actor-0", "actor-1", "actor-2"].into_iter().enumerate() {
        assert_eq!(world.roster(pod).await["epoch"], result["epoch"], "{pod}");
        assert!(world.serves(number, &one).await);
    }
}

/// llm-d-rl: an engine that was added between two steps is in no group, and is asked to update.
/// Story F41.
#[tokio::test(flavor = "multi_thread")]
async fn engine_that_comes_in_an_update_joins_after_it() {
    let mut world = World::start_with(
        &Model::large(0),
        json!({"silenceSeconds": 30, "bucketMiB": 1}),
        [Actor::new(), Actor::new(), Actor::new().absent()],
    )
    .await;
    world.until_ready(2).await;
    let halfway = Halfway::publish(&world, 1, Model::large(1)).await;
    let epoch = world.roster("trainer").await["epoch"].clone();
    world.start_engine(2);
    let healthy = "weightsync_agent_engine_healthy{port=";
    let is_healthy = |text: &str| text.lines().any(|line| line.starts_with(healthy) && line.ends_with(" 1"));
    until("the new engine to be seen", || async { is_healthy(&world.page("actor-2", "/metrics").await.1) }).await;
    let result = halfway.go_on().await;
    assert_eq!((names(&result), result.attempts), (vec!["actor-0", "actor-1"], 1));
    assert_eq!(json!(result.epoch), epoch, "the running update was not disturbed");
    let joined = world.reported("MemberJoined", "actor-2").await;
    assert!(!joined.contains(&format!("epoch {}", result.epoch)), "{joined}");
    world.until_serves(2, &Model::large(1)).await;
    assert_eq!(world.loads(2).await, 1);
}

/// llm-d-rl: the update itself makes health checks fail, and the group changes in the middle of it.
/// Story F42.
#[tokio::test(flavor = "multi_thread")]
async fn engine_unhealthy_only_while_switching_stays_in_group() {
    let world = World::start(json!({}), [Actor::new(), Actor::new()]).await;
    world.until_ready(2).await;
    // An engine may start slowly.
    let unhealthy = world.events_of("EngineUnhealthy", "actor-1");
    // Three failed probes long, were it probed as usual; two are enough to leave.
    world.spoil(0, &json!({"loadMs": 3000})).await;
    world.spoil(1, &json!({"loadMs": 6000})).await;
    let one = Model::small(1);
    let checkpoint = one.save(&world.folder().join("v1"));
    let epoch = world.roster("trainer").await["epoch"].clone();
    let publishing = world.publish(&checkpoint, 1, &[]);
    let meanwhile = async {
        until("the load to begin", || async {
            world.simulator(1, "calls").await.to_string().contains("POST /collective_rpc") && world.loads(1).await == 1
        })
        .await;
        let loading = || async {
            let calls = world.simulator(1, "calls").await;
            calls.as_array().unwrap().iter().filter(|call| call.as_str().unwrap().contains("collective_rpc")).count() >= 2
        };
        until("the weights to be loaded", loading).await;
        world.spoil(1, &spoiled("/health", &unavailable())).await;
        world.until_serves(0, &one).await;
        assert!(!world.serves(1, &one).await, "the load must still run");
        world.spoil(1, &json!({})).await;
    };
    let (published, ()) = tokio::join!(publishing, meanwhile);
    let result = published.done();
    assert_eq!((installed(&result).len(), &result["attempts"], &result["epoch"]), (2, &json!(1), &epoch), "{result}");
    assert_eq!(world.events_of("EngineUnhealthy", "actor-1"), unhealthy);
    assert!(world.serves(1, &one).await);
}

/// A rollout's whole pod dies in the middle: the survivors get the version within what the design promises, from what the source kept.
#[tokio::test(flavor = "multi_thread")]
async fn rollout_killed_midway_costs_others_an_epoch_only() {
    let world =
        World::start_with(&Model::large(0), json!({"bucketMiB": 1, "silenceSeconds": 30}), [Actor::new(), Actor::new(), Actor::new()])
            .await;
    world.until_ready(3).await;
    let halfway = Halfway::publish(&world, 1, Model::large(1)).await;
    world.signal("actor-1", Signal::KILL).await;
    let epoch = world.roster("trainer").await["epoch"].as_u64().unwrap();
    until("a new epoch", || async { world.roster("trainer").await["epoch"].as_u64().is_some_and(|now| now > epoch) }).await;
    // The trainer's bytes can be read once only: what it wrote before is not asked for again.
    let result = tokio::time::timeout(Duration::from_secs(20), halfway.go_on()).await.unwrap();
    assert_eq!(result.attempts, 2);
    assert!(names(&result).contains(&"actor-0") && names(&result).contains(&"actor-2"), "{result:?}");
    for number in [0, 1, 2] {
        world.until_serves(number, &Model::large(1)).await;
    }
}
