//! Sends the messages that membership decided. Each has its own task and deadline, so that no member waits for another one. Turns every
//! outcome into an observation; never retries.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

use super::ports::{EpochStore, PersistError};
use weightsync_core::membership::Observation;
use weightsync_core::protocol::{Call, CommitRequest, EpochId, Incarnation, MemberName, PrepareRequest, Refusal, RefusalCode};
use weightsync_net::https::{AgentClient, CallError};

/// An agent and its address.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) agent: Incarnation,
    /// `None` if it has not announced itself to this coordinator.
    pub(super) address: Option<String>,
}

impl Target {
    fn address(&self) -> Result<&str, Refusal> {
        let unknown = || Refusal { code: RefusalCode::PeerUnreachable, message: "its agent has not announced itself".into() };
        self.address.as_deref().ok_or_else(unknown)
    }
}

/// Messages in flight. Dropping it cancels them.
pub(super) struct Calls {
    client: AgentClient,
    running: JoinSet<Option<Observation>>,
}

impl Calls {
    pub(super) fn new(client: AgentClient) -> Self {
        Self { client, running: JoinSet::new() }
    }

    /// The next outcome that membership needs; pending if no message is in flight.
    pub(super) async fn next(&mut self) -> Option<Observation> {
        match self.running.join_next().await {
            Some(Ok(observation)) => observation,
            Some(Err(error)) => {
                tracing::error!(%error, "a call ended without an outcome");
                None
            }
            None => std::future::pending().await,
        }
    }

    pub(super) fn persist(&mut self, store: Arc<dyn EpochStore>, id: EpochId, deadline: Duration) {
        self.running.spawn(async move {
            let epoch = id.epoch;
            Some(match timeout(deadline, store.persist(&id)).await {
                Ok(Ok(())) => Observation::EpochPersisted { epoch },
                Ok(Err(PersistError::Conflict(message))) => Observation::PersistConflict { epoch, message },
                Ok(Err(PersistError::Other(message))) => Observation::PersistFailed { epoch, message },
                Err(_) => Observation::PersistFailed { epoch, message: format!("no answer within {deadline:?}") },
            })
        });
    }

    pub(super) fn prepare(&mut self, target: Target, request: Box<PrepareRequest>) {
        let client = self.client.clone();
        self.running.spawn(async move {
            let deadline = Duration::from_millis(request.deadline_ms);
            let answer = ask(&client, &target, &*request, deadline).await;
            let (id, member) = (request.id, request.member);
            Some(match answer {
                Ok(response) if response.incarnation == target.agent => Observation::Prepared { id, member, response: Box::new(response) },
                Ok(response) => {
                    let message = format!("another life of the agent answered ({})", response.incarnation.instance);
                    Observation::PrepareFailed { id, member, refusal: Refusal { code: RefusalCode::WrongIncarnation, message } }
                }
                Err(refusal) => Observation::PrepareFailed { id, member, refusal },
            })
        });
    }

    pub(super) fn commit(&mut self, target: Target, member: MemberName, request: Box<CommitRequest>) {
        let client = self.client.clone();
        self.running.spawn(async move {
            let deadline = Duration::from_millis(request.deadline_ms);
            let answer = tell(&client, &target, &*request, deadline).await;
            let id = request.id;
            Some(match answer {
                Ok(()) => Observation::Committed { id, member, from: target.agent },
                Err(refusal) => Observation::CommitFailed { id, member, refusal },
            })
        });
    }

    /// Sends a fence or a release. The agent's state shows its effect; without it, membership sends the message again.
    pub(super) fn tell<C: Call + Clone>(&mut self, targets: Vec<Target>, request: &C, deadline: Duration) {
        for target in targets {
            let (client, request) = (self.client.clone(), request.clone());
            self.running.spawn(async move {
                if let Err(refusal) = tell(&client, &target, &request, deadline).await {
                    tracing::debug!(path = C::PATH, pod_uid = %target.agent.pod_uid, message = %refusal.message, "not taken");
                }
                None
            });
        }
    }
}

async fn ask<C: Call>(client: &AgentClient, target: &Target, request: &C, deadline: Duration) -> Result<C::Answer, Refusal> {
    client.ask(target.address()?, &target.agent.pod_uid, request, deadline).await.map_err(|error| as_refusal(&error))
}

async fn tell<C: Call>(client: &AgentClient, target: &Target, request: &C, deadline: Duration) -> Result<(), Refusal> {
    client.tell(target.address()?, &target.agent.pod_uid, request, deadline).await.map_err(|error| as_refusal(&error))
}

/// Converts a failed call into a refusal, as membership expects it.
fn as_refusal(error: &CallError) -> Refusal {
    let code = match error {
        CallError::Refused { refusal, .. } => return refusal.clone(),
        // Not `PeerUnreachable`: a member reports that about another member, which is then held responsible.
        CallError::Unreachable { .. } => RefusalCode::Internal,
        CallError::Timeout { .. } => RefusalCode::Timeout,
        CallError::Rejected { .. } | CallError::BadReply { .. } => RefusalCode::Internal,
    };
    Refusal { code, message: error.to_string() }
}
