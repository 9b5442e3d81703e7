//! What must stay as it was while something around the pods is stopped, restarted or replaced: who they are, how often their containers
//! were started, in which epoch they are, and how many versions their engines took.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::cluster::{Cluster, MINUTE, eventually};
use crate::fixtures::STATUS_PORT;
use crate::http::request;

/// One pod's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub uid: String,
    /// Restarts of each of its containers.
    pub restarts: BTreeMap<String, i32>,
    /// The epoch that its agent is in.
    pub epoch: u64,
    /// Updates in which its agent had a part, anyone who led them and however they ended.
    pub updates: u64,
    /// Versions that its engine took; of a trainer, none.
    pub installs: u64,
}

/// The sum of a metric over all of its labels; 0 where there is none.
pub fn sum(text: &str, name: &str) -> u64 {
    let of = |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
    let values = text.lines().filter(|line| of(line)).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    // Counters of a test are small whole numbers.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let sum = values.sum::<f64>() as u64;
    sum
}

/// The metrics of an agent or a controller.
pub async fn metrics(cluster: &Cluster, pod: &str, port: u16) -> String {
    eventually(&format!("metrics of {pod}"), MINUTE, || async {
        let (status, text) = request(cluster, pod, port, "GET", "/metrics", None, Duration::from_secs(5)).await?;
        if status == 200 { Ok(text.as_str().unwrap_or_default().to_owned()) } else { Err(format!("{status}: {text}")) }
    })
    .await
}

/// How a pod stands.
pub async fn standing(cluster: &Cluster, name: &str) -> Standing {
    let pod = cluster.api::<Pod>().get(name).await.expect("the pod exists");
    let status = pod.status.clone().unwrap_or_default();
    let containers = status.container_statuses.into_iter().chain(status.init_container_statuses).flatten();
    let restarts = containers.map(|container| (container.name, container.restart_count)).collect();
    let text = metrics(cluster, name, STATUS_PORT).await;
    Standing {
        uid: pod.uid().expect("a UID"),
        restarts,
        epoch: sum(&text, "weightsync_agent_epoch"),
        updates: sum(&text, "weightsync_agent_updates_total"),
        installs: sum(&text, "weightsync_agent_engine_pause_duration_seconds_count"),
    }
}

/// How each of these pods stands.
pub async fn all(cluster: &Cluster, names: &[&str]) -> BTreeMap<String, Standing> {
    let mut found = BTreeMap::new();
    for name in names {
        found.insert((*name).to_owned(), standing(cluster, name).await);
    }
    found
}

/// The same pods with this many versions more, each brought once.
pub fn with_more(before: &BTreeMap<String, Standing>, versions: u64) -> BTreeMap<String, Standing> {
    let more = |(name, one): (&String, &Standing)| {
        let installs = one.installs + if name.starts_with("trainer") { 0 } else { versions };
        (name.clone(), Standing { updates: one.updates + versions, installs, ..one.clone() })
    };
    before.iter().map(more).collect()
}
