//! SGLang 0.5.23 in a group of its own workers: `init_weights_update_group`, sessions, flattened buckets.
//!
//! Facts are from the wheel of 0.5.23 (`srt/entrypoints/http_server.py`, `srt/managers/scheduler_components/weight_updater.py`,
//! `srt/managers/tokenizer_control_mixin.py`). Outside a session, updates are refused at once, without entering the broadcast. A session
//! that a dead trainer left open blocks the next one until it is ended, and its end finalises a half-written model. The version is never
//! sent with a bucket: the server would record it although later buckets fail. One session is for both models, and each bucket names those
//! that load it. Without a draft model in the version both load it, as MTP layers need that are a part of the model's own checkpoint.

use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;
use serde_json::{Value, json};

use super::world_size;
use crate::EngineError;
use crate::group::{GroupFeed, GroupJoin, GroupServer, Tensors, join_by_store, leave_by_name, post_ok};
use crate::http::{EngineHttp, Until};
use weightsync_core::protocol::{GroupFacts, Rendezvous};

pub(super) struct SglangGroup {
    pub(super) http: Arc<EngineHttp>,
}

impl SglangGroup {
    async fn success(&self, path: &str, body: &Value, until: Until) -> Result<(), EngineError> {
        post_ok(&self.http, path, body, ("success", Value::Bool(true)), until).await
    }
}

#[async_trait]
impl GroupServer for SglangGroup {
    async fn facts(&self, until: Until) -> Result<GroupFacts, EngineError> {
        let info = self.http.get("/server_info", until).await?.json()?;
        let count = |name: &str| info.value().get(name).and_then(Value::as_u64).unwrap_or(1);
        let flag = |name: &str| info.value().get(name).and_then(Value::as_bool).unwrap_or(false);
        let cache = info.value().get("weight_cache_mode").and_then(Value::as_str).unwrap_or("off");
        // The route is POST only: 405 shows that it exists, and nothing was started.
        let session = self.http.get("/begin_weight_update", until).await?.status() != 404;
        let why_not = if !session {
            "it has no /begin_weight_update: use SGLang 0.5.23 or newer"
        } else if count("pp_size") > 1 {
            "its pipeline stages would all take the same ranks (--pp-size): start it without pipeline parallelism, or set spec.delivery to Agent"
        } else if count("dp_size") > 1 && !flag("enable_dp_attention") {
            "it refuses updates from a group with data parallel replicas: add --enable-dp-attention, or make each replica a server"
        } else if cache != "off" {
            "its --weight-cache-mode refuses updates: set it to off"
        } else {
            ""
        };
        Ok(GroupFacts {
            rendezvous: Rendezvous::Store,
            size: if why_not.is_empty() { u32::try_from(count("tp_size")).unwrap_or(0) } else { world_size(&info)? },
            why_not: why_not.to_owned(),
        })
    }

    async fn leave(&self, name: Option<&str>, until: Until) -> Result<(), EngineError> {
        leave_by_name(&self.http, name, until).await
    }

    async fn join(&self, join: &GroupJoin, until: Until) -> Result<(), EngineError> {
        join_by_store(&self.http, join, until).await
    }

    async fn open(&self, name: &str, with_draft: bool, until: Until) -> Result<Box<dyn GroupFeed>, EngineError> {
        let begin = json!({ "selector": "all" });
        let found_open = match self.success("/begin_weight_update", &begin, until).await {
            Ok(()) => false,
            Err(refused @ (EngineError::Status { status: 400, .. } | EngineError::NotSuccess { .. })) => {
                // Another client's session: only its end lets another begin. If there was none, the first refusal has the reason.
                self.success("/end_weight_update", &json!({}), until).await.map_err(|_| refused)?;
                self.success("/begin_weight_update", &begin, until).await?;
                true
            }
            Err(error) => return Err(error),
        };
        let server = Self { http: self.http.clone() };
        let selector = if with_draft { "target" } else { "all" };
        Ok(Box::new(Session { server, group: name.to_owned(), found_open, open: true, selector }))
    }
}

struct Session {
    server: SglangGroup,
    group: String,
    found_open: bool,
    open: bool,
    /// The models that load the received tensors.
    selector: &'static str,
}

#[async_trait]
impl GroupFeed for Session {
    fn found_open(&self) -> bool {
        self.found_open
    }

    fn receive(&self, tensors: Tensors, _: bool, until: Until) -> BoxFuture<'static, Result<(), EngineError>> {
        let body = json!({
            "names": tensors.names,
            "dtypes": tensors.dtypes,
            "shapes": tensors.shapes,
            "group_name": self.group,
            "flush_cache": false,
            "abort_all_requests": false,
            "weight_version": null,
            "load_format": "flattened_bucket",
            "selector": self.selector,
            "torch_empty_cache": false,
        });
        let server = SglangGroup { http: self.server.http.clone() };
        Box::pin(async move { server.success("/update_weights_from_distributed", &body, until).await })
    }

    async fn turn_to_draft(&mut self, _: Until) -> Result<(), EngineError> {
        self.selector = "draft";
        Ok(())
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        self.server.success("/end_weight_update", &json!({}), until).await?;
        self.open = false;
        Ok(())
    }

    async fn fail(&mut self, until: Until) {
        if self.open
            && let Err(error) = self.server.success("/end_weight_update", &json!({}), until).await
        {
            tracing::warn!(engine = self.server.http.url(), %error, "the session of a failed update cannot be ended");
        }
    }
}
