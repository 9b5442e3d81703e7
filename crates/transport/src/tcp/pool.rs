//! Receive buffers of one stream: few, large, reused, and returned when the last reader of their bytes is done.
//!
//! Decides how far a member may read ahead of what it forwarded; it does not read the bytes.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A limited set of buffers of one size, allocated when first needed. The one used last is used next: it is in the cache.
#[derive(Clone)]
pub(super) struct Pool {
    free: Arc<Mutex<Vec<Vec<u8>>>>,
    permits: Arc<Semaphore>,
    size: usize,
}

impl Pool {
    pub(super) fn new(count: usize, size: usize) -> Self {
        Self { free: Arc::default(), permits: Arc::new(Semaphore::new(count)), size }
    }

    /// A buffer; waits until one is free.
    pub(super) async fn take(&self) -> Buffer {
        // The semaphore is never closed; without a permit, the buffer is merely not counted.
        let permit = self.permits.clone().acquire_owned().await.ok();
        let free = self.free.lock().pop();
        Buffer { data: free.unwrap_or_else(|| vec![0; self.size]), free: self.free.clone(), _permit: permit }
    }
}

/// A borrowed buffer of a [`Pool`].
pub(super) struct Buffer {
    data: Vec<u8>,
    free: Arc<Mutex<Vec<Vec<u8>>>>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Buffer {
    pub(super) fn data_mut(&mut self) -> &mut [u8] {
        &mut self.data
    }

    /// The whole buffer as bytes that can be split and sent without a copy; it returns when the last part is dropped.
    pub(super) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        self.free.lock().push(data);
    }
}
