//! A pod whose agent reports more engines than it has. Each of them becomes a member, takes versions as the liar does, and says that it refused
//! the current one.
//!
//! Where engines do not register, a report of some is refused, and that is all.

use std::path::Path;

use serde_json::json;

use super::bytes::Door;
use super::updates::Part;
use super::{LOOKS, Lie, Settings, about_itself, in_a_group, say};
use crate::fake_agent::FakeAgent;
use weightsync_core::protocol::MOST_ENGINES;

/// The port of the engine that every pod has.
const OWN: u16 = 8000;

/// Ports of all that it says to have.
fn all() -> Vec<u16> {
    (OWN..).take(MOST_ENGINES).collect()
}

/// Reports its own engine, and all while it lies about them.
pub(super) async fn keep_registered(agent: &FakeAgent, lie: Lie, file: &Path) {
    let mut last = Vec::new();
    loop {
        let ports = if lie == Lie::Engines && file.exists() { all() } else { vec![OWN] };
        if ports != last && agent.register(ports.clone()).await.is_ok() {
            last = ports;
        }
        tokio::time::sleep(LOOKS).await;
    }
}

/// Has an endpoint for each engine that is not there, for ever, and all of them lie.
pub(super) async fn tell(agent: &FakeAgent, settings: &Settings) {
    let Settings { ip, controller, pod, .. } = settings;
    let mut others = Vec::new();
    for port in all().into_iter().filter(|port| *port != OWN) {
        let (part, updates) = Part::new();
        let endpoint = agent.endpoint((*ip, port), controller, pod, updates).await;
        let door = Door::open(*ip, part.clone()).await;
        endpoint.take_bytes_at(&door.address);
        others.push((endpoint, part, door));
    }
    say(Lie::Engines.name(), &json!("sent"));
    let follow = futures::future::join_all(others.iter().map(|(endpoint, part, _)| part.follow(endpoint)));
    let refuse = futures::future::join_all(others.iter().map(|(endpoint, ..)| refuse(endpoint)).chain([refuse(agent)]));
    tokio::join!(follow, refuse);
}

/// Says of every current version that it refused it.
async fn refuse(endpoint: &FakeAgent) {
    let Some(change) = about_itself::of(Lie::RefusedVersion) else { return };
    loop {
        if let Some(group) = in_a_group(endpoint).await {
            about_itself::stand(endpoint, change, &group).await;
        }
        tokio::time::sleep(LOOKS).await;
    }
}
