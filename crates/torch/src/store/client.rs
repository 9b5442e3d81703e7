//! A client of a TCPStore, as a rank of torch is one. Decides nothing about groups; every call has a deadline.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::wire::{MAGIC, READY, Request, STOP_WAITING, WAIT_CANCELED};
use super::{HELLO, MAX_VALUE, StoreError};

/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(50);

/// A connection to a store. Keys are given as they travel ([`super::prefixed`]).
pub struct Client {
    socket: TcpStream,
    within: Duration,
    /// A call was dropped, or failed, in the middle: what comes next may belong to it.
    spoiled: bool,
}

impl Client {
    /// Connects, again and again as torch does until `within` passed, and greets. `within` holds for every later call too, where the call
    /// has no time of its own.
    pub async fn connect(address: SocketAddr, within: Duration) -> Result<Self, StoreError> {
        let end = Instant::now() + within;
        let unreachable = |cause: String| StoreError::Unreachable { address, within, cause };
        let mut last = "no answer".to_owned();
        loop {
            match timeout_at(end, TcpStream::connect(address)).await {
                Err(_) => return Err(unreachable(last)),
                Ok(Err(error)) => last = error.to_string(),
                Ok(Ok(socket)) => {
                    socket.set_nodelay(true)?;
                    let mut client = Self { socket, within, spoiled: false };
                    client.greet().await?;
                    return Ok(client);
                }
            }
            if timeout_at(end, tokio::time::sleep(RETRY)).await.is_err() {
                return Err(unreachable(last));
            }
        }
    }

    async fn greet(&mut self) -> Result<(), StoreError> {
        let nonce = std::process::id();
        let what = "greeting";
        let mut message = Vec::new();
        Request::Validate(MAGIC).write(&mut message);
        Request::Ping(nonce).write(&mut message);
        let within = self.within;
        let echoed: [u8; 4] = self
            .limited(what, within, async |socket| {
                socket.write_all(&message).await?;
                array(socket).await
            })
            .await?;
        if u32::from_le_bytes(echoed) == nonce { Ok(()) } else { Err(StoreError::Nonsense { what }) }
    }

    /// Says that this rank has connected. Gives how many have.
    pub async fn hello(&mut self) -> Result<i64, StoreError> {
        self.add(HELLO, 1).await
    }

    /// Sets a value. Torch's protocol has no answer to it.
    pub async fn set(&mut self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.ask("set", &Request::Set(key.as_bytes(), value), async |_| Ok(())).await
    }

    /// Adds to a number; gives the sum.
    pub async fn add(&mut self, key: &str, delta: i64) -> Result<i64, StoreError> {
        self.ask("add", &Request::Add(key.as_bytes(), delta), async |socket| array(socket).await.map(i64::from_le_bytes)).await
    }

    /// Sets `desired` if the value is `expected` (or there is none, and `expected` is empty); returns the resulting value.
    pub async fn compare_set(&mut self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.ask("compare and set", &Request::CompareSet(key.as_bytes(), expected, desired), blob).await
    }

    /// Whether all keys exist.
    pub async fn check(&mut self, keys: &[&str]) -> Result<bool, StoreError> {
        let keys = keys.iter().map(|key| key.as_bytes()).collect();
        self.ask("check", &Request::Check(keys), async |socket| Ok(array(socket).await? == [READY])).await
    }

    /// Waits until a key exists, up to `within`; then the wait is cancelled.
    pub(super) async fn wait(&mut self, key: &str, within: Duration) -> Result<(), StoreError> {
        let what = "wait";
        let mut message = Vec::new();
        Request::Wait(vec![key.as_bytes()]).write(&mut message);
        let waited = self.limited(what, within, async |socket| {
            socket.write_all(&message).await?;
            array(socket).await
        });
        match waited.await {
            Ok([STOP_WAITING]) => Ok(()),
            Ok(_) => Err(self.nonsense(what)),
            Err(StoreError::Silent { .. }) => {
                // Nothing was read, so the connection is in order once the wait is taken back.
                self.spoiled = false;
                let answered = self.ask(what, &Request::CancelWait, async |socket| {
                    let [first] = array(socket).await?;
                    // The key came in the same moment: its answer is first, the cancellation's follows.
                    if first == STOP_WAITING { array(socket).await } else { Ok([first]) }
                });
                if answered.await? != [WAIT_CANCELED] {
                    return Err(self.nonsense(what));
                }
                Err(StoreError::Silent { what, within })
            }
            Err(other) => Err(other),
        }
    }

    /// Waits until a key exists, then reads it, as torch's `get` does.
    pub async fn get(&mut self, key: &str, within: Duration) -> Result<Vec<u8>, StoreError> {
        self.wait(key, within).await?;
        self.ask("get", &Request::Get(key.as_bytes()), blob).await
    }

    async fn ask<T>(
        &mut self,
        what: &'static str,
        request: &Request<'_>,
        answer: impl AsyncFnOnce(&mut TcpStream) -> std::io::Result<T>,
    ) -> Result<T, StoreError> {
        let mut message = Vec::new();
        request.write(&mut message);
        let within = self.within;
        self.limited(what, within, async |socket| {
            socket.write_all(&message).await?;
            answer(socket).await
        })
        .await
    }

    /// Runs one exchange. One that is dropped or fails half-way leaves the connection unusable.
    async fn limited<T>(
        &mut self,
        what: &'static str,
        within: Duration,
        exchange: impl AsyncFnOnce(&mut TcpStream) -> std::io::Result<T>,
    ) -> Result<T, StoreError> {
        if std::mem::replace(&mut self.spoiled, true) {
            return Err(StoreError::Nonsense { what });
        }
        let done = timeout(within, exchange(&mut self.socket)).await.map_err(|_| StoreError::Silent { what, within })??;
        self.spoiled = false;
        Ok(done)
    }

    fn nonsense(&mut self, what: &'static str) -> StoreError {
        self.spoiled = true;
        StoreError::Nonsense { what }
    }
}

async fn array<const N: usize>(socket: &mut TcpStream) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    socket.read_exact(&mut bytes).await?;
    Ok(bytes)
}

async fn blob(socket: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let length = u64::from_le_bytes(array(socket).await?);
    let length = usize::try_from(length).ok().filter(|length| *length <= MAX_VALUE);
    let length = length.ok_or_else(|| std::io::Error::other("a value that is too long"))?;
    let mut bytes = vec![0; length];
    socket.read_exact(&mut bytes).await?;
    Ok(bytes)
}
