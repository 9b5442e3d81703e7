//! Frames of messages between agent and worker, and opaque bytes in them. Decides which frames are invalid.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest frame in bytes; a digest of 100 000 parts takes a third of it.
pub const MAX_WORKER_FRAME: u32 = 16 << 20;

/// `N` opaque bytes that travel as base64. Never shown.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opaque<const N: usize>(pub [u8; N]);

/// `CUipcMemHandle` or `CUipcEventHandle`: 64 bytes that another process on the same host opens. It names a whole allocation.
pub type IpcHandle = Opaque<64>;

/// `ncclUniqueId`: any process that has it can join the group. Secret.
pub type NcclId = Opaque<128>;

impl<const N: usize> fmt::Debug for Opaque<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{N} opaque bytes")
    }
}

impl<const N: usize> Opaque<N> {
    /// The bytes as base64, for a message over a protected connection.
    pub fn to_base64(&self) -> String {
        STANDARD.encode(self.0)
    }

    /// Reads [`to_base64`](Self::to_base64); `None` if it is no base64 or not `N` bytes.
    pub fn from_base64(text: &str) -> Option<Self> {
        STANDARD.decode(text).ok()?.try_into().ok().map(Self)
    }
}

impl<const N: usize> Serialize for Opaque<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_base64())
    }
}

impl<'de, const N: usize> Deserialize<'de> for Opaque<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::from_base64(&text).ok_or_else(|| serde::de::Error::custom(format!("not {N} bytes in base64")))
    }
}

/// Why a frame is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum WorkerFrameError {
    #[error("a frame of {bytes} bytes is longer than {MAX_WORKER_FRAME}")]
    TooLong { bytes: u64 },
    #[error("a frame is invalid: {cause}")]
    Nonsense { cause: String },
}

/// A message in wire format.
pub fn encode_worker_frame<T: Serialize>(message: &T) -> Result<Vec<u8>, WorkerFrameError> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message).map_err(|error| WorkerFrameError::Nonsense { cause: error.to_string() })?;
    let bytes = frame.len() as u64 - 4;
    let length = u32::try_from(bytes).ok().filter(|length| *length <= MAX_WORKER_FRAME);
    let length = length.ok_or(WorkerFrameError::TooLong { bytes })?.to_le_bytes();
    frame.iter_mut().zip(length).for_each(|(to, from)| *to = from);
    Ok(frame)
}

/// Takes one complete message from the front of `received`; `None` until it is complete.
pub fn decode_worker_frame<T: DeserializeOwned>(received: &mut Vec<u8>) -> Result<Option<T>, WorkerFrameError> {
    let Some(length) = received.first_chunk::<4>().map(|bytes| u32::from_le_bytes(*bytes)) else { return Ok(None) };
    if length > MAX_WORKER_FRAME {
        return Err(WorkerFrameError::TooLong { bytes: length.into() });
    }
    let end = 4 + length as usize;
    let Some(body) = received.get(4..end) else { return Ok(None) };
    let message = serde_json::from_slice(body).map_err(|error| WorkerFrameError::Nonsense { cause: error.to_string() })?;
    received.drain(..end);
    Ok(Some(message))
}
