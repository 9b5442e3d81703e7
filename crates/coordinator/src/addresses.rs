//! Decides at which addresses the coordinator may connect to a pod's agent: only at the pod's own. It must never trust the agent for that:
//! a pod could make the controller connect to any address of its network.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use weightsync_core::protocol::Rejection;

/// Which addresses are a pod's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Addresses {
    /// By the pod's UID: those that the API server knows. A pod without one is refused until it has one.
    Known(HashMap<String, Vec<IpAddr>>),
    /// Only the address that the agent calls from. An agent of this host may use any loopback address of the host.
    Callers,
}

impl Default for Addresses {
    fn default() -> Self {
        Self::Known(HashMap::new())
    }
}

/// Why an announced address is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AddressProblem {
    #[error("the agent announces {0}, which is no address (IP:PORT)")]
    NotOne(String),
    #[error(
        "the agent announces {announced} and calls from {from}: other pods do not find it there; give it the pod's address (POD_IP from \
         status.podIP)"
    )]
    OfOneHost { announced: String, from: IpAddr },
    #[error("the agent announces {announced}, and the pod's own address is {own}: give it the pod's address (POD_IP from status.podIP)")]
    Foreign { announced: String, own: String },
    #[error("the API server does not know the pod's address yet")]
    NotKnown,
}

impl AddressProblem {
    /// Whether the problem may end by itself.
    pub(crate) fn passes(&self) -> bool {
        matches!(self, Self::NotKnown)
    }
}

impl From<AddressProblem> for Rejection {
    fn from(problem: AddressProblem) -> Self {
        // The pod stays claimed although the address is wrong: its engine continues to serve.
        Self { message: problem.to_string(), retryable: !matches!(problem, AddressProblem::NotOne(_)) }
    }
}

impl Addresses {
    /// Checks the address that a pod's agent announces. `from` is the caller's address, if it is known.
    pub(crate) fn check(&self, pod_uid: &str, from: Option<IpAddr>, announced: &str) -> Result<(), AddressProblem> {
        let Ok(address) = announced.parse::<SocketAddr>() else {
            return Err(AddressProblem::NotOne(announced.to_owned()));
        };
        // A dual-stack listener reports an IPv4 address as an IPv6 one.
        let (address, from) = (address.ip().to_canonical(), from.map(|from| from.to_canonical()));
        // On another host, such an address leads to the caller itself.
        if let Some(from) = from.filter(|from| address.is_unspecified() || address.is_loopback() && !from.is_loopback()) {
            return Err(AddressProblem::OfOneHost { announced: announced.to_owned(), from });
        }
        let own: Vec<IpAddr> = match self {
            Self::Known(pods) => pods.get(pod_uid).cloned().unwrap_or_default(),
            Self::Callers => from.into_iter().collect(),
        };
        if own.is_empty() {
            return Err(AddressProblem::NotKnown);
        }
        let on_this_host = *self == Self::Callers && address.is_loopback() && own.iter().any(IpAddr::is_loopback);
        if on_this_host || own.iter().any(|own| own.to_canonical() == address) {
            return Ok(());
        }
        let own = own.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Err(AddressProblem::Foreign { announced: announced.to_owned(), own })
    }
}
