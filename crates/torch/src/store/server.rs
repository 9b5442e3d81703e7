//! The server's sockets: who is let in, how long a client may be silent in the middle of something, and the end of them all.
//!
//! One task a connection, which owns both directions; what wakes another client goes to that client's task. A connection that breaks a rule
//! is closed with a line in the log; the others do not notice.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::table::{ClientId, Refusal, Table};
use super::wire::{Nonsense, Read, STOP_WAITING, read};
use super::{MAX_CLIENTS, MAX_REQUEST, PATIENCE, StoreError};

/// Bytes that are read at once.
const PART: usize = 16 << 10;
/// Rest after a connection that could not be accepted: the next one fails too, where descriptors are short.
const REST: Duration = Duration::from_millis(100);

/// A store of one epoch; dropping it closes its port and every connection.
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    stop: CancellationToken,
    accepting: JoinHandle<()>,
}

struct Shared {
    state: Mutex<State>,
    /// Something arrived that a local caller may wait for.
    changed: watch::Sender<()>,
    admitted: Box<dyn Fn(IpAddr) -> bool + Send + Sync>,
}

#[derive(Default)]
struct State {
    table: Table,
    /// Channel for the end of a client's wait.
    wakes: HashMap<ClientId, mpsc::UnboundedSender<()>>,
    next: ClientId,
}

/// Why a connection ended before its client closed it.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Nonsense(#[from] Nonsense),
    #[error(transparent)]
    Refusal(#[from] Refusal),
    #[error("it left a request half sent, or its replies untaken, for {PATIENCE:?}")]
    Stuck,
}

impl Server {
    /// Listens on `address` (port 0: a free one) and serves those whom `admitted` lets in, until `cancel` or until it is dropped.
    pub async fn bind(
        address: SocketAddr,
        admitted: impl Fn(IpAddr) -> bool + Send + Sync + 'static,
        cancel: &CancellationToken,
    ) -> Result<Self, StoreError> {
        let listen = async {
            let listener = TcpListener::bind(address).await?;
            let bound = listener.local_addr()?;
            Ok((listener, bound))
        };
        let (listener, bound) = listen.await.map_err(|cause| StoreError::Listen { address, cause })?;
        let shared = Arc::new(Shared { state: Mutex::default(), changed: watch::Sender::new(()), admitted: Box::new(admitted) });
        let stop = cancel.child_token();
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared), stop.clone()));
        Ok(Self { address: bound, shared, stop, accepting })
    }

    /// Where it listens; the port is the true one.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets a value under a key as it travels ([`super::prefixed`]), and remembers from then on who asks for it.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        let refused = |cause: String| StoreError::Refused { what: format!("the key {key}"), cause };
        if key.len() > super::MAX_KEY || value.len() > super::MAX_VALUE {
            return Err(refused(format!("{} bytes of key or {} bytes of value are too many", key.len(), value.len())));
        }
        let mut state = self.shared.state.lock();
        let woken = state.table.set_own(key.as_bytes(), value).map_err(|refusal| refused(refusal.to_string()))?;
        state.wake(woken);
        drop(state);
        self.shared.changed.send_replace(());
        Ok(())
    }

    /// A value.
    pub fn get(&self, key: &str) -> Option<Vec<u8>> {
        self.shared.state.lock().table.get(key.as_bytes()).map(<[u8]>::to_vec)
    }

    /// Ranks that have connected, announced themselves (added to [`super::HELLO`]) and are still connected, without the server's own
    /// process.
    pub fn clients(&self) -> usize {
        self.shared.state.lock().table.hellos()
    }

    /// Clients that asked for a key of [`set`](Self::set): who never asks for the group's id does not join the group.
    pub fn readers(&self, key: &str) -> usize {
        self.shared.state.lock().table.readers(key.as_bytes())
    }

    /// Waits until that many ranks have announced themselves.
    pub async fn wait_for_clients(&self, clients: usize, within: Duration) -> Result<(), StoreError> {
        let end = Instant::now() + within;
        let mut changed = self.shared.changed.subscribe();
        loop {
            changed.borrow_and_update();
            let seen = self.clients();
            if seen >= clients {
                return Ok(());
            }
            tokio::select! {
                () = self.stop.cancelled() => return Err(StoreError::Closed),
                waited = timeout_at(end, changed.changed()) => {
                    if waited.is_err() {
                        return Err(StoreError::Missing { seen, wanted: clients, within });
                    }
                }
            }
        }
    }

    /// Closes it and returns when its port is free.
    pub async fn close(mut self) {
        self.stop.cancel();
        // It ends by itself, because nothing that it waits for outlives the token.
        let _joined = (&mut self.accepting).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl State {
    fn wake(&self, woken: Vec<ClientId>) {
        for client in woken {
            // One that is gone needs no waking.
            let _gone = self.wakes.get(&client).map(|wake| wake.send(()));
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, stop: CancellationToken) {
    // Dropped with the loop, which closes every connection.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            Some(_ended) = connections.join_next(), if !connections.is_empty() => {}
            accepted = listener.accept() => match accepted {
                Ok((socket, peer)) => {
                    let address = peer.ip().to_canonical();
                    if !(shared.admitted)(address) {
                        tracing::warn!(%peer, "a stranger at a group's store is sent away");
                    } else if connections.len() >= MAX_CLIENTS {
                        tracing::warn!(%peer, "a group's store has {MAX_CLIENTS} connections: one more is sent away");
                    } else {
                        connections.spawn(connection(socket, peer, Arc::clone(&shared)));
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection to a group's store cannot be accepted");
                    tokio::time::sleep(REST).await;
                }
            },
        }
    }
}

async fn connection(socket: TcpStream, peer: SocketAddr, shared: Arc<Shared>) {
    let (wake, woken) = mpsc::unbounded_channel();
    let client = {
        let mut state = shared.state.lock();
        state.next += 1;
        let client = state.next;
        state.wakes.insert(client, wake);
        client
    };
    let present = Present { client, shared };
    match serve(socket, &present, woken).await {
        Ok(()) => {}
        Err(Ended::Io(error)) => tracing::debug!(%peer, %error, "a connection to a group's store broke"),
        Err(cause) => tracing::warn!(%peer, %cause, "a client of a group's store is sent away"),
    }
}

/// A client that is connected; forgotten when its task ends, however it ends.
struct Present {
    client: ClientId,
    shared: Arc<Shared>,
}

impl Drop for Present {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.table.leave(self.client);
        state.wakes.remove(&self.client);
        drop(state);
        self.shared.changed.send_replace(());
    }
}

async fn serve(mut socket: TcpStream, present: &Present, mut woken: mpsc::UnboundedReceiver<()>) -> Result<(), Ended> {
    socket.set_nodelay(true)?;
    let (mut received, mut reply) = (Vec::with_capacity(PART), Vec::new());
    let mut needed = 1;
    // The greeting has one end; later, bytes that arrive extend the time that a request may be under way.
    let greet_by = Instant::now() + PATIENCE;
    let (mut greeted, mut moved) = (false, Instant::now());
    loop {
        let patience = match (greeted, received.is_empty()) {
            (false, _) => Some(greet_by),
            (true, false) => Some(moved + PATIENCE),
            (true, true) => None,
        };
        tokio::select! {
            read = socket.read_buf(&mut received) => {
                if read? == 0 {
                    return Ok(());
                }
                moved = Instant::now();
            }
            Some(()) = woken.recv() => reply.push(STOP_WAITING),
            () = passed(patience) => return Err(Ended::Stuck),
        }
        while received.len() >= needed {
            (needed, greeted) = present.take(&mut received, &mut reply)?;
            write(&mut socket, &mut reply).await?;
        }
        write(&mut socket, &mut reply).await?;
    }
}

async fn passed(end: Option<Instant>) {
    match end {
        Some(end) => tokio::time::sleep_until(end).await,
        None => std::future::pending().await,
    }
}

/// Writes a reply, and empties it. Bytes that are taken extend the patience.
async fn write(socket: &mut TcpStream, reply: &mut Vec<u8>) -> Result<(), Ended> {
    let mut rest = reply.as_slice();
    while !rest.is_empty() {
        let taken = timeout(PATIENCE, socket.write(rest)).await.map_err(|_| Ended::Stuck)??;
        rest = rest.get(taken..).unwrap_or_default();
    }
    reply.clear();
    Ok(())
}

impl Present {
    /// Carries out whole requests in `received`, as long as their replies are few; gives how many bytes there must be before it is worth
    /// calling it again, and whether the client has greeted.
    fn take(&self, received: &mut Vec<u8>, reply: &mut Vec<u8>) -> Result<(usize, bool), Ended> {
        let mut at = 0;
        let mut state = self.shared.state.lock();
        let needed = loop {
            match read(received.get(at..).unwrap_or_default())? {
                Read::Partly(needed) => break needed,
                Read::Whole(request, length) => {
                    let woken = state.table.apply(self.client, &request, reply)?;
                    state.wake(woken);
                    at += length;
                }
            }
            // What is asked for faster than it is taken must not pile up here.
            if reply.len() > MAX_REQUEST {
                break 1;
            }
        };
        let greeted = state.table.greeted(self.client);
        drop(state);
        if at > 0 {
            received.drain(..at);
            self.shared.changed.send_replace(());
        }
        Ok((needed, greeted))
    }
}
