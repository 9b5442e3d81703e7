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
mod tests {
    use super::*;

    const TABLE: &str = "\
Num       RefCount Protocol Flags    Type St Inode Path
ffff8: 00000002 00000000 00010000 0001 01 20001 @weightsync/7c3e
ffff9: 00000003 00000000 00000000 0001 03 20002 @weightsync/7c3e
ffffa: 00000003 00000000 00000000 0001 03 20003 @weightsync/gone
ffffb: 00000002 00000000 00010000 0001 01 20004 /run/other.sock
ffffc: 00000002 00000000 00010000 0001 01 20005
";

    #[test]
    fn the_only_agent_that_listens_is_found_and_connections_are_not_taken_for_agents() {
        assert_eq!(SocketName::discover(TABLE).unwrap().to_string(), "@weightsync/7c3e");
        assert!(matches!(SocketName::discover("nothing here"), Err(SocketError::NoAgent)));
    }

    #[test]
    fn two_agents_are_named_and_not_guessed() {
        let two = format!("{TABLE}ffffd: 00000002 00000000 00010000 0001 01 20006 @weightsync/8d4f\n");
        let error = SocketName::discover(&two).unwrap_err().to_string();
        assert!(error.contains("weightsync/7c3e, weightsync/8d4f"), "{error}");
    }

    #[test]
    fn names_are_taken_with_and_without_their_sign_and_bad_ones_refused() {
        assert_eq!("@weightsync/a".parse::<SocketName>().unwrap(), SocketName::of_pod("a").unwrap());
        assert!("".parse::<SocketName>().is_err());
        assert!("@".parse::<SocketName>().is_err());
        assert!("a\0b".parse::<SocketName>().is_err());
        assert!("x".repeat(108).parse::<SocketName>().is_err());
    }

    #[test]
    fn a_name_serves_one_agent_and_is_free_after_it() {
        let name = SocketName::of_pod(&format!("test-{}", std::process::id())).unwrap();
        assert!(matches!(name.connect(), Err(SocketError::NoAgent)));
        let listener = name.listen().unwrap();
        assert!(matches!(name.listen(), Err(SocketError::Taken { .. })));
        name.connect().unwrap();
        drop(listener);
        name.listen().unwrap();
    }
}
