//! LMDeploy 0.18 (PyTorch backend) in a group of its own workers: `init_weights_update_group`, flattened buckets, `finished`.
//!
//! Facts are from the wheel of 0.18.0 (`serve/openai/endpoints/management.py`, `pytorch/engine/model_agent/agent.py`) and were seen on the
//! running server. Only the Ray executor knows groups; the others return 500 for every request about them. There is no session. The last
//! request contains `finished`; without it, graphs and fused layers stay stale while every reply reports success. Requests wait for the
//! engine's lock in the order of their arrival (`pytorch/engine/engine.py`, `_run_weights_update`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use futures::future::BoxFuture;
use serde_json::{Value, json};

use crate::EngineError;
use crate::group::{GroupFeed, GroupJoin, GroupServer, Tensors, join_by_store, leave_by_name, post_ok};
use crate::http::{EngineHttp, Until};
use weightsync_core::protocol::{GroupFacts, Rendezvous};

/// A group that is never made: a request to end it changes nothing.
const NOBODYS: &str = "weightsync-is-there-a-group";

pub(super) struct LmdeployGroup {
    pub(super) http: Arc<EngineHttp>,
}

#[async_trait]
impl GroupServer for LmdeployGroup {
    async fn facts(&self, until: Until) -> Result<GroupFacts, EngineError> {
        let status = self.http.get("/update_weights_from_ipc", until).await?.json()?;
        let workers = status.field("device_uuids")?.as_array().map_or(0, Vec::len);
        let info = self.http.get("/distserve/engine_info", until).await?.json()?;
        let info: Value = serde_json::from_str(info.value().as_str().unwrap_or_default()).unwrap_or_default();
        let data = info.get("dp_size").and_then(Value::as_u64).unwrap_or(1);
        let probe = self.http.post("/destroy_weights_update_group", Some(&json!({ "group_name": NOBODYS })), until).await?;
        let why_not = match probe.status() {
            404 | 405 => "it has no routes for groups: use LMDeploy 0.18 or newer".to_owned(),
            // `NotImplementedError` of the executor, or a backend that is not PyTorch.
            500 | 501 => "its executor knows no groups: start LMDeploy with --distributed-executor-backend ray".to_owned(),
            200 | 400 if data > 1 => format!("it has --dp {data}, and ranks of a group with data parallelism are not proven: use --dp 1"),
            200 | 400 => String::new(),
            _ => return Err(probe.into_status()),
        };
        Ok(GroupFacts { rendezvous: Rendezvous::Store, size: u32::try_from(workers).unwrap_or(0), why_not })
    }

    async fn leave(&self, name: Option<&str>, until: Until) -> Result<(), EngineError> {
        leave_by_name(&self.http, name, until).await
    }

    async fn join(&self, join: &GroupJoin, until: Until) -> Result<(), EngineError> {
        join_by_store(&self.http, join, until).await
    }

    /// Its only pause is sleep, which costs a second. It receives buckets while it is awake, and requests are ended before and after.
    fn pauses(&self) -> bool {
        false
    }

    fn ahead(&self) -> bool {
        true
    }

    async fn open(&self, name: &str, _: bool, _: Until) -> Result<Box<dyn GroupFeed>, EngineError> {
        Ok(Box::new(Update { http: self.http.clone(), group: name.to_owned(), finished: Arc::default() }))
    }
}

/// An update in progress, which the server does not know.
#[derive(Clone)]
struct Update {
    http: Arc<EngineHttp>,
    group: String,
    finished: Arc<AtomicBool>,
}

impl Update {
    async fn post(&self, tensors: &Tensors, finished: bool, until: Until) -> Result<(), EngineError> {
        let body = json!({
            "names": tensors.names,
            "dtypes": tensors.dtypes,
            "shapes": tensors.shapes,
            "group_name": self.group,
            "load_format": "flattened_bucket",
            "finished": finished,
        });
        post_ok(&self.http, "/update_weights_from_distributed", &body, ("success", Value::Bool(true)), until).await?;
        self.finished.fetch_or(finished, Ordering::AcqRel);
        Ok(())
    }
}

#[async_trait]
impl GroupFeed for Update {
    fn found_open(&self) -> bool {
        false
    }

    /// The last step is part of the last bucket: a separate request takes the engine's workers several ms more.
    fn receive(&self, tensors: Tensors, last: bool, until: Until) -> BoxFuture<'static, Result<(), EngineError>> {
        let update = self.clone();
        Box::pin(async move { update.post(&tensors, last, until).await })
    }

    /// A version without bytes has no broadcast, only the last step.
    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        if self.finished.load(Ordering::Acquire) {
            return Ok(());
        }
        self.post(&Tensors { names: Vec::new(), dtypes: Vec::new(), shapes: Vec::new() }, true, until).await
    }

    async fn fail(&mut self, _: Until) {}
}
