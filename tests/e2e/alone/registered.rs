//! Engines that start and end while their pod runs, and register with its agent: Ray actors that use the Python client.

use serde_json::{Value, json};

use crate::asks::{publish_to, train};
use crate::cluster::{Cluster, MINUTE, START, eventually};
use crate::fixtures::{TRAINER_PORT, actors, trainer, weightsync};
use crate::http::{get, post, request};
use crate::operator::scale_controller;

const POD: &str = "actors-0";

/// Starts an actor, and returns the port that its engine chose.
async fn start(cluster: &Cluster) -> u16 {
    let (status, answer) = post(cluster, POD, TRAINER_PORT, "/start", &json!({})).await;
    let port = answer["registered"].as_u64().and_then(|port| u16::try_from(port).ok());
    port.unwrap_or_else(|| panic!("{status}: {answer}"))
}

/// What an engine computes with, asked from the engine itself.
async fn served(cluster: &Cluster, port: u16) -> Value {
    get(cluster, POD, port, "/simulator/digest").await.1["digest"].clone()
}

/// Waits until engines on both ports serve the same, and something else than `before`; returns what.
async fn alike(cluster: &Cluster, ports: [u16; 2], before: &Value) -> Value {
    let [one, two] = ports;
    eventually("both engines serve the new version", MINUTE, || async {
        let (one, two) = (served(cluster, one).await, served(cluster, two).await);
        if one == two && one != *before { Ok(one) } else { Err(format!("{one} and {two} after {before}")) }
    })
    .await
}

fn names(status: &Value) -> Vec<String> {
    let members = status["members"].as_array().into_iter().flatten();
    members.filter(|member| member["state"] == "Ready").map(|member| member["name"].as_str().unwrap().to_owned()).collect()
}

/// Waits until exactly the trainer and the engines on these ports are ready members; returns the epoch.
async fn until(cluster: &Cluster, ports: &[u16]) -> u64 {
    let engines = ports.iter().map(|port| format!("actors/{POD}:{port}"));
    let mut wanted: Vec<String> = engines.chain(["trainer/trainer-0".to_owned()]).collect();
    wanted.sort();
    cluster
        .await_status("run", "the registered engines are members", START, |status| {
            let mut found = names(status);
            found.sort();
            if found == wanted { Ok(status["epoch"].as_u64().unwrap()) } else { Err(format!("{found:?}, not {wanted:?}")) }
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_register_at_run_time_and_are_fed() {
    Cluster::run_alone("registered", |cluster| async move {
        cluster.create_pod(trainer("trainer-0")).await;
        cluster.create_pod(actors(POD)).await;
        let mut object = weightsync("run");
        object["spec"]["rollouts"][0]["engine"] = json!({"kind": "VLLM", "discovery": "Registered"});
        object["spec"]["membership"] = json!({"minReady": 1});
        cluster.apply(&object).await.unwrap();
        cluster.await_ready("trainer-0", START).await;
        // Ray takes its time.
        eventually("the pod's little server runs", START, || async {
            request(&cluster, POD, TRAINER_PORT, "GET", "/health", None, MINUTE).await
        })
        .await;
        let waits = |status: &Value| if status.to_string().contains("no engine has registered") { Ok(()) } else { Err(status.to_string()) };
        cluster.await_status("run", "the status names the pod without engines", START, waits).await;

        let (one, two) = (start(&cluster).await, start(&cluster).await);
        cluster.await_group("run", 2, START).await;
        let startup = served(&cluster, one).await;
        train(&cluster, "trainer-0").await;
        publish_to(&cluster, "trainer-0", 1, 2).await;
        let first = alike(&cluster, [one, two], &startup).await;
        until(&cluster, &[one, two]).await;

        // An actor is killed, and another one starts.
        post(&cluster, POD, TRAINER_PORT, &format!("/kill?{one}"), &json!({})).await;
        until(&cluster, &[two]).await;
        let three = start(&cluster).await;
        let epoch = until(&cluster, &[two, three]).await;
        assert_eq!(served(&cluster, three).await, first, "it was fed the current version before it counted as ready");

        // A controller that starts again keeps the group: agents report their engines to it.
        scale_controller(&cluster, 0).await;
        scale_controller(&cluster, 1).await;
        train(&cluster, "trainer-0").await;
        publish_to(&cluster, "trainer-0", 2, 2).await;
        alike(&cluster, [two, three], &first).await;
        cluster.await_version("run", 2, 2, MINUTE).await;
        assert_eq!(until(&cluster, &[two, three]).await, epoch, "no new group was formed");
    })
    .await;
}
