//! vLLM that was started with WeightSync's own weight-transfer back end (`python/weightsync/vllm.py` in the server's environment).
//!
//! Decides the calls of a session: init (each worker connects to a socket of ours and gets the memory), start and one update (the workers
//! load what they were told of, while more may come), finish; for a draft model behind it a second session with the same workers. What became
//! of them is said by every worker on its socket and by nobody else: behind one failed call the replies of vLLM's workers are those to earlier
//! calls (0.32, `v1/executor/multiproc_executor.py`: seen with two ranks), so a reply proves nothing, and our back end never fails a call.
//! Routes are vLLM 0.32's (`entrypoints/rl/online/api_router.py`).

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::progress::Step;
use super::workers::{Rules, Workers};
use crate::engine::EngineError;
use crate::engine::host::{HostBucket, HostDigest, HostJob};
use crate::engine::host_feed::HostFeed;
use crate::engine::http::{EngineHttp, Until};
use crate::weights::Section;

/// Version of the lines on the socket and of the fields of init, as `python/weightsync/_feed.py` has it.
const PROTOCOL: u32 = 1;
/// Name of the back end.
const NAME: &str = "weightsync";
/// Longest wait for workers that were told to connect.
const CONNECT: Duration = Duration::from_secs(20);
/// Longest wait for what a failed session still has to say and do.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Whether the server was started with the back end, by its own configuration. A call that another back end refuses would not do: see above.
pub(super) async fn is_there(http: &EngineHttp, until: Until) -> Result<bool, EngineError> {
    let asked = http.get("/server_info?config_format=json", until).await?;
    match asked.status() {
        200 => Ok(asked.json()?.value().pointer("/vllm_config/weight_transfer_config/backend") == Some(&json!(NAME))),
        404 | 405 => Ok(false),
        _ => Err(asked.into_status()),
    }
}

/// Feeds all workers of one server.
pub(super) struct Backend {
    http: Arc<EngineHttp>,
    workers: Workers,
    token: String,
    digest: HostDigest,
    /// The update that is under way.
    update: Option<JoinHandle<Result<(), EngineError>>>,
    /// Whether a session of ours is open.
    open: bool,
    /// The session that was begun last: 1 is the model's, 2 the draft model's.
    session: u32,
    /// The first bucket for the draft model.
    draft_from: Option<u32>,
    whole: Until,
    told: u32,
}

impl Backend {
    /// Has every worker connect and gives it the memory.
    pub(super) async fn open(http: Arc<EngineHttp>, job: &HostJob, ranks: u32, until: Until) -> Result<Self, EngineError> {
        let listening = Workers::listen(http.url(), ranks)?;
        let token = uuid::Uuid::new_v4().simple().to_string();
        let info = json!({"init_info": {"protocol": PROTOCOL, "socket": listening.name(), "token": token}});
        call(&http, "/init_weight_transfer_engine", Some(&info), until).await?;
        let rules = Rules { token: token.clone(), draft: job.layout.has_draft(), silence: job.silence };
        let (workers, digest) = listening.meet(&rules, &job.memory, until.at_most(job.silence.min(CONNECT))).await?;
        let whole = Until::new(job.timeout);
        Ok(Self { http, workers, token, digest, update: None, open: false, session: 0, draft_from: None, whole, told: 0 })
    }

    /// Runs until it is done, or a worker says that it failed.
    async fn watching<T>(&self, until: Until, done: impl Future<Output = Result<T, EngineError>>) -> Result<T, EngineError> {
        tokio::select! {
            biased;
            done = done => done,
            why = self.workers.failed() => Err(why),
            () = tokio::time::sleep(until.left()) => {
                Err(EngineError::Timeout { url: self.http.url().to_owned(), deadline: until.total() })
            }
        }
    }

    /// Makes a call and waits until every worker says that it took the step.
    async fn step(&self, path: &str, step: Step, until: Until) -> Result<(), EngineError> {
        call(&self.http, path, Some(&json!({})), until).await?;
        self.watching(until, self.workers.did(self.session, step)).await
    }

    /// Opens the next session and has the workers load in it.
    async fn start(&mut self, path: &str, until: Until) -> Result<(), EngineError> {
        self.open = true;
        self.session += 1;
        self.step(path, Step::Started, until).await?;
        let (http, whole, body) = (self.http.clone(), self.whole, json!({"update_info": {"token": self.token}}));
        self.update = Some(tokio::spawn(async move { call(&http, "/update_weights", Some(&body), whole).await }));
        Ok(())
    }

    /// Waits until every worker loaded all of the session's model, and has them take the last step.
    async fn finish(&mut self, until: Until) -> Result<(), EngineError> {
        let mut update = self.update.take();
        tokio::select! {
            biased;
            done = self.watching(until, self.workers.did(self.session, Step::Updated)) => done?,
            error = lost(&mut update) => return Err(error),
        }
        let (taken, told) = (self.workers.taken_by_all(), self.draft_from.filter(|_| self.session == 1).unwrap_or(self.told));
        if taken != told {
            return Err(self.workers.error(format!("{taken} of {told} buckets were taken")));
        }
        if let Some(update) = update {
            // The route answers when its workers did.
            let _ended = tokio::time::timeout(until.left(), update).await;
        }
        self.step("/finish_weight_update", Step::Finished, until).await?;
        self.open = false;
        Ok(())
    }

    /// Ends the model's session and begins that of its draft model, where one was told of and that was not done yet.
    async fn turn_to_draft(&mut self, until: Until) -> Result<(), EngineError> {
        if self.session != 1 || self.draft_from.is_none() {
            return Ok(());
        }
        self.finish(until).await?;
        self.start("/start_draft_weight_update", until).await
    }
}

/// The error of a call that never reached the workers; pending while it is under way or ended otherwise.
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

/// POST to the workers. What is not a connection's failure is not looked at: a refusal may be of an earlier call.
async fn call(http: &EngineHttp, path: &str, body: Option<&Value>, until: Until) -> Result<(), EngineError> {
    let reply = http.post(path, body, until).await?;
    match reply.status() {
        200 => {}
        500 => tracing::warn!(refusal = %reply.into_status(), "a refusal that may be of an earlier call: the workers themselves are asked"),
        _ => return Err(reply.into_status()),
    }
    Ok(())
}

#[async_trait]
impl HostFeed for Backend {
    fn digest(&self) -> HostDigest {
        self.digest
    }

    async fn bucket(&mut self, bucket: &HostBucket, until: Until) -> Result<(), EngineError> {
        let told = self.workers.tell(Workers::line(bucket));
        self.watching(until, told).await?;
        if bucket.section() == Section::Draft {
            self.draft_from.get_or_insert(bucket.sequence);
        }
        self.told = bucket.sequence.saturating_add(1);
        Ok(())
    }

    async fn load(&mut self, until: Until) -> Result<(), EngineError> {
        if self.workers.left_open() {
            self.step("/finish_weight_update", Step::Ended, until).await?;
        }
        self.start("/start_weight_update", until).await
    }

    async fn taken(&mut self, more_than: u32, until: Until) -> Result<u32, EngineError> {
        if self.draft_from.is_some_and(|first| more_than >= first) {
            self.turn_to_draft(until).await?;
        }
        self.watching(until, self.workers.taken(more_than)).await
    }

    async fn end(&mut self, silence: Duration, until: Until) -> Result<(), EngineError> {
        let line = format!("{}\n", json!({"event": "end", "buckets": self.told}));
        self.watching(until.at_most(silence), self.workers.tell(line)).await?;
        for each in 1..=self.told {
            self.watching(until.at_most(silence), self.workers.verified(each)).await?;
        }
        Ok(())
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        self.turn_to_draft(until).await?;
        self.finish(until).await?;
        // Outputs of an encoder are computed with the weights that were there before.
        call(&self.http, "/reset_encoder_cache", None, until).await
    }

    async fn fail(&mut self, _: &str, until: Until) {
        self.workers.close();
        // The workers hear of it at once, put their layers together, and the call ends; no session is left behind for whoever comes next.
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
