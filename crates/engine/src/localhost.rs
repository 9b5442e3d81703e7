//! The loopback name of a pod, without a resolver: a container's `/etc/hosts` may lack it.
//!
//! Decides the order of the two addresses. An engine that listens on `::` may answer at ::1 alone (uvicorn sets `IPV6_V6ONLY`), and one that
//! listens on 0.0.0.0 at 127.0.0.1 alone.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Host of a server in the same pod, at whichever loopback address it answers.
pub const LOCALHOST: &str = "localhost";

/// Addresses at which a server of this pod is tried, in this order.
pub(super) fn addresses(port: u16) -> Vec<SocketAddr> {
    let has_ipv6 = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
    let ipv6 = has_ipv6.then_some(IpAddr::V6(Ipv6Addr::LOCALHOST));
    std::iter::once(IpAddr::V4(Ipv4Addr::LOCALHOST)).chain(ipv6).map(|ip| SocketAddr::new(ip, port)).collect()
}
