//! Ports for engines that receive their port before they listen.
//!
//! Uses no port from the range that the kernel gives to connections: such a port is often taken before the engine has started.

use std::collections::HashSet;
use std::io;
use std::net::{Ipv4Addr, TcpListener};

use parking_lot::Mutex;

/// Attempts outside that range before the kernel chooses a port.
const TRIES: usize = 200;
/// Lower ports belong to well-known services.
const LOWEST: u16 = 10_240;

/// Ports that this process has given out.
static GIVEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);

/// A free port of 127.0.0.1, never the same twice.
pub fn free_port() -> io::Result<u16> {
    let below = ephemeral().unwrap_or(32_768);
    for _ in 0..TRIES {
        let port = rand::random_range(LOWEST..below.max(LOWEST + 1));
        let mut given = GIVEN.lock();
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() && given.get_or_insert_default().insert(port) {
            return Ok(port);
        }
    }
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// The first port of the range that the kernel gives to connections.
fn ephemeral() -> Option<u16> {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    range.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests;
