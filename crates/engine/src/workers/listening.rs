//! The socket to which the workers of one server connect, and which workers are admitted.
//!
//! Its name is abstract and valid for one install. A client must present the token, which only the server received. Decides whether all
//! ranks are connected, their devices, and their common capabilities; never the later messages ([`super`]).

use std::collections::BTreeMap;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};
use std::time::Duration;

use serde_json::json;
use tokio::net::UnixListener;

use super::hello::{Hello, Parts, Rules};
use super::{Opening, Said, Workers, next};
use crate::EngineError;
use crate::host::{HostDigest, HostMemory};
use crate::http::Until;

/// Not the prefix of agents' own sockets, which trainers search for.
const PREFIX: &str = "weightsync-feed/";
/// Longest time from the connection to the hello.
const SAY_HELLO: Duration = Duration::from_secs(5);
/// The digest of tensors in GPU memory, on the wire.
const ON_GPUS: &str = "gsum64";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Where {
    Host,
    Gpus,
}

pub(crate) struct Listening {
    url: String,
    name: String,
    ranks: u32,
    listener: UnixListener,
}

impl Listening {
    pub(crate) fn new(url: &str, ranks: u32) -> Result<Self, EngineError> {
        let name = format!("{PREFIX}{}", uuid::Uuid::new_v4().simple());
        let bound = SocketAddr::from_abstract_name(name.as_bytes()).and_then(|address| StdListener::bind_addr(&address));
        let bound = bound.and_then(|listener| listener.set_nonblocking(true).and_then(|()| UnixListener::from_std(listener)));
        let listener = bound.map_err(|cause| EngineError::Unsupported {
            what: format!("no socket can be made for the server's workers: {cause}"),
            next_step: "look at the limits of the agent's container".into(),
        })?;
        Ok(Self { url: url.to_owned(), name, ranks, listener })
    }

    /// Abstract name, without its leading NUL.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Waits for all ranks, chooses a digest, and passes the memory.
    pub(crate) async fn with_memory(self, rules: &Rules, memory: &HostMemory, until: Until) -> Result<(Workers, HostDigest), EngineError> {
        let there = self.all(rules, Where::Host, until).await?;
        let can = |digest: HostDigest| there.values().all(|(hello, _)| hello.can(digest.name()));
        let Some(digest) = [HostDigest::Xxh3_128, HostDigest::Blake3].into_iter().find(|digest| can(*digest)) else {
            let what = "the server's workers can compute no digest".to_owned();
            return Err(EngineError::Unsupported { what, next_step: "install the package blake3 or xxhash in its environment".into() });
        };
        let silence = rules.silence.as_secs_f64();
        let line = format!("{}\n", json!({"event": "memory", "bytes": memory.bytes, "digest": digest.name(), "silence": silence}));
        let opening = Opening { line, memory: Some(memory) };
        Ok((Workers::open(self.url, there, opening, rules, until).await?, digest))
    }

    /// Waits for all ranks, which copy from memory of their own GPUs.
    pub(crate) async fn on_gpus(self, rules: &Rules, until: Until) -> Result<Workers, EngineError> {
        let there = self.all(rules, Where::Gpus, until).await?;
        let line = format!("{}\n", json!({"event": "gpu", "digest": ON_GPUS, "silence": rules.silence.as_secs_f64()}));
        Workers::open(self.url, there, Opening { line, memory: None }, rules, until).await
    }

    async fn all(&self, rules: &Rules, bytes: Where, until: Until) -> Result<BTreeMap<u32, (Hello, Parts)>, EngineError> {
        let mut there = BTreeMap::new();
        while there.len() < self.ranks as usize {
            let missing = || (0..self.ranks).filter(|rank| !there.contains_key(rank)).map(|rank| rank.to_string()).collect::<Vec<_>>();
            let Ok(met) = tokio::time::timeout(until.left(), self.one(rules, bytes)).await else {
                let what = format!("rank {} did not connect to its agent", missing().join(", "));
                let next_step = format!("its workers must run in the agent's pod; {}", rules.otherwise);
                return Err(EngineError::Unsupported { what, next_step });
            };
            if let Some((hello, socket)) = met? {
                there.insert(hello.rank, (hello, socket));
            }
        }
        Ok(there)
    }

    /// The next connection from a worker of this server.
    async fn one(&self, rules: &Rules, bytes: Where) -> Result<Option<(Hello, Parts)>, EngineError> {
        let bad = |what: String| EngineError::BadReply { url: self.url.clone(), what };
        let (socket, _) = self.listener.accept().await.map_err(|cause| bad(format!("no worker can connect: {cause}")))?;
        let mut parts = Parts::new(socket);
        let said = tokio::time::timeout(SAY_HELLO, next(&mut parts.reader)).await;
        let hello = match said.ok().and_then(Result::ok) {
            Some(Said::Hello(hello)) if hello.token == rules.token => hello,
            other => {
                tracing::warn!(engine = self.url, ?other, "refused a client that is no worker of this server");
                return Ok(None);
            }
        };
        hello.fits(rules, bytes)?;
        if hello.ranks != self.ranks || hello.rank >= self.ranks {
            return Err(bad(format!("a worker says that it is rank {} of {}, the server says {}", hello.rank, hello.ranks, self.ranks)));
        }
        Ok(Some((hello, parts)))
    }
}

impl Hello {
    fn can(&self, digest: &str) -> bool {
        self.digests.iter().any(|name| name == digest)
    }

    fn fits(&self, rules: &Rules, bytes: Where) -> Result<(), EngineError> {
        let (rank, device) = (self.rank, &self.device);
        let refused = |what: String, next_step: &str| Err(EngineError::Unsupported { what, next_step: next_step.into() });
        match bytes {
            Where::Host if device != "cpu" => {
                let what = format!("rank {rank} computes on {device:?}, and shared memory of the host is for CPU");
                return refused(what, rules.otherwise);
            }
            Where::Gpus if device != "cuda" => {
                return refused(format!("rank {rank} computes on {device:?} and not on a GPU"), rules.otherwise);
            }
            Where::Gpus if self.gpu.is_none() || !self.can(ON_GPUS) => {
                let what = format!("the package weightsync of rank {rank} does not support GPU memory");
                return refused(what, "install the one of this agent's version in the server's environment");
            }
            Where::Host | Where::Gpus => {}
        }
        if rules.draft && !self.draft {
            let what = format!("the package weightsync of rank {rank} does not support draft models");
            return refused(what, "install the one of this agent's version in the server's environment");
        }
        Ok(())
    }
}
