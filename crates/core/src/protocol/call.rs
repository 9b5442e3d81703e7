//! The calls between the controller and agents: path, request, answer, and the deadline where it is a constant.
//!
//! Client and server name a call by the type of its request. So a path that only one side knows, or a wrong answer, does not compile.

use core::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{
    AbortRequest, ActivateRequest, AnnounceResponse, Announcement, BeginRequest, ClockAnswer, CommitRequest, EdgeOutcome, EdgeRequest,
    EngineJoinRequest, EngineJoinResponse, EnrollRequest, EnrollResponse, ExternalBegin, ExternalEnd, FenceRequest, FinishRequest,
    JoinRequest, JoinResponse, LendRequest, MemberState, PrepareRequest, PrepareResponse, ReceiveRequest, ReceiveResponse,
    RegisteredEngines, ReleaseRequest, UpdateStatus,
};

/// The path of an agent's event stream: one [`AgentEvent`](super::AgentEvent) a line, by `GET`. Coordinators and members read it.
pub const EVENTS_PATH: &str = "/v1/events";

/// The HTTP method of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// The request is the query.
    Get,
    /// The request is the body, as JSON.
    Post,
}

/// A call, implemented on its request.
pub trait Call: Serialize + Send + Sync + 'static {
    /// How the request is sent.
    const METHOD: Method;
    /// The path at the server.
    const PATH: &'static str;
    /// The body of the answer with HTTP 200, as JSON.
    type Answer: DeserializeOwned;
}

// Each line is a call: method, path, request, answer, and the value of `WITHIN` of the request.
macro_rules! calls {
    ($(#[$doc:meta])* $paths:ident: $($method:ident $path:literal $request:ty => $answer:ty $(, within $seconds:literal s)?;)+) => {
        $(#[$doc])*
        pub const $paths: &[&str] = &[$($path),+];
        $(
            impl Call for $request {
                const METHOD: Method = Method::$method;
                const PATH: &'static str = $path;
                type Answer = $answer;
            }
            $(
                impl $request {
                    /// Longest wait for the answer. Time that the caller grants for work of the receiver comes on top.
                    pub const WITHIN: Duration = Duration::from_secs($seconds);
                }
            )?
        )+
    };
}

calls! {
    /// Paths of the calls from agents to the controller, or to `weightsync local`.
    PATHS_OF_CONTROLLER:
    Post "/v1/agents/enroll" EnrollRequest => EnrollResponse, within 15 s;
    Post "/v1/agents/announce" Announcement => AnnounceResponse, within 5 s;
    Post "/v1/agents/engines" RegisteredEngines => AnnounceResponse, within 5 s;
}

calls! {
    /// Paths of the calls to agents.
    PATHS_OF_AGENT:
    // From the coordinator.
    Post "/v1/epoch/prepare" PrepareRequest => PrepareResponse;
    Post "/v1/epoch/commit" CommitRequest => MemberState;
    Post "/v1/epoch/fence" FenceRequest => MemberState;
    Post "/v1/release" ReleaseRequest => MemberState;
    Post "/v1/announce" AssignmentChanged => ();
    // From the agent that proves a committing epoch.
    Post "/v1/epoch/join" JoinRequest => JoinResponse;
    Post "/v1/epoch/lend" LendRequest => ();
    Post "/v1/epoch/engine-join" EngineJoinRequest => EngineJoinResponse;
    // From the agent that leads the epoch. Any member may ask for the clock.
    Post "/v1/preflight/edge" EdgeRequest => EdgeOutcome, within 2 s;
    Get "/v1/preflight/clock" ClockRequest => ClockAnswer, within 2 s;
    // From the leader of an update: the source, or the feeder of members that lack the current version.
    Post "/v1/update/begin" BeginRequest => UpdateStatus, within 5 s;
    Post "/v1/update/receive" ReceiveRequest => ReceiveResponse, within 2 s;
    Post "/v1/update/finish" FinishRequest => UpdateStatus, within 5 s;
    Post "/v1/update/activate" ActivateRequest => UpdateStatus, within 5 s;
    Post "/v1/update/abort" AbortRequest => Option<UpdateStatus>, within 5 s;
    Post "/v1/update/external/begin" ExternalBegin => UpdateStatus, within 5 s;
    Post "/v1/update/external/end" ExternalEnd => UpdateStatus, within 5 s;
    Get "/v1/update/status" StatusRequest => UpdateStatus, within 2 s;
    // From any member.
    Get "/v1/state" StateRequest => MemberState;
}

/// The coordinator has another assignment than in its last [`AnnounceResponse`]: the agent announces itself again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignmentChanged;

/// Asks for the clock of the receiver's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockRequest {}

/// Asks for the state of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateRequest {}

/// Asks for the progress of a rollout. The answer waits for a change, up to [`StatusRequest::LONG_POLL`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusRequest {
    /// The [`UpdateStatus::sequence`] that the caller knows; without it, the answer does not wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
}

impl StatusRequest {
    /// Longest wait of the receiver for a change.
    pub const LONG_POLL: Duration = Duration::from_secs(1);
}
