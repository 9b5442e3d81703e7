//! `/update_weights_from_tensor` of SGLang 0.5.23: flattened buckets in our own memory, between `begin_weight_update` and
//! `end_weight_update`.
//!
//! Facts are from its wheel (`srt/managers/scheduler_components/weight_updater.py`, `srt/utils/patch_torch.py`,
//! `srt/weight_sync/tensor_bucket.py`). Its response does not mean that it has read: nothing synchronises the device. So every tensor has
//! one of torch's counters. The server decrements it when it has synchronised its stream and released the tensor, and then the bucket is
//! released. A server that does not share `/dev/shm` with this agent never does that, and the update ends with that reason. GPUs are named
//! by UUID: a number would be the server's own count.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::EngineError;
use crate::device::{DeviceBucket, Released};
use crate::feed::{Feed, pieces};
use crate::http::{EngineHttp, Until};
use crate::unproven::Unproven;
use weightsync_core::weights::{Dtype, Layout};
use weightsync_torch::counter::{Counter, Counters, SHARED_MEMORY};
use weightsync_torch::{Device, SharedTensor, sglang_bucket};

pub(super) const WAY: &str = "update_weights_from_tensor";

/// It has not run on a GPU.
pub(super) const UNPROVEN: Unproven = Unproven { engine: "SGLang", way: WAY, seen: &[], read: &["0.5.23"] };

/// Time between two reads of a counter.
const LOOK: Duration = Duration::from_millis(1);

pub(super) struct Tensors {
    http: Arc<EngineHttp>,
    layout: Arc<Layout>,
    /// In the order of ranks.
    gpus: Vec<String>,
    counters: Counters,
    begun: bool,
}

impl Tensors {
    /// For a server of so many ranks; nothing of it has changed yet.
    pub(super) fn new(http: Arc<EngineHttp>, layout: Arc<Layout>, gpus: Vec<String>, ranks: u32) -> Result<Self, EngineError> {
        let unsupported = |what: String, next: &str| EngineError::Unsupported { what, next_step: next.to_owned() };
        if gpus.len() != ranks as usize {
            let what = format!("SGLang has {ranks} ranks and its agent {} GPUs", gpus.len());
            return Err(unsupported(what, "give the agent the GPUs of the engine, one a rank"));
        }
        let folder = PathBuf::from(SHARED_MEMORY);
        let made = Counters::create(Path::new(&folder));
        let counters = made.map_err(|error| unsupported(format!("no counters can be made in {SHARED_MEMORY}: {error}"), "mount it"))?;
        Ok(Self { http, layout, gpus, counters, begun: false })
    }

    async fn success(&self, path: &str, body: &Value, until: Until) -> Result<(), EngineError> {
        self.http.post(path, Some(body), until).await?.json()?.must("success", &Value::Bool(true)).map(drop)
    }

    /// Opens the session. One that a dead trainer left open is ended first (F92), which the mark on the engine accounts for.
    async fn begin(&mut self, until: Until) -> Result<(), EngineError> {
        let begin = json!({"selector": "all"});
        let begun = match self.success("/begin_weight_update", &begin, until).await {
            Err(EngineError::Status { status: 400, .. }) => {
                self.success("/end_weight_update", &json!({}), until).await?;
                self.success("/begin_weight_update", &begin, until).await
            }
            other => other,
        };
        self.begun = true;
        begun
    }

    /// One pickle for each rank, and the counter that it names.
    fn pickles(&mut self, bucket: &DeviceBucket) -> Result<(Vec<String>, Vec<Counter>), EngineError> {
        let all = pieces(&self.layout, bucket);
        let (mut pickles, mut counters) = (Vec::new(), Vec::new());
        for gpu in &self.gpus {
            let place = bucket.places.iter().find(|place| place.gpu == *gpu);
            let place = place.ok_or_else(|| EngineError::Unsupported {
                what: format!("bucket {} does not lie on {gpu}, where a worker of the engine is", bucket.bucket.sequence),
                next_step: "give this agent a GPU worker on every GPU of the engine".into(),
            })?;
            let counter = self.counters.take().map_err(|error| counting(&error))?;
            let tensor = SharedTensor {
                handle: place.handle.0,
                storage_offset: place.offset,
                storage_bytes: bucket.bucket.bytes,
                elements: bucket.bucket.bytes,
                dtype: Dtype::U8,
                device: Device::Uuid(place.gpu.clone()),
                counter: Some(counter.clone()),
            };
            let value = sglang_bucket(&all, &tensor).map_err(|error| EngineError::no_form(&error))?;
            pickles.push(STANDARD.encode(value.pickle()));
            counters.push(counter);
        }
        Ok((pickles, counters))
    }

    /// Returns when every rank has released its tensor.
    async fn read(&self, counters: &[Counter], sequence: u32, until: Until) -> Result<(), EngineError> {
        for counter in counters {
            while !self.counters.is_read(counter).map_err(|error| counting(&error))? {
                if until.left().is_zero() {
                    return Err(EngineError::Unsupported {
                        what: format!("SGLang took bucket {sequence} and did not say by torch's counters that it has read it"),
                        next_step: "let the engine's container and the agent's share /dev/shm, or feed this engine another way".into(),
                    });
                }
                tokio::time::sleep(LOOK).await;
            }
        }
        Ok(())
    }
}

fn counting(error: &std::io::Error) -> EngineError {
    EngineError::Unsupported { what: format!("torch's counters cannot be used: {error}"), next_step: format!("look at {SHARED_MEMORY}") }
}

#[async_trait]
impl Feed for Tensors {
    async fn bucket(&mut self, bucket: &DeviceBucket, until: Until) -> Result<Released, EngineError> {
        let (pickles, counters) = self.pickles(bucket)?;
        if !self.begun {
            self.begin(until).await?;
        }
        let body = json!({
            "serialized_named_tensors": pickles,
            "load_format": "flattened_bucket",
            "flush_cache": false,
            "abort_all_requests": false,
            "weight_version": null,
            "selector": "all",
            "torch_empty_cache": false,
        });
        self.success("/update_weights_from_tensor", &body, until).await?;
        self.read(&counters, bucket.bucket.sequence, until).await?;
        Ok(Released::Now)
    }

    fn touched(&self) -> bool {
        self.begun
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        self.success("/end_weight_update", &json!({}), until).await
    }

    /// An open session would block the next one.
    async fn fail(&mut self, _: &str, until: Until) {
        if self.begun
            && let Err(error) = self.success("/end_weight_update", &json!({}), until).await
        {
            tracing::warn!(engine = self.http.url(), %error, "the session of a failed update cannot be ended");
        }
    }
}
