//! Strangers that hold many silent connections to every port of an agent and of the coordinator, and come again when one is closed. They say
//! nothing, so they can spoil nothing but places.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use rustix::process::Pid;
use tokio::io::AsyncReadExt;
use tokio::net::TcpSocket;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::net::{HERE, Link, STRANGERS};

/// Connections from each address to each port: an address alone gets 64 places of a page, and all addresses together get more than all places.
const EACH: usize = 60;
/// A stranger that was turned away comes again after this.
const AGAIN: Duration = Duration::from_millis(250);
/// The longest time in which one tries to connect.
const CONNECT: Duration = Duration::from_secs(5);

/// They leave when it is dropped.
pub struct Strangers {
    _all: JoinSet<()>,
}

/// Ports of an agent, and the port of the coordinator that it was started for.
pub fn ports(link: &Link, agent: Pid) -> Result<Vec<SocketAddr>, String> {
    let environment = std::fs::read(format!("/proc/{}/environ", agent.as_raw_nonzero())).map_err(|error| error.to_string())?;
    let texts = environment.split(|byte| *byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok());
    let mut urls = texts.filter_map(|text| text.strip_prefix("WEIGHTSYNC_CONTROLLER_URL=https://"));
    let coordinator = urls.find_map(|address| address.parse().ok()).ok_or("the agent does not know its coordinator")?;
    let mut ports = link.listening();
    if ports.len() < 3 {
        return Err(format!("an agent listens on three ports at least: {ports:?}"));
    }
    ports.push(coordinator);
    Ok(ports)
}

impl Strangers {
    /// Begins to connect.
    pub fn come(ports: &[SocketAddr]) -> Self {
        let mut all = JoinSet::new();
        for port in ports {
            for from in STRANGERS {
                for _ in 0..EACH {
                    all.spawn(stay(from, *port));
                }
            }
        }
        Self { _all: all }
    }
}

async fn stay(from: Ipv4Addr, to: SocketAddr) {
    debug_assert_ne!(from, HERE, "the coordinator is no stranger");
    loop {
        if let Ok(socket) = TcpSocket::new_v4()
            && socket.bind(SocketAddr::new(from.into(), 0)).is_ok()
            && let Ok(Ok(mut stream)) = timeout(CONNECT, socket.connect(to)).await
        {
            // It sends nothing, whatever it receives.
            let mut heard = [0; 64];
            while stream.read(&mut heard).await.is_ok_and(|read| read > 0) {}
        }
        sleep(AGAIN).await;
    }
}
