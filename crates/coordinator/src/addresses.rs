//! Decides at which addresses the coordinator may connect to the agent of a pod: the pod's own. Must never take the agent's word for it: a
//! pod could have the controller connect to any address of its network.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use weightsync_core::protocol::Rejection;

/// Which addresses are a pod's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Addresses {
    /// By the pod's UID: those that the API server knows. A pod without one is refused until it has one.
    Known(HashMap<String, Vec<IpAddr>>),
    /// The one that the agent calls from; agents of this host may be found at any of its loopback addresses.
    Callers,
}

impl Default for Addresses {
    fn default() -> Self {
        Self::Known(HashMap::new())
    }
}

/// Why an announced address is not taken.
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
    /// Whether it ends by itself.
    pub(crate) fn passes(&self) -> bool {
        matches!(self, Self::NotKnown)
    }
}

impl From<AddressProblem> for Rejection {
    fn from(problem: AddressProblem) -> Self {
        // The pod stays claimed where the address is wrong: its engine serves on.
        Self { message: problem.to_string(), retryable: !matches!(problem, AddressProblem::NotOne(_)) }
    }
}

impl Addresses {
    /// Checks the address that the agent of a pod announces; `from` is where it calls from, where that is known.
    pub(crate) fn check(&self, pod_uid: &str, from: Option<IpAddr>, announced: &str) -> Result<(), AddressProblem> {
        let Ok(address) = announced.parse::<SocketAddr>() else {
            return Err(AddressProblem::NotOne(announced.to_owned()));
        };
        // A v4 address as a dual-stack listener shows it.
        let (address, from) = (address.ip().to_canonical(), from.map(|from| from.to_canonical()));
        // Anyone who called such an address from another host would call itself.
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
