//! One client of the trainer's socket, from its first line to its last.
//!
//! Decides which lines fit the moment, ends a publish that no one else ends, and says something at least once a second while one runs.
//! It never reads a tensor and never decides about versions: it hands a publish to the queue and passes the outcome on.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tokio::net::UnixStream;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::codec::{FramedRead, LinesCodec, LinesCodecError};
use tokio_util::sync::CancellationToken;

use super::external::ExternalSide;
use super::publish::{From, Publish, Running};
use super::ring::RingOfConnection;
use super::wire::{Outbox, Outgoing};
use super::{Refused, Shared};
use crate::registry::{RegisterError, Registered, Registration};
use weightsync_core::protocol::{CLIENT_PROTOCOL, ClientReply, ClientRequest, PublishError, PublishErrorCode};
use weightsync_engine::ApiKey;

/// A client says hello within this long.
const HELLO: Duration = Duration::from_secs(10);

/// Longest hello, in bytes.
const LONGEST_HELLO: usize = 4 << 10;

/// Longest line after the hello, in bytes: a list of 100 000 tensors takes a fifth of it.
const LONGEST_LINE: usize = 64 << 20;

/// A client that leaves more lines than this unread does not read.
const MOST_UNREAD: usize = 1024;

/// How often progress is passed on, and deadlines are looked at.
const TICK: Duration = Duration::from_millis(100);

const TICKS_PER_SIGN: u32 = 10;

/// Serves a client until it leaves, talks nonsense, or `shutdown`.
pub(super) async fn serve(stream: UnixStream, shared: Arc<Shared>, shutdown: CancellationToken) {
    let credentials = stream.peer_cred();
    let (read, write) = stream.into_split();
    let (outbox, lines) = Outbox::new();
    let mut writer = tokio::spawn(lines.write_to(write));
    let lines = FramedRead::new(read, LinesCodec::new_with_max_length(LONGEST_HELLO));
    let external = ExternalSide::new(Arc::clone(&shared.external), outbox.clone());
    let mut connection =
        Connection { shared, outbox, running: None, external, ring: RingOfConnection::default(), watching: false, engines: Vec::new() };
    let ended = tokio::select! {
        ended = connection.talk(credentials, lines) => ended,
        written = &mut writer => Err(Refused::Io(match written {
            Ok(Err(error)) => error.to_string(),
            _ => "its writer ended".into(),
        })),
        () = shutdown.cancelled() => Ok(()),
    };
    if let Err(refused) = &ended {
        tracing::warn!(%refused, "a client's connection ends");
        connection.outbox.say(ClientReply::Error { error: refused.publish_error() });
    }
    connection.leave(&ended.map_or_else(|refused| refused.to_string(), |()| "it closed the connection".into()));
    connection.outbox.put(Outgoing::Close);
    // The last words leave before the socket closes.
    if !writer.is_finished() && tokio::time::timeout(HELLO, &mut writer).await.is_err() {
        writer.abort();
    }
}

type LinesOfClient = FramedRead<tokio::net::unix::OwnedReadHalf, LinesCodec>;

struct Connection {
    shared: Arc<Shared>,
    outbox: Outbox,
    running: Option<Running>,
    external: ExternalSide,
    ring: RingOfConnection,
    watching: bool,
    /// The engines that it registered; at most as many as one pod may have.
    engines: Vec<Registration>,
}

impl Connection {
    async fn talk(&mut self, credentials: std::io::Result<tokio::net::unix::UCred>, mut lines: LinesOfClient) -> Result<(), Refused> {
        let hello = tokio::time::timeout(HELLO, lines.next()).await.map_err(|_| Refused::NoHello)?;
        let Some(hello) = hello else { return Ok(()) };
        self.shared.admit(credentials.map_err(|error| Refused::Io(error.to_string()))?.uid())?;
        self.greet(&request(hello)?)?;
        let mut lines = lines.map_decoder(|_| LinesCodec::new_with_max_length(LONGEST_LINE));
        let mut roster = self.shared.roster.clone();
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut ticks = 0_u32;
        loop {
            tokio::select! {
                line = lines.next() => match line {
                    Some(line) => self.hear(request(line)?)?,
                    None => return Ok(()),
                },
                reply = Running::next(&mut self.running) => self.pass_on(reply),
                () = self.external.next() => {}
                Ok(()) = roster.changed(), if self.watching => {
                    let roster = roster.borrow_and_update().clone();
                    self.outbox.say(ClientReply::Roster { roster });
                }
                _ = tick.tick(), if self.running.is_some() || self.external.listens() => {
                    ticks = ticks.wrapping_add(1);
                    self.tick(ticks.is_multiple_of(TICKS_PER_SIGN));
                }
            }
            if self.outbox.waiting() > MOST_UNREAD {
                return Err(Refused::Nonsense(format!("it left {MOST_UNREAD} lines unread")));
            }
        }
    }

    fn greet(&self, hello: &ClientRequest) -> Result<(), Refused> {
        let ClientRequest::Hello { protocol, client } = hello else {
            return Err(Refused::Nonsense("the first line must be hello".into()));
        };
        if *protocol != CLIENT_PROTOCOL {
            return Err(Refused::Protocol {
                client: client.chars().take(100).collect(),
                protocol: *protocol,
                agent: self.shared.agent.clone(),
            });
        }
        let version = self.shared.roster.borrow().version;
        self.outbox.say(ClientReply::Welcome { protocol: CLIENT_PROTOCOL, agent: self.shared.agent.clone(), version });
        Ok(())
    }

    fn hear(&mut self, request: ClientRequest) -> Result<(), Refused> {
        match (&request, &self.shared.engines) {
            (ClientRequest::Register { .. }, None) => return Err(Refused::NoEngines),
            (ClientRequest::Register { .. } | ClientRequest::Hello { .. } | ClientRequest::Roster { .. }, _) | (_, None) => {}
            (_, Some(_)) => return Err(Refused::NoTrainer),
        }
        match request {
            ClientRequest::Register { port, address, api_key } => {
                let Some(registry) = &self.shared.engines else { return Err(Refused::NoEngines) };
                let api_key = api_key.map(|key| ApiKey::new(&key.0)).transpose().map_err(|error| RegisterError::Key(error.to_string()))?;
                let registration = registry.register(port, Registered { address, api_key })?;
                self.engines.retain(|earlier| earlier.port() != port);
                self.engines.push(registration);
                self.outbox.say(ClientReply::Registered { port });
            }
            ClientRequest::Hello { .. } => return Err(Refused::Nonsense("hello came twice".into())),
            ClientRequest::Publish { version, tensors, queue, activation, repeatable, timeout_ms, gpu } => {
                self.start(Publish { version, queue, activation, timeout_ms }, From::Tensors { tensors, repeatable, gpu })?;
            }
            ClientRequest::PublishCheckpoint { version, path, queue, activation, timeout_ms } => {
                self.start(Publish { version, queue, activation, timeout_ms }, From::Checkpoint { path })?;
            }
            ClientRequest::Roster { watch } => {
                self.watching = watch;
                let roster = self.shared.roster.borrow().clone();
                self.outbox.say(ClientReply::Roster { roster });
            }
            // Without a running publish these were under way when it ended: nothing is wrong with the client.
            ClientRequest::Filled { attempt, sequence, slot, event } => {
                if let Some(running) = &self.running {
                    running.filled(attempt, sequence, slot, event).map_err(Refused::Nonsense)?;
                }
            }
            ClientRequest::Opened { ring, events } => {
                if let Some(running) = &self.running {
                    running.opened(ring, events);
                }
            }
            ClientRequest::Closed { ring } => self.shared.gpu_rings.closed(ring),
            ClientRequest::Unopened { ring, reason } => {
                if let Some(running) = &self.running {
                    running.unopened(ring, &reason);
                }
            }
            ClientRequest::End { attempt } => {
                if let Some(running) = &self.running {
                    running.ended(attempt).map_err(Refused::Nonsense)?;
                }
            }
            ClientRequest::Activate { version } => {
                if let Some(running) = &self.running {
                    running.activate(version).map_err(Refused::Nonsense)?;
                }
            }
            ClientRequest::WatchEpochs => self.external.watch(),
            ClientRequest::External { epoch, version, digest, engine_version, timeout_ms } => {
                self.external.begin(epoch, version, digest, engine_version, timeout_ms).map_err(Refused::Nonsense)?;
            }
            ClientRequest::Report(report) => self.external.report(report),
            ClientRequest::Conclude => self.external.conclude(),
            ClientRequest::Broken { epoch, reason } => self.external.broken(epoch, &reason),
            ClientRequest::Cancel { reason } => {
                self.external.cancel(&reason);
                if let Some(running) = &mut self.running {
                    running.cancel(&reason.chars().take(500).collect::<String>(), Instant::now());
                    self.shared.queue.sweep();
                }
            }
        }
        Ok(())
    }

    fn start(&mut self, publish: Publish, from: From) -> Result<(), Refused> {
        if let Some(running) = &self.running {
            let what = format!("version {} was published on a connection whose version {} still runs", publish.version, running.version());
            return Err(Refused::Nonsense(what));
        }
        match publish.start(from, &self.shared, &self.outbox, &self.ring) {
            Ok(running) => self.running = Some(running),
            Err(error) => self.outbox.say(ClientReply::Error { error }),
        }
        Ok(())
    }

    /// Passes a report on; an outcome ends the publish.
    fn pass_on(&mut self, reply: ClientReply) {
        if matches!(reply, ClientReply::Done { .. } | ClientReply::Error { .. }) {
            self.running = None;
        }
        self.outbox.say(reply);
    }

    fn tick(&mut self, sign_of_life: bool) {
        self.external.tick(Instant::now());
        let Some(running) = &mut self.running else {
            if sign_of_life {
                self.outbox.say(ClientReply::Alive);
            }
            return;
        };
        if let Some(progress) = running.progress() {
            self.outbox.say(progress);
        } else if sign_of_life {
            self.outbox.say(ClientReply::Alive);
        }
        let now = Instant::now();
        if running.is_late(now) {
            self.shared.queue.sweep();
        }
        if let Some(error) = running.overdue(now) {
            self.pass_on(ClientReply::Error { error });
        }
    }

    fn leave(&mut self, cause: &str) {
        self.external.leave();
        if let Some(running) = self.running.take() {
            running.left(cause);
            self.shared.queue.sweep();
        }
    }
}

fn request(line: Result<String, LinesCodecError>) -> Result<ClientRequest, Refused> {
    let line = line.map_err(|error| match error {
        LinesCodecError::MaxLineLengthExceeded => Refused::Nonsense("a line is too long".into()),
        LinesCodecError::Io(error) if error.kind() == std::io::ErrorKind::InvalidData => Refused::Nonsense("a line is not UTF-8".into()),
        LinesCodecError::Io(error) => Refused::Io(error.to_string()),
    })?;
    serde_json::from_str(&line).map_err(|error| Refused::Nonsense(format!("a line cannot be understood: {error}")))
}

impl Refused {
    fn publish_error(&self) -> PublishError {
        let code = match self {
            Self::Uid { .. } | Self::Protocol { .. } | Self::TooMany | Self::NoTrainer | Self::NoEngines => PublishErrorCode::NotAllowed,
            Self::Nonsense(_) | Self::NoHello | Self::Register(_) => PublishErrorCode::Invalid,
            Self::Io(_) => PublishErrorCode::Internal,
        };
        PublishError { code, message: self.to_string(), retryable: matches!(self, Self::TooMany | Self::Io(_)), phase: None, member: None }
    }
}
