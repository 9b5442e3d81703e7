//! The calls of a weight-transfer session of vLLM with our own back end, and each worker's report on them.
//!
//! Decides the order. Init: each worker connects to our socket. Start. One update: the workers load the described buckets, while more may
//! come. Finish. For a draft model, a second session with the same workers follows. Only each worker's report on its socket counts. After
//! one failed call, the replies of vLLM's workers are those to earlier calls (0.32, `v1/executor/multiproc_executor.py`: seen with two
//! ranks). So a reply proves nothing, and our back end never fails a call. Never decides where the bytes are. Routes are vLLM 0.32's
//! (`entrypoints/rl/online/api_router.py`).

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::EngineError;
use crate::http::{EngineHttp, Until};
use crate::workers::listening::Listening;
use crate::workers::progress::Step;
use crate::workers::{PROTOCOL, Workers};

/// Name of the back end, and of its route.
pub(super) const WAY: &str = "weightsync";
/// What to do where its workers do not read memory.
pub(super) const OTHERWISE: &str = "it is fed from a directory";
/// Longest wait for workers to connect.
pub(super) const CONNECT: Duration = Duration::from_secs(20);
/// Longest wait for the end of a failed session.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Whether the server was started with the back end, by its own configuration. A call would not do: a refusal by another back end spoils
/// later replies, see above.
pub(super) async fn is_there(http: &EngineHttp, until: Until) -> Result<bool, EngineError> {
    let asked = http.get("/server_info?config_format=json", until).await?;
    match asked.status() {
        200 => Ok(asked.json()?.value().pointer("/vllm_config/weight_transfer_config/backend") == Some(&json!(WAY))),
        404 | 405 => Ok(false),
        _ => Err(asked.into_status()),
    }
}

/// Makes every worker of a server connect: returns a socket that waits for them, and the fields that they must present.
pub(super) async fn init(http: &EngineHttp, ranks: u32, until: Until) -> Result<(Listening, String), EngineError> {
    let listening = Listening::new(http.url(), ranks)?;
    let token = uuid::Uuid::new_v4().simple().to_string();
    let info = json!({"init_info": {"protocol": PROTOCOL, "socket": listening.name(), "token": token}});
    call(http, "/init_weight_transfer_engine", Some(&info), until).await?;
    Ok((listening, token))
}

/// The sessions of one version, with connected workers.
pub(super) struct Session {
    http: Arc<EngineHttp>,
    pub(super) workers: Workers,
    token: String,
    update: Option<JoinHandle<Result<(), EngineError>>>,
    open: bool,
    /// The last session: 1 is the model's, 2 the draft model's.
    number: u32,
    whole: Until,
}

impl Session {
    pub(super) fn new(http: Arc<EngineHttp>, workers: Workers, token: String, timeout: Duration) -> Self {
        Self { http, workers, token, update: None, open: false, number: 0, whole: Until::new(timeout) }
    }

    /// The last session: 1 is the model's, 2 the draft model's, 0 none.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Makes a call and waits until every worker confirms the step.
    async fn step(&self, path: &str, step: Step, until: Until) -> Result<(), EngineError> {
        call(&self.http, path, Some(&json!({})), until).await?;
        self.workers.watching(until, self.workers.did(self.number, step)).await
    }

    /// Ends a session that an earlier incarnation of an agent left open, if there is one.
    pub(super) async fn end_what_was_left(&self, until: Until) -> Result<(), EngineError> {
        if self.workers.left_open() { self.step("/finish_weight_update", Step::Ended, until).await } else { Ok(()) }
    }

    /// Opens the next session and makes the workers load in it.
    pub(super) async fn start(&mut self, path: &str, until: Until) -> Result<(), EngineError> {
        self.open = true;
        self.number += 1;
        self.step(path, Step::Started, until).await?;
        let (http, whole, body) = (self.http.clone(), self.whole, json!({"update_info": {"token": self.token}}));
        self.update = Some(tokio::spawn(async move { call(&http, "/update_weights", Some(&body), whole).await }));
        Ok(())
    }

    /// Waits until every worker loaded all of the session's model (`reported` buckets since the first session), and requests their last
    /// step.
    pub(super) async fn finish(&mut self, reported: u32, until: Until) -> Result<(), EngineError> {
        let mut update = self.update.take();
        tokio::select! {
            biased;
            done = self.workers.watching(until, self.workers.did(self.number, Step::Updated)) => done?,
            error = lost(&mut update) => return Err(error),
        }
        let taken = self.workers.taken_by_all();
        if taken != reported {
            return Err(self.workers.error(format!("{taken} of {reported} buckets were taken")));
        }
        if let Some(update) = update {
            // The route returns after its workers.
            let _ended = tokio::time::timeout(until.left(), update).await;
        }
        self.step("/finish_weight_update", Step::Finished, until).await?;
        self.open = false;
        Ok(())
    }

    /// Outputs of an encoder were computed with the earlier weights.
    pub(super) async fn forget_encoded(&self, until: Until) -> Result<(), EngineError> {
        call(&self.http, "/reset_encoder_cache", None, until).await
    }

    /// Ends it early: no worker waits, and no session stays open for the next client.
    pub(super) async fn fail(&mut self, until: Until) {
        self.workers.close();
        // The workers see it at once and reassemble their layers, and the call ends.
        let until = until.at_most(LAST_WORDS);
        if let Some(update) = self.update.take() {
            let _ended = tokio::time::timeout(until.left(), update).await;
        }
        if self.open
            && let Err(error) = call(&self.http, "/finish_weight_update", Some(&json!({})), until).await
        {
            tracing::warn!(%error, "a session that failed was not ended");
        }
    }
}

/// The error of a call that never reached the workers; pending while it is in progress or ended otherwise.
async fn lost(update: &mut Option<JoinHandle<Result<(), EngineError>>>) -> EngineError {
    if let Some(ended) = update {
        let ended = ended.await;
        *update = None;
        if let Ok(Err(error)) = ended {
            return error;
        }
    }
    std::future::pending().await
}

/// POST to the workers. Only a connection's failure counts: a refusal may belong to an earlier call.
async fn call(http: &EngineHttp, path: &str, body: Option<&Value>, until: Until) -> Result<(), EngineError> {
    let reply = http.post(path, body, until).await?;
    match reply.status() {
        200 => {}
        500 => tracing::warn!(refusal = %reply.into_status(), "a refusal that may be of an earlier call: the workers themselves are asked"),
        _ => return Err(reply.into_status()),
    }
    Ok(())
}
