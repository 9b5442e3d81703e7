//! The name of the socket between a trainer and its agent, and how each side finds it.
//!
//! An abstract name (Linux, unix(7)) has no path: it works on a read-only root and vanishes with its process. It lives in the network
//! namespace, which the containers of a pod share; with hostNetwork the name is the host's, so it carries the pod's UID.

use std::fmt;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

const PREFIX: &str = "weightsync/";

/// Longest abstract name: `sun_path` without its leading NUL.
const LONGEST: usize = 107;

/// An abstract socket name, without the leading NUL (shown, as elsewhere in Linux, with a leading `@`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketName(String);

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SocketError {
    #[error("\"{name}\" is no socket name: 1 to {LONGEST} bytes, without a NUL")]
    BadName { name: String },
    #[error("{name} is taken: another agent serves this pod, or an old one has not ended yet")]
    Taken { name: SocketName },
    #[error("{name}: {source}")]
    Io { name: SocketName, source: io::Error },
    #[error("no agent listens in this network namespace: start it, or name its socket (WEIGHTSYNC_SOCKET)")]
    NoAgent,
    #[error("several agents listen here ({names}): name one (WEIGHTSYNC_SOCKET), as pods on the host's network must")]
    Several { names: String },
}

impl SocketName {
    /// The socket of the agent in the pod of that UID.
    pub fn of_pod(uid: &str) -> Result<Self, SocketError> {
        format!("{PREFIX}{uid}").parse()
    }

    /// The only agent's socket in this network namespace. The text is that of `/proc/net/unix`.
    pub fn discover(proc_net_unix: &str) -> Result<Self, SocketError> {
        let mut names: Vec<_> = proc_net_unix.lines().filter_map(listening_name).collect();
        names.sort_unstable();
        names.dedup();
        match names.as_slice() {
            [] => Err(SocketError::NoAgent),
            [name] => name.parse(),
            _ => Err(SocketError::Several { names: names.join(", ") }),
        }
    }

    /// Listens; the name is free again when the listener is closed, however its process ended.
    pub fn listen(&self) -> Result<UnixListener, SocketError> {
        let listener = self.address().and_then(|address| UnixListener::bind_addr(&address));
        let listener = listener.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        listener.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => SocketError::Taken { name: self.clone() },
            _ => SocketError::Io { name: self.clone(), source },
        })
    }

    /// Connects; answers at once, as the other side is a queue of this machine.
    pub fn connect(&self) -> Result<UnixStream, SocketError> {
        let stream = self.address().and_then(|address| UnixStream::connect_addr(&address));
        stream.map_err(|source| match source.kind() {
            io::ErrorKind::ConnectionRefused => SocketError::NoAgent,
            _ => SocketError::Io { name: self.clone(), source },
        })
    }

    fn address(&self) -> io::Result<SocketAddr> {
        SocketAddr::from_abstract_name(self.0.as_bytes())
    }
}

/// The name in a line of `/proc/net/unix` (proc(5)) when it is an agent's and somebody listens on it.
fn listening_name(line: &str) -> Option<&str> {
    const ACCEPTS_CONNECTIONS: u32 = 1 << 16;
    let mut fields = line.split_ascii_whitespace();
    let flags = u32::from_str_radix(fields.nth(3)?, 16).ok()?;
    let name = fields.nth(3)?.strip_prefix('@')?;
    (flags & ACCEPTS_CONNECTIONS != 0 && name.starts_with(PREFIX)).then_some(name)
}

impl std::str::FromStr for SocketName {
    type Err = SocketError;

    /// Takes the name with or without its `@`.
    fn from_str(name: &str) -> Result<Self, SocketError> {
        let bare = name.strip_prefix('@').unwrap_or(name);
        if bare.is_empty() || bare.len() > LONGEST || bare.contains('\0') {
            return Err(SocketError::BadName { name: name.to_owned() });
        }
        Ok(Self(bare.to_owned()))
    }
}

impl fmt::Display for SocketName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "@{}", self.0)
    }
}

#[cfg(test)]
mod tests;
