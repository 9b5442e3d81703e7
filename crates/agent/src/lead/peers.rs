//! The leader's view of the rollouts of its epoch: their facts, and the loss of one, at once.
//!
//! Decides that a peer is lost: its stream closed and cannot be reopened at once, or no message came for three heartbeats, or another
//! incarnation of it answers. It notifies all listeners. It never decides what follows from a loss.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::core::Core;
use crate::events::SILENT_AFTER;
use crate::group::Epoch;
use weightsync_core::protocol::{AgentEvent, EVENTS_PATH, MemberAddress, MemberName, MemberState};
use weightsync_net::https::AgentClient;

/// Longest wait for a stream to begin.
const OPEN: Duration = Duration::from_secs(2);

/// Longest wait for a closed stream to begin again before its peer counts as lost: a dead process refuses at once.
const OPEN_AGAIN: Duration = Duration::from_millis(500);

/// A stream that was opened again and ends sooner than this is not opened a third time: its peer accepts, but does not work.
const STEADY: Duration = Duration::from_secs(1);

/// Time between two tries to hear a lost peer again.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Default)]
pub struct Peer {
    /// Its facts, by its last word.
    pub state: Option<MemberState>,
    pub lost: Option<String>,
}

/// All rollouts of one epoch but this agent itself. Dropping it ends the listening.
pub struct Peers {
    known: watch::Sender<BTreeMap<MemberName, Peer>>,
    _listeners: JoinSet<()>,
}

impl Peers {
    pub fn listen(core: &Arc<Core>, client: &AgentClient, epoch: &Arc<Epoch>) -> Self {
        let known = watch::Sender::new(BTreeMap::new());
        let mut listeners = JoinSet::new();
        for name in epoch.rollouts() {
            let Some(address) = epoch.address(&name).filter(|_| &name != epoch.me()) else { continue };
            let listener = Listener {
                core: core.clone(),
                client: client.clone(),
                epoch: epoch.clone(),
                address: address.clone(),
                known: known.clone(),
            };
            known.send_modify(|known| {
                known.insert(name, Peer::default());
            });
            listeners.spawn(listener.run());
        }
        Self { known, _listeners: listeners }
    }

    pub fn watch(&self) -> watch::Receiver<BTreeMap<MemberName, Peer>> {
        self.known.subscribe()
    }

    pub async fn any_lost(&self, members: &[MemberName]) -> (MemberName, String) {
        let mut known = self.known.subscribe();
        loop {
            let lost = {
                let known = known.borrow_and_update();
                let lost = |name: &MemberName| Some((name.clone(), known.get(name)?.lost.clone()?));
                members.iter().find_map(lost)
            };
            if let Some(lost) = lost {
                return lost;
            }
            if known.changed().await.is_err() {
                // The sender is ours: it cannot end before we do.
                std::future::pending::<()>().await;
            }
        }
    }
}

struct Listener {
    core: Arc<Core>,
    client: AgentClient,
    epoch: Arc<Epoch>,
    address: MemberAddress,
    known: watch::Sender<BTreeMap<MemberName, Peer>>,
}

impl Listener {
    async fn run(self) {
        let mut open = OPEN;
        loop {
            let begun = Instant::now();
            let mut heard = false;
            let cause = self.listen(open, &mut heard).await;
            if heard && (open == OPEN || begun.elapsed() >= STEADY) {
                // A stream that worked is opened again at once, before anybody is alarmed.
                open = OPEN_AGAIN;
                continue;
            }
            open = OPEN;
            // A connection that is reset looks the same from both ends: anyone who reads of one reads of the other.
            let seen = format!("its connection with {} ended: {cause}", self.epoch.me());
            self.change(|peer| peer.lost = Some(seen));
            self.core.peer_lost(self.epoch.id(), &self.address.member, &cause);
            sleep(PAUSE).await;
        }
    }

    /// Listens until the stream ends; answers why.
    async fn listen(&self, open: Duration, heard: &mut bool) -> String {
        let MemberAddress { control, incarnation, .. } = &self.address;
        let events = self.client.events(control, &incarnation.pod_uid, EVENTS_PATH, open, SILENT_AFTER).await;
        let mut stream = match events {
            Ok(stream) => stream,
            Err(error) => return error.to_string(),
        };
        loop {
            match stream.next().await {
                Ok(AgentEvent::Snapshot { state }) if state.incarnation == *incarnation => {
                    *heard = true;
                    self.change(|peer| {
                        peer.lost = None;
                        peer.state = Some(*state);
                    });
                }
                Ok(AgentEvent::Snapshot { state }) => {
                    *heard = false;
                    return format!("another life of it answers ({})", state.incarnation.instance);
                }
                Ok(_) => {}
                Err(end) => return end.to_string(),
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut Peer)) {
        self.known.send_modify(|known| change(known.entry(self.address.member.clone()).or_default()));
    }
}
