//! vLLM 0.32 and 0.33 in a group of its own workers: weight transfer with the backend `nccl`, joined by the communicator's id.
//!
//! Facts are from the wheels (`distributed/weight_transfer/nccl_common.py`, `nccl_engine.py`, `packed_tensor.py`,
//! `v1/worker/gpu_worker.py`). A join makes the communicator at once, and a missing rank blocks the engine without end: the leader joins at
//! the same time. An open update blocks the next one, and also the leaving of the group, until it is finished; that finalises a
//! half-written model.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::future::BoxFuture;
use serde_json::{Value, json};

use crate::EngineError;
use crate::group::{GroupFeed, GroupJoin, GroupServer, Tensors, post_ok};
use crate::http::{EngineHttp, Until};
use weightsync_core::protocol::{GroupFacts, GroupPlace, Rendezvous};

/// All tensors of a request are one broadcast, whatever its length: the server cuts after the tensor that exceeds this, and allocates
/// memory for what came, not for this.
const NEVER_CUT: u64 = 1 << 40;

/// Not base64: the server refuses it before it does anything.
const NO_ID: &str = "*";

pub(super) struct VllmGroup {
    pub(super) http: Arc<EngineHttp>,
}

impl VllmGroup {
    async fn message(&self, path: &str, body: &Value, says: &str, until: Until) -> Result<(), EngineError> {
        post_ok(&self.http, path, body, ("message", json!(says)), until).await
    }

    async fn start(&self, until: Until) -> Result<(), EngineError> {
        self.message("/start_weight_update", &json!({}), "Weight update started", until).await
    }

    async fn start_draft(&self, until: Until) -> Result<(), EngineError> {
        self.message("/start_draft_weight_update", &json!({}), "Draft weight update started", until).await
    }

    /// The version is written by a separate call at the end.
    async fn finish(&self, until: Until) -> Result<(), EngineError> {
        self.message("/finish_weight_update", &json!({ "weight_version": null }), "Weight update finished", until).await
    }
}

#[async_trait]
impl GroupServer for VllmGroup {
    async fn facts(&self, until: Until) -> Result<GroupFacts, EngineError> {
        let mut facts = GroupFacts { rendezvous: Rendezvous::UniqueId, size: 0, why_not: String::new() };
        let size = self.http.get("/get_world_size?include_dp=true", until).await?;
        if matches!(size.status(), 404 | 405) {
            facts.why_not = "it has no routes for weight updates: start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1".into();
            return Ok(facts);
        }
        let size = size.json()?;
        facts.size = size.field("world_size")?.as_u64().and_then(|size| u32::try_from(size).ok()).unwrap_or(0);
        let body = json!({"init_info": {"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": NO_ID}});
        let said = self.http.post("/init_weight_transfer_engine", Some(&body), until).await?.into_status().to_string();
        facts.why_not = if said.contains("base64") {
            String::new()
        } else if said.contains("not configured") {
            "start vLLM with --weight-transfer-config '{\"backend\": \"nccl\"}'".into()
        } else {
            format!(
                "it does not take nccl_unique_id_b64: use vLLM 0.32 or newer with the weight transfer backend nccl (its response: {said})"
            )
        };
        Ok(facts)
    }

    /// Refused while another client's update is open. That one is not closed here: the next update finds it, which shows that the engine
    /// may hold a mixture.
    async fn leave(&self, _: Option<&str>, until: Until) -> Result<(), EngineError> {
        self.message("/shutdown_weight_transfer_engine", &json!({}), "Weight transfer shut down", until).await
    }

    async fn join(&self, join: &GroupJoin, until: Until) -> Result<(), EngineError> {
        let GroupPlace::UniqueId { id } = &join.place else {
            return Err(EngineError::Unsupported {
                what: "vLLM joins a group by the communicator's id, and was given a store".into(),
                next_step: "this is a fault of the source's agent: report it".into(),
            });
        };
        let body = json!({"init_info": {
            "rank_offset": join.offset,
            "world_size": join.world,
            "nccl_unique_id_b64": STANDARD.encode(id.0),
            "packed": true,
            "packed_buffer_size_bytes": NEVER_CUT,
            "packed_num_buffers": 2,
        }});
        self.message("/init_weight_transfer_engine", &body, "Weight transfer initialized", until).await
    }

    async fn open(&self, _: &str, _: bool, until: Until) -> Result<Box<dyn GroupFeed>, EngineError> {
        let found_open = match self.start(until).await {
            Ok(()) => false,
            Err(EngineError::Status { status: 500, body, .. }) if body.contains("already active") => {
                self.finish(until).await?;
                self.start(until).await?;
                true
            }
            // It is not known whether it began. It counts as begun: layers may be disassembled, and a request would end the engine's core.
            Err(
                EngineError::Timeout { .. }
                | EngineError::Unreachable { .. }
                | EngineError::NotSuccess { .. }
                | EngineError::BadReply { .. },
            ) => true,
            Err(error) => return Err(error),
        };
        Ok(Box::new(Session { server: Self { http: self.http.clone() }, found_open, open: Arc::new(AtomicBool::new(true)) }))
    }
}

struct Session {
    server: VllmGroup,
    found_open: bool,
    open: Arc<AtomicBool>,
}

#[async_trait]
impl GroupFeed for Session {
    fn found_open(&self) -> bool {
        self.found_open
    }

    fn receive(&self, tensors: Tensors, _: bool, until: Until) -> BoxFuture<'static, Result<(), EngineError>> {
        let body = json!({"update_info": {"names": tensors.names, "dtype_names": tensors.dtypes, "shapes": tensors.shapes}});
        let (server, open) = (VllmGroup { http: self.server.http.clone() }, self.open.clone());
        Box::pin(async move {
            let received = server.message("/update_weights", &body, "Weights updated", until).await;
            // If an update fails in the engine, the engine closes it.
            if matches!(received, Err(EngineError::Status { status: 500, .. })) {
                open.store(false, Ordering::Release);
            }
            received
        })
    }

    /// A session has one target: the model's session ends, and another begins.
    async fn turn_to_draft(&mut self, until: Until) -> Result<(), EngineError> {
        self.close(until).await?;
        // It is not always known whether it began; the end of one that did not begin does no harm.
        self.open.store(true, Ordering::Release);
        self.server.start_draft(until).await
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        self.server.finish(until).await?;
        self.open.store(false, Ordering::Release);
        Ok(())
    }

    async fn fail(&mut self, until: Until) {
        if self.open.load(Ordering::Acquire)
            && let Err(error) = self.server.finish(until).await
        {
            tracing::warn!(engine = self.server.http.url(), %error, "a failed update cannot be finished");
        }
    }
}
