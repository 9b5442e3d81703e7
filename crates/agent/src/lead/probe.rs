//! Proves on commit that the data path of a group works: one element through the whole chain, over the real transport.
//!
//! Decides nothing about membership: who cannot be reached is named, and the coordinator does the rest.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout_at};

use super::Leader;
use super::calls::Calls;
use crate::group::{Epoch, refusal};
use weightsync_core::protocol::{BucketHeader, CarriedBy, DataHello, MemberName, Refusal, RefusalCode, UpdateId};
use weightsync_core::weights::bucket_digest;
use weightsync_transport::TransportError;

/// The element: eight bytes that differ, so that an order mistaken on the way shows.
const ELEMENT: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

/// Pause before a member that has not committed yet is asked again.
const PAUSE: Duration = Duration::from_millis(20);

impl Leader {
    /// Sends the element through the chain, until `deadline`. A group without other rollouts has no path to prove.
    pub async fn prove(&self, epoch: &std::sync::Arc<Epoch>, deadline: Instant) -> Result<(), Refusal> {
        let others: Vec<MemberName> = epoch.rollouts().into_iter().filter(|name| name != epoch.me()).collect();
        let over = self.core.over(epoch.id());
        if epoch.engines().is_some() {
            tokio::select! {
                formed = self.form_engines(epoch, deadline) => formed?,
                () = over.cancelled() => return Err(refusal(RefusalCode::StaleEpoch, "the epoch ended while its engines joined")),
            }
        }
        if epoch.communicator().is_some() {
            tokio::select! {
                formed = self.form(epoch, deadline) => formed?,
                () = over.cancelled() => return Err(refusal(RefusalCode::StaleEpoch, "the epoch ended while its communicator was formed")),
            }
        }
        loop {
            let sent = tokio::select! {
                sent = timeout_at(deadline, self.send_probe(epoch, &others)) => sent,
                () = over.cancelled() => return Err(refusal(RefusalCode::StaleEpoch, "the epoch ended while its data path was proven")),
            };
            match sent {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(TransportError::Refused { refusal, .. })) if refusal.code == RefusalCode::WrongPhase => sleep(PAUSE).await,
                Ok(Err(error)) => {
                    if let Some(peer) = error.peer() {
                        self.core.peer_lost(epoch.id(), peer, &error.to_string());
                    }
                    return Err(refusal(RefusalCode::PeerUnreachable, error.to_string()));
                }
                Err(_) => return Err(refusal(RefusalCode::Timeout, "the data path could not be proven in time")),
            }
        }
    }

    async fn send_probe(&self, epoch: &std::sync::Arc<Epoch>, others: &[MemberName]) -> Result<(), TransportError> {
        let calls = Calls::new(self.client.clone(), epoch.clone());
        let update = UpdateId { epoch: epoch.id().clone(), version: 0, attempt: 0 };
        let Some((hello, first)) = hello(epoch, &calls, others, &update, true, self.read_by(epoch)) else { return Ok(()) };
        let mut sink = self.transport.open(hello, &first).await?;
        let header = BucketHeader { sequence: 0, flags: 0, offset: 0, bytes: ELEMENT.len() as u64 };
        sink.send(header, Bytes::from_static(&ELEMENT).into(), bucket_digest(&ELEMENT)).await?;
        sink.finish().await
    }
}

/// What opens a stream: its hello, and where the first member of its chain listens.
pub(super) type Opening = (DataHello, String);

/// The hello for a chain over `members` and the address of the first; none when there is no one.
pub(super) fn hello(
    epoch: &Epoch,
    calls: &Calls,
    members: &[MemberName],
    update: &UpdateId,
    probe: bool,
    carried: Option<CarriedBy>,
) -> Option<Opening> {
    let mut rest = calls.chain(members);
    if rest.is_empty() {
        return None;
    }
    let (to, first) = rest.remove(0);
    let policy = &epoch.prepared.policy;
    let hello = DataHello {
        update: update.clone(),
        from: epoch.me().clone(),
        to,
        secret: epoch.commit.secret.clone(),
        rest,
        tls: policy.data_tls,
        silence_ms: policy.silence_ms,
        probe,
        preflight: false,
        carried,
    };
    Some((hello, first))
}
