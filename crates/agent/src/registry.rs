//! The engines that registered with the agent of their pod.
//!
//! Decides which servers may register: those of this pod, and at most [`MOST_ENGINES`]. A registration lasts as long as the connection of the
//! process that made it, so it never outlives that process. The controller decides which engines get an endpoint.

mod report;

use std::collections::BTreeMap;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;

use tokio::sync::watch;

pub(crate) use self::report::Reporter;
use weightsync_core::protocol::MOST_ENGINES;
use weightsync_engine::ApiKey;

/// The engines that are registered now.
pub struct Registry {
    /// Address of the pod.
    pod: IpAddr,
    engines: watch::Sender<Engines>,
}

#[derive(Default)]
pub(crate) struct Engines {
    by_port: BTreeMap<u16, Entry>,
    /// Number of the last registration.
    last: u64,
}

/// What a registration says of its engine, apart from its port.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Registered {
    /// Where its server listens, if the registration names it.
    pub address: Option<IpAddr>,
    /// The key of its server, if it has one. The key of the agent's own environment is never sent there: any container of the pod may
    /// register a port.
    pub api_key: Option<ApiKey>,
}

struct Entry {
    engine: Registered,
    /// Number of the registration that holds it.
    number: u64,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum RegisterError {
    #[error("port 0 is no port of a server: register the port on which the engine listens")]
    NoPort,
    #[error("{address} is no address of this pod ({pod}): an engine registers with the agent of its own pod")]
    OtherPod { address: IpAddr, pod: IpAddr },
    #[error("{0}")]
    Key(String),
    #[error("{MOST_ENGINES} engines are registered already, which is the most for one pod")]
    TooMany,
}

/// The registration of one engine; ends when it is dropped.
pub(crate) struct Registration {
    registry: Arc<Registry>,
    port: u16,
    number: u64,
}

impl Registry {
    /// No engine is registered yet. `pod` is the address of the pod.
    pub fn new(pod: IpAddr) -> Arc<Self> {
        Arc::new(Self { pod, engines: watch::Sender::default() })
    }

    /// Registers the engine at a port. A second registration of a port replaces the first: a new process has that port now. With another
    /// address or key it is another engine.
    pub(crate) fn register(self: &Arc<Self>, port: u16, engine: Registered) -> Result<Registration, RegisterError> {
        if port == 0 {
            return Err(RegisterError::NoPort);
        }
        if let Some(address) = engine.address.filter(|address| *address != self.pod && !is_of_this_pod(*address)) {
            return Err(RegisterError::OtherPod { address, pod: self.pod });
        }
        let mut number = None;
        self.engines.send_if_modified(|engines| {
            let before = engines.by_port.get(&port).map(|entry| entry.engine.clone());
            if before.is_none() && engines.by_port.len() >= MOST_ENGINES {
                return false;
            }
            engines.last += 1;
            number = Some(engines.last);
            let another = before.as_ref() != Some(&engine);
            engines.by_port.insert(port, Entry { engine: engine.clone(), number: engines.last });
            another
        });
        let number = number.ok_or(RegisterError::TooMany)?;
        tracing::info!(port, "an engine registered");
        Ok(Registration { registry: self.clone(), port, number })
    }

    /// Ports of the registered engines, in ascending order.
    pub(crate) fn ports(&self) -> Vec<u16> {
        self.engines.borrow().by_port.keys().copied().collect()
    }

    /// What the registration of a port says of its engine.
    pub(crate) fn of(&self, port: u16) -> Option<Registered> {
        self.engines.borrow().by_port.get(&port).map(|entry| entry.engine.clone())
    }

    /// Marks each change of the registered engines.
    pub(crate) fn changes(&self) -> watch::Receiver<Engines> {
        self.engines.subscribe()
    }
}

impl Registration {
    pub(crate) const fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.engines.send_if_modified(|engines| {
            let held = engines.by_port.get(&self.port).is_some_and(|entry| entry.number == self.number);
            if held {
                tracing::info!(port = self.port, "the registration of an engine ended");
                engines.by_port.remove(&self.port);
            }
            held
        });
    }
}

/// Whether the kernel has the address: a pod on a dual-stack cluster has one of each family, and `POD_IP` names the first only.
fn is_of_this_pod(address: IpAddr) -> bool {
    address.is_loopback() || !address.is_unspecified() && !address.is_multicast() && TcpListener::bind((address, 0)).is_ok()
}

#[cfg(test)]
mod tests;
