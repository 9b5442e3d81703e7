//! A leader's calls to the rollouts of an attempt: all at once, each with a deadline.
//!
//! Sends and collects; a slow or dead member costs no other member anything. It never decides what an answer means.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::group::Epoch;
use weightsync_core::protocol::{AbortRequest, Call, MemberAddress, MemberName, Refusal, StatusRequest, UpdateId, UpdateStatus};
use weightsync_net::https::{AgentClient, CallError};

pub(super) enum Answer {
    Status(Box<UpdateStatus>),
    Refused(Refusal),
    Lost(String),
}

impl From<Result<UpdateStatus, CallError>> for Answer {
    fn from(answer: Result<UpdateStatus, CallError>) -> Self {
        match answer {
            Ok(status) => Self::Status(Box::new(status)),
            Err(CallError::Refused { refusal, .. }) => Self::Refused(refusal),
            Err(error) => Self::Lost(error.to_string()),
        }
    }
}

#[derive(Clone)]
pub(super) struct Calls {
    client: AgentClient,
    epoch: Arc<Epoch>,
}

impl Calls {
    pub(super) fn new(client: AgentClient, epoch: Arc<Epoch>) -> Self {
        Self { client, epoch }
    }

    pub(super) fn to_all<C: Call<Answer = UpdateStatus>>(&self, members: &[MemberName], request: C, deadline: Duration) -> Answers {
        let mut calls = JoinSet::new();
        let request = Arc::new(request);
        for member in members {
            let (calls_of, member, request) = (self.clone(), member.clone(), request.clone());
            calls.spawn(async move {
                let answer = calls_of.ask(&member, request.as_ref(), deadline).await.into();
                (member, answer)
            });
        }
        Answers(calls)
    }

    /// Gives an attempt up at all members, without waiting.
    pub(super) fn abort(&self, members: Vec<MemberName>, update: UpdateId, reason: String) {
        let request = Arc::new(AbortRequest { update, reason });
        for member in members {
            let (calls, request) = (self.clone(), request.clone());
            tokio::spawn(async move {
                if let Err(error) = calls.ask(&member, request.as_ref(), AbortRequest::WITHIN).await {
                    tracing::debug!(%member, %error, "could not be informed that an attempt is over");
                }
            });
        }
    }

    /// Follows what members say of an attempt until the returned [`Following`] is dropped.
    pub(super) fn follow(&self, members: &[MemberName], update: &UpdateId) -> Following {
        let (tell, said) = mpsc::channel(64);
        let mut polls = JoinSet::new();
        for member in members {
            polls.spawn(self.clone().poll(member.clone(), update.clone(), tell.clone()));
        }
        Following { said, _polls: polls }
    }

    async fn poll(self, member: MemberName, update: UpdateId, tell: mpsc::Sender<(MemberName, Answer)>) {
        let mut after: Option<u64> = None;
        loop {
            let begun = Instant::now();
            let within = StatusRequest::LONG_POLL + StatusRequest::WITHIN;
            let answer = match self.ask(&member, &StatusRequest { after }, within).await {
                Ok(status) if status.update != update => {
                    let message = format!("it turned to attempt {} of version {}", status.update.attempt, status.update.version);
                    Answer::Lost(message)
                }
                Ok(status) if after == Some(status.sequence) => continue,
                Ok(status) => {
                    after = Some(status.sequence);
                    Answer::Status(Box::new(status))
                }
                // Its event stream shows whether it is lost; here the call is only repeated, not too often.
                Err(error) => {
                    tracing::debug!(%member, %error, "status unknown");
                    sleep(Duration::from_millis(200).saturating_sub(begun.elapsed())).await;
                    continue;
                }
            };
            let over = match &answer {
                Answer::Status(status) => status.step.is_final(),
                _ => true,
            };
            if tell.send((member.clone(), answer)).await.is_err() || over {
                return;
            }
        }
    }

    pub(super) async fn ask<C: Call>(&self, member: &MemberName, request: &C, deadline: Duration) -> Result<C::Answer, CallError> {
        let unknown = || CallError::Unreachable { address: member.0.clone(), cause: "the epoch has no address of it".into() };
        let MemberAddress { control, incarnation, .. } = self.epoch.address(member).ok_or_else(unknown)?;
        self.client.ask(control, &incarnation.pod_uid, request, deadline).await
    }

    /// Data addresses of members, in this order.
    pub(super) fn chain(&self, members: &[MemberName]) -> Vec<(MemberName, String)> {
        let known: HashMap<&MemberName, &String> =
            self.epoch.commit.addresses.iter().map(|address| (&address.member, &address.data)).collect();
        members.iter().filter_map(|member| Some((member.clone(), (*known.get(member)?).clone()))).collect()
    }
}

/// Answers to one message, as they come. Dropping it ends the calls.
pub(super) struct Answers(JoinSet<(MemberName, Answer)>);

impl Answers {
    /// The next answer; waits for ever when all came.
    pub(super) async fn next(&mut self) -> (MemberName, Answer) {
        loop {
            match self.0.join_next().await {
                Some(Ok(answer)) => return answer,
                Some(Err(error)) => tracing::error!(%error, "a call ended without an outcome"),
                None => std::future::pending().await,
            }
        }
    }
}

/// What members say of an attempt, as it comes.
pub(super) struct Following {
    said: mpsc::Receiver<(MemberName, Answer)>,
    _polls: JoinSet<()>,
}

impl Following {
    /// The next word; waits for ever when all members' parts are over.
    pub(super) async fn next(&mut self) -> (MemberName, Answer) {
        match self.said.recv().await {
            Some(said) => said,
            None => std::future::pending().await,
        }
    }
}
