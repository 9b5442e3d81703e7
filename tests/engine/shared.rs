//! Real servers that tests use one after another. Each test finds its server as it was when it started, which is proven before the test begins;
//! a server that cannot be brought back, or whose test failed, is replaced by a new one.

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard, OnceCell};

use super::backend;
use super::client::Client;
use super::models::Models;
use super::real::{Server, venv};

/// vLLM on version 1.
pub static PLAIN: Shared = Shared::new(|venv, models| Server::vllm(venv, &models.path("1")));
/// The same with WeightSync's back end.
pub static WITH_BACKEND: Shared = Shared::new(|venv, models| backend::start_real(venv, models, 1));

/// Requests of the test before are over by then.
const QUIET: Duration = Duration::from_secs(60);

/// Longer than a block of the prefix cache (128 tokens on CPU), so that a stale cache would be used.
pub fn prompt() -> String {
    "The quick brown fox jumps over the lazy dog, and the trainer sends its weights to every rollout. ".repeat(8)
}

/// What a fresh server on version 2 answers to [`prompt`]: one that is started as a user starts it.
pub async fn fresh_answer(models: &Models) -> &'static (String, Vec<f64>) {
    static ANSWER: OnceCell<(String, Vec<f64>)> = OnceCell::const_new();
    let answer = async || {
        let mut fresh = match venv() {
            Some(venv) => Server::vllm_by_its_own_start(&venv, &models.path("2")),
            None => Server::simulator(&models.path("2"), r#"{"tokenMs":10}"#),
        };
        fresh.ready().await.complete(&prompt(), 16).await
    };
    ANSWER.get_or_init(answer).await
}

/// One server at a time.
pub struct Shared {
    start: fn(&Path, &Models) -> Server,
    kept: Mutex<Option<Kept>>,
}

impl Shared {
    const fn new(start: fn(&Path, &Models) -> Server) -> Self {
        Self { start, kept: Mutex::const_new(None) }
    }

    /// The real server for this test alone, as it was when it started; none without a virtual environment.
    pub async fn real(&'static self, models: &Models) -> Option<Borrowed> {
        let venv = venv()?;
        let mut kept = self.kept.lock().await;
        if let Some(used) = kept.as_mut()
            && let Err(why) = used.bring_back(models).await
        {
            println!("the server of the tests before is replaced: {why}");
            *kept = None;
        }
        if kept.is_none() {
            *kept = Some(Kept::begin((self.start)(&venv, models)).await);
        }
        Some(Borrowed(Place::Shared(kept)))
    }

    /// The same, or that simulator.
    pub async fn or_simulator(&'static self, models: &Models, simulator: impl FnOnce() -> Server) -> Borrowed {
        match self.real(models).await {
            Some(real) => real,
            None => Borrowed(Place::Own(simulator())),
        }
    }
}

/// A server with what it was when it started.
struct Kept {
    server: Server,
    begun: State,
}

impl Kept {
    async fn begin(mut server: Server) -> Self {
        let client = server.ready().await;
        let begun = State::of(&client).await.unwrap();
        Self { server, begun }
    }

    /// By vLLM's own calls alone: what tests examine has no part in it.
    async fn bring_back(&mut self, models: &Models) -> Result<(), String> {
        if let Some(ended) = self.server.ended() {
            return Err(ended);
        }
        let client = Client::new(&self.server.url);
        let reload = json!({"method": "reload_weights", "kwargs": {"weights_path": models.path("1")}});
        let label = json!({"new_version": self.begun.version["weight_version"]});
        for (call, body) in [
            ("/wake_up", &Value::Null),
            ("/resume", &Value::Null),
            ("/collective_rpc", &reload),
            ("/reset_prefix_cache", &Value::Null),
            ("/update_weight_version", &label),
        ] {
            let reply = client.post(call, body).await;
            if reply.status != Some(200) {
                return Err(format!("{call}: {reply:?}"));
            }
        }
        let found = State::of(&client).await?;
        if found == self.begun { Ok(()) } else { Err(format!("{found:?}, but it began as {:?}", self.begun)) }
    }
}

/// All that a test may have changed, by the server's own word.
#[derive(Debug, PartialEq)]
struct State {
    answer: (String, Vec<f64>),
    version: Value,
    paused: Value,
    sleeping: Value,
}

impl State {
    async fn of(client: &Client) -> Result<Self, String> {
        let deadline = Instant::now() + QUIET;
        while !client.idle().await {
            if Instant::now() > deadline {
                return Err("it still works on a request".into());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let mut said = Vec::new();
        for question in ["/weight_info", "/is_paused", "/is_sleeping"] {
            let reply = client.get(question).await;
            if reply.status != Some(200) {
                return Err(format!("{question}: {reply:?}"));
            }
            said.push(reply.json());
        }
        let [version, paused, sleeping] = <[Value; 3]>::try_from(said).unwrap();
        Ok(Self { answer: client.try_complete(&prompt(), 8).await?, version, paused, sleeping })
    }
}

enum Place {
    Own(Server),
    Shared(MutexGuard<'static, Option<Kept>>),
}

/// A server that this test alone uses until it drops this.
pub struct Borrowed(Place);

impl Deref for Borrowed {
    type Target = Server;

    fn deref(&self) -> &Server {
        match &self.0 {
            Place::Own(server) => server,
            Place::Shared(kept) => &kept.as_ref().unwrap().server,
        }
    }
}

impl DerefMut for Borrowed {
    fn deref_mut(&mut self) -> &mut Server {
        match &mut self.0 {
            Place::Own(server) => server,
            Place::Shared(kept) => &mut kept.as_mut().unwrap().server,
        }
    }
}

impl Borrowed {
    /// For a test that breaks it: the next one gets a new server.
    pub fn end(mut self) {
        if let Place::Shared(kept) = &mut self.0 {
            **kept = None;
        }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if let Place::Shared(kept) = &mut self.0
            && std::thread::panicking()
        {
            **kept = None;
        }
    }
}
