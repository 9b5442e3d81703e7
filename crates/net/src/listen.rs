//! Listeners of servers, on one address or on all that the pod has.
//!
//! Decides what the unspecified address of IPv6 means: both families, whatever the kernel's default for new sockets is, and all of IPv4 where
//! the kernel has no IPv6. It never takes another port than the one it was given, and never hides that the port is held.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket};

/// Connections that wait until the server takes them; as the standard library has it.
const BACKLOG: u32 = 1024;

/// The port on all addresses of both families.
pub const fn everywhere(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port)
}

/// Listens on `address`; on both families where it is `[::]`. Needs tokio's runtime.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    listen_by(address, TcpSocket::new_v6)
}

fn listen_by(address: SocketAddr, new_v6: impl FnOnce() -> io::Result<TcpSocket>) -> io::Result<TcpListener> {
    if address.is_ipv4() {
        return bind(TcpSocket::new_v4()?, address);
    }
    let every = address.ip() == Ipv6Addr::UNSPECIFIED;
    let bound = new_v6().and_then(|socket| {
        if every {
            sockopt::set_ipv6_v6only(&socket, false)?;
        }
        bind(socket, address)
    });
    match bound {
        Err(cause) if every && has_no_ipv6(&cause) => bind(TcpSocket::new_v4()?, (Ipv4Addr::UNSPECIFIED, address.port()).into()),
        bound => bound,
    }
}

fn bind(socket: TcpSocket, address: SocketAddr) -> io::Result<TcpListener> {
    // A server that starts again takes its port although connections of the one before linger.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// What a kernel answers that was started without IPv6, or has no address of it.
fn has_no_ipv6(cause: &io::Error) -> bool {
    matches!(Errno::from_io_error(cause), Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}

#[cfg(test)]
mod tests;
