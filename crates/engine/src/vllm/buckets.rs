//! vLLM's weight transfer with the `ipc` backend, packed: buckets in our own memory, named by handle, copied by the server before it
//! responds.
//!
//! Facts are from the wheel of 0.32.0 (`distributed/weight_transfer/ipc_engine.py`, `packed_tensor.py`, `base.py`). A packed buffer is
//! cloned and the device synchronised within the call, so its response means "read". Unpacked tensors stay unread until the end, which does
//! not work with a ring of slots, so they are never used. Packed tensors are adjacent: a bucket with a gap needs two calls. The server's
//! own unrestricted `pickle.loads` of our message is what `VLLM_ALLOW_INSECURE_SERIALIZATION=1` allows; nothing is unpickled here.

use std::sync::Arc;

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
use weightsync_torch::pickle::Value as Pickled;
use weightsync_torch::{Device, Piece, SharedTensor, dtype_name};

pub(super) const WAY: &str = "ipc";

/// The known facts about it, and their versions (`tests/gpu/vllm.sh ipc`).
pub(super) const UNPROVEN: Unproven = Unproven { engine: "vLLM", way: "the ipc backend", seen: &["0.32.0"], read: &["0.33.0"] };

/// Announces packed buckets. A server with another backend refuses, and nothing changed.
pub(super) async fn agree(http: &EngineHttp, until: Until) -> Result<(), EngineError> {
    done(http, "/init_weight_transfer_engine", &json!({"init_info": {"packed": true}}), "Weight transfer initialized", until).await
}

async fn done(http: &EngineHttp, path: &str, body: &Value, says: &str, until: Until) -> Result<(), EngineError> {
    http.post(path, Some(body), until).await?.json()?.must("message", &json!(says)).map(drop)
}

pub(super) struct Buckets {
    http: Arc<EngineHttp>,
    layout: Arc<Layout>,
    started: bool,
}

impl Buckets {
    pub(super) fn new(http: Arc<EngineHttp>, layout: Arc<Layout>) -> Self {
        Self { http, layout, started: false }
    }

    /// Opens the session. One that a dead trainer left open is ended first (F92), which the mark on the engine accounts for.
    async fn start(&mut self, until: Until) -> Result<(), EngineError> {
        let start = || done(&self.http, "/start_weight_update", &Value::Null, "Weight update started", until);
        let started = match start().await {
            Err(EngineError::Status { status: 500, .. }) => {
                finish(&self.http, until).await?;
                start().await
            }
            other => other,
        };
        self.started = true;
        started
    }

    fn update(bucket: &DeviceBucket, run: &[Piece<'_>]) -> Result<Value, EngineError> {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { return Ok(Value::Null) };
        let bytes = last.offset + last.bytes - first.offset;
        let handle = |place: &crate::device::DevicePlace| {
            let tensor = SharedTensor {
                handle: place.handle.0,
                storage_offset: place.offset + first.offset,
                storage_bytes: bytes,
                elements: bytes,
                dtype: Dtype::U8,
                device: Device::Readers,
                counter: None,
            };
            let uuid = place.gpu.strip_prefix("GPU-").unwrap_or(&place.gpu);
            Ok((Pickled::text(uuid), Pickled::Tuple(tensor.arguments().map_err(|error| EngineError::no_form(&error))?)))
        };
        let handles = bucket.places.iter().map(handle).collect::<Result<Vec<_>, EngineError>>()?;
        let dtype = |piece: &Piece<'_>| {
            let none = || EngineError::no_form(&weightsync_torch::TorchError::NoDtype(piece.dtype));
            dtype_name(piece.dtype).ok_or_else(none)
        };
        Ok(json!({"update_info": {
            "names": run.iter().map(|piece| piece.name).collect::<Vec<_>>(),
            "dtype_names": run.iter().map(dtype).collect::<Result<Vec<_>, EngineError>>()?,
            "shapes": run.iter().map(|piece| piece.shape).collect::<Vec<_>>(),
            "tensor_sizes": run.iter().map(|piece| piece.bytes).collect::<Vec<_>>(),
            "ipc_handles_pickled": STANDARD.encode(Pickled::Dict(handles).pickle()),
        }}))
    }
}

async fn finish(http: &EngineHttp, until: Until) -> Result<(), EngineError> {
    done(http, "/finish_weight_update", &json!({"weight_version": null}), "Weight update finished", until).await
}

/// Whether a piece follows another without a gap, at an offset that torch can view.
fn follows(first: u64, before: &Piece<'_>, piece: &Piece<'_>) -> bool {
    piece.offset == before.offset + before.bytes && (piece.offset - first).is_multiple_of((piece.dtype.bits() / 8).max(1))
}

/// Pieces, split where they do not follow each other.
pub(super) fn runs<'a>(pieces: &'a [Piece<'a>]) -> Vec<&'a [Piece<'a>]> {
    let mut first = pieces.first().map_or(0, |piece| piece.offset);
    pieces
        .chunk_by(move |before, piece| {
            let follows = follows(first, before, piece);
            if !follows {
                first = piece.offset;
            }
            follows
        })
        .collect()
}

#[async_trait]
impl Feed for Buckets {
    async fn bucket(&mut self, bucket: &DeviceBucket, until: Until) -> Result<Released, EngineError> {
        if !self.started {
            self.start(until).await?;
        }
        let all = pieces(&self.layout, bucket);
        let updates = runs(&all).into_iter().map(|run| Self::update(bucket, run)).collect::<Result<Vec<_>, _>>()?;
        for update in updates {
            done(&self.http, "/update_weights", &update, "Weights updated", until).await?;
        }
        Ok(Released::Now)
    }

    fn touched(&self) -> bool {
        self.started
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        finish(&self.http, until).await
    }

    /// Usually an error has already ended the session; an open one would block the next.
    async fn fail(&mut self, _: &str, until: Until) {
        if self.started
            && let Err(error) = finish(&self.http, until).await
        {
            tracing::debug!(engine = self.http.url(), %error, "the session of a failed update had ended");
        }
    }
}
