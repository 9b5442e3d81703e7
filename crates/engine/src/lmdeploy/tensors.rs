//! `/update_weights` of LMDeploy 0.18: flattened buckets in our own memory, read in place.
//!
//! One call for each element type of a bucket, because a flattened bucket has only one. The memory is named in every call: otherwise a
//! server keeps its earlier copy and would load old bytes (InternLM/lmdeploy#4397). Its response does not mean that it has read: it records
//! the given event after its copies. Without an event, the call makes it copy the bucket first.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;

use super::null;
use crate::EngineError;
use crate::device::{DeviceBucket, DevicePlace, Released};
use crate::feed::{Feed, pieces};
use crate::http::{EngineHttp, Until};
use weightsync_core::weights::{Dtype, Layout};
use weightsync_torch::{Device, Piece, SharedTensor, lmdeploy_bucket, lmdeploy_nothing};

/// A server that is fed while it is awake.
pub(super) struct Tensors {
    http: Arc<EngineHttp>,
    layout: Arc<Layout>,
    /// In the order of ranks.
    gpus: Vec<String>,
    longest: u64,
    touched: bool,
}

impl Tensors {
    pub(super) fn new(http: Arc<EngineHttp>, layout: Arc<Layout>, gpus: Vec<String>) -> Self {
        let longest = layout.largest_bucket();
        Self { http, layout, gpus, longest, touched: false }
    }

    fn pickle(&self, place: &DevicePlace, bucket: &DeviceBucket, pieces: &[Piece<'_>], dtype: Dtype) -> Result<Vec<u8>, EngineError> {
        let room = place.allocation_bytes.saturating_sub(place.offset);
        if room < bucket.bucket.bytes {
            return Err(EngineError::Unsupported {
                what: format!("bucket {} is longer than its memory", bucket.bucket.sequence),
                next_step: "this is a fault of the agent: report it".into(),
            });
        }
        let tensor = SharedTensor {
            handle: place.handle.0,
            storage_offset: place.offset,
            // The same for every bucket at this place: the server opens a storage once while it holds a tensor on it.
            storage_bytes: room.min(self.longest),
            elements: bucket.bucket.bytes / (dtype.bits() / 8).max(1),
            dtype,
            device: Device::Readers,
            counter: None,
        };
        let event = place.event.map(|event| event.0);
        let value = lmdeploy_bucket(pieces, &tensor, event, event.is_none()).map_err(|error| EngineError::no_form(&error))?;
        Ok(value.pickle())
    }
}

#[async_trait]
impl Feed for Tensors {
    async fn bucket(&mut self, bucket: &DeviceBucket, until: Until) -> Result<Released, EngineError> {
        let places = self.gpus.iter().map(|gpu| bucket.places.iter().find(|place| place.gpu == *gpu).ok_or(gpu));
        let places: Vec<&DevicePlace> = places.collect::<Result<_, _>>().map_err(|gpu| EngineError::Unsupported {
            what: format!("bucket {} does not lie on {gpu}, where a worker of the engine is", bucket.bucket.sequence),
            next_step: "give this agent a GPU worker on every GPU of the engine".into(),
        })?;
        let all = pieces(&self.layout, bucket);
        let dtypes: BTreeSet<Dtype> = all.iter().map(|piece| piece.dtype).collect();
        for dtype in dtypes {
            let of_one: Vec<Piece<'_>> = all.iter().filter(|piece| piece.dtype == dtype).copied().collect();
            let pickles = places.iter().map(|place| self.pickle(place, bucket, &of_one, dtype)).collect::<Result<Vec<_>, _>>()?;
            self.touched = true;
            null(self.http.post("/update_weights", Some(&update(pickles, false)), until).await?)?;
        }
        let events = places.iter().all(|place| place.event.is_some());
        Ok(if events { Released::AfterEvents } else { Released::Now })
    }

    fn touched(&self) -> bool {
        self.touched
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        let nothing = self.gpus.iter().map(|_| lmdeploy_nothing().pickle()).collect();
        null(self.http.post("/update_weights", Some(&update(nothing, true)), until).await?)
    }

    async fn fail(&mut self, _: &str, _: Until) {}
}

/// The body of `/update_weights`: one pickle for each rank.
pub(super) fn update(pickles: Vec<Vec<u8>>, finished: bool) -> Value {
    let tensors: Vec<String> = pickles.iter().map(|pickle| STANDARD.encode(pickle)).collect();
    json!({"serialized_named_tensors": tensors, "load_format": "flattened_bucket", "finished": finished})
}
