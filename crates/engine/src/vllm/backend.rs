//! vLLM with our own back end (`python/weightsync/vllm.py`), whose workers read the agent's shared host memory.
//!
//! Decides when a session begins and which buckets belong to it: those for the draft model come after all of the model's, in a separate
//! session. The calls, and the meaning of their failures, are in [`super::session`].

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::session::{CONNECT, OTHERWISE, Session, init};
use crate::EngineError;
use crate::host::{HostBucket, HostDigest, HostJob};
use crate::host_feed::HostFeed;
use crate::http::{EngineHttp, Until};
use crate::workers::Workers;
use crate::workers::hello::Rules;
use weightsync_core::weights::Section;

pub(super) struct Backend {
    session: Session,
    digest: HostDigest,
    /// The first bucket for the draft model.
    draft_from: Option<u32>,
    reported: u32,
}

impl Backend {
    /// Makes every worker connect and gives it the memory.
    pub(super) async fn open(http: Arc<EngineHttp>, job: &HostJob, ranks: u32, until: Until) -> Result<Self, EngineError> {
        let (listening, token) = init(&http, ranks, until).await?;
        let rules = Rules { token: token.clone(), draft: job.layout.has_draft(), otherwise: OTHERWISE, silence: job.silence };
        let (workers, digest) = listening.with_memory(&rules, &job.memory, until.at_most(job.silence.min(CONNECT))).await?;
        Ok(Self { session: Session::new(http, workers, token, job.terms.timeout), digest, draft_from: None, reported: 0 })
    }

    async fn finish(&mut self, until: Until) -> Result<(), EngineError> {
        let of_model = self.draft_from.filter(|_| self.session.number() == 1);
        self.session.finish(of_model.unwrap_or(self.reported), until).await
    }

    /// Ends the model's session and begins the one of its draft model, if there is one and this did not happen yet.
    async fn turn_to_draft(&mut self, until: Until) -> Result<(), EngineError> {
        if self.session.number() != 1 || self.draft_from.is_none() {
            return Ok(());
        }
        self.finish(until).await?;
        self.session.start("/start_draft_weight_update", until).await
    }
}

#[async_trait]
impl HostFeed for Backend {
    fn digest(&self) -> HostDigest {
        self.digest
    }

    async fn bucket(&mut self, bucket: &HostBucket, until: Until) -> Result<(), EngineError> {
        let reported = self.session.workers.tell(Workers::line(bucket));
        self.session.workers.watching(until, reported).await?;
        if bucket.section() == Section::Draft {
            self.draft_from.get_or_insert(bucket.sequence);
        }
        self.reported = bucket.sequence.saturating_add(1);
        Ok(())
    }

    async fn load(&mut self, until: Until) -> Result<(), EngineError> {
        self.session.end_what_was_left(until).await?;
        self.session.start("/start_weight_update", until).await
    }

    async fn taken(&mut self, more_than: u32, until: Until) -> Result<u32, EngineError> {
        if self.draft_from.is_some_and(|first| more_than >= first) {
            self.turn_to_draft(until).await?;
        }
        self.session.workers.watching(until, self.session.workers.taken(more_than)).await
    }

    async fn end(&mut self, silence: Duration, until: Until) -> Result<(), EngineError> {
        self.session.workers.no_more(self.reported, until.at_most(silence)).await?;
        for each in 1..=self.reported {
            self.session.workers.watching(until.at_most(silence), self.session.workers.verified(each)).await?;
        }
        Ok(())
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        self.turn_to_draft(until).await?;
        self.finish(until).await?;
        self.session.forget_encoded(until).await
    }

    async fn fail(&mut self, _: &str, until: Until) {
        self.session.fail(until).await;
    }
}
