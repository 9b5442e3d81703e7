//! Streams and events. Decides how work is ordered on the GPU; the host never waits here, it asks whether an event fired.

use std::sync::Arc;

use super::driver::{Driver, Handle, Ipc, NOT_READY, from_ipc, to_ipc};
use super::memory::Address;
use super::{Device, GpuError, Span};
use weightsync_core::protocol::worker::IpcHandle;

/// `CU_STREAM_NON_BLOCKING`: takes no turns with the default stream.
const NON_BLOCKING: u32 = 1;
/// Lower numbers are more urgent; the driver takes the nearest that the GPU has.
const MOST_URGENT: i32 = -5;
/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`.
const INTERPROCESS: u32 = 4;

pub struct Stream {
    driver: &'static Driver,
    raw: Handle,
}

// SAFETY: the driver locks streams by itself; the pointer is only handed to it.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        Self::create(device, 0)
    }

    /// A stream whose work goes before that of others when both are ready: for broadcasts, on which all ranks wait for each other.
    pub fn urgent(device: &Device) -> Result<Self, GpuError> {
        Self::create(device, MOST_URGENT)
    }

    fn create(device: &Device, priority: i32) -> Result<Self, GpuError> {
        let driver = device.driver();
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let code = unsafe { (driver.stream_create)(&raw mut raw, NON_BLOCKING, priority) };
        driver.check("cuStreamCreateWithPriority", code)?;
        Ok(Self { driver, raw })
    }

    /// Records a new event after all that was given to the stream so far.
    pub fn record_new(&self) -> Result<Arc<Event>, GpuError> {
        let event = Event::create(self.driver, NO_TIMING)?;
        self.record(&event)?;
        Ok(Arc::new(event))
    }

    /// Records an event after all that was given to the stream so far.
    pub fn record(&self, event: &Event) -> Result<(), GpuError> {
        // SAFETY: both are alive.
        self.driver.check("cuEventRecord", unsafe { (self.driver.event_record)(event.raw, self.raw) })
    }

    /// What is given to the stream from now on waits, on the GPU, for what the event stands for now.
    pub fn wait_for(&self, event: &Event) -> Result<(), GpuError> {
        // SAFETY: both are alive; the driver keeps what it needs of the event.
        self.driver.check("cuStreamWaitEvent", unsafe { (self.driver.stream_wait_event)(self.raw, event.raw, 0) })
    }

    /// Copies `from` to `to`, which has the same length; at most one is in host memory. Both must be kept until an event after it fired.
    pub fn copy(&self, to: &Span, from: &Span) -> Result<(), GpuError> {
        if to.bytes() != from.bytes() {
            return Err(GpuError::Invalid { what: format!("a copy of {} bytes into {}", from.bytes(), to.bytes()) });
        }
        let (driver, length) = (self.driver, to.length());
        // SAFETY: a span lies inside memory that it keeps alive, and both have the same length.
        unsafe {
            match (to.address(), from.address()) {
                (Address::Device(to), Address::Device(from)) => {
                    driver.check("cuMemcpyDtoDAsync_v2", (driver.memcpy_device_to_device)(to, from, length, self.raw))
                }
                (Address::Device(to), Address::Host(from)) => {
                    driver.check("cuMemcpyHtoDAsync_v2", (driver.memcpy_host_to_device)(to, from.as_ptr(), length, self.raw))
                }
                (Address::Host(to), Address::Device(from)) => {
                    driver.check("cuMemcpyDtoHAsync_v2", (driver.memcpy_device_to_host)(to.as_ptr(), from, length, self.raw))
                }
                (Address::Host(_), Address::Host(_)) => Err(GpuError::Invalid { what: "a copy from host to host memory".into() }),
            }
        }
    }

    pub fn fill(&self, to: &Span, byte: u8) -> Result<(), GpuError> {
        let Address::Device(address) = to.address() else {
            return Err(GpuError::Invalid { what: "host memory is not filled by the GPU".into() });
        };
        // SAFETY: the span lies inside GPU memory that it keeps alive.
        self.driver.check("cuMemsetD8Async", unsafe { (self.driver.memset_8)(address, byte, to.length(), self.raw) })
    }

    pub(super) fn raw(&self) -> Handle {
        self.raw
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: no one has the stream any more; work that it still has goes on, and it vanishes after it (cuda.h).
        let _ = unsafe { (self.driver.stream_destroy)(self.raw) };
    }
}

pub struct Event {
    driver: &'static Driver,
    raw: Handle,
}

// SAFETY: the driver locks events by itself; the pointer is only handed to it.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn create(driver: &'static Driver, flags: u32) -> Result<Self, GpuError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        driver.check("cuEventCreate", unsafe { (driver.event_create)(&raw mut raw, flags) })?;
        Ok(Self { driver, raw })
    }

    /// An event that other processes can open, and its handle.
    pub fn shared(device: &Device) -> Result<(Self, IpcHandle), GpuError> {
        let event = Self::create(device.driver(), NO_TIMING | INTERPROCESS)?;
        let mut handle = Ipc([0; 64]);
        // SAFETY: the event is alive and was made for this; writes 64 bytes.
        let code = unsafe { (event.driver.ipc_get_event_handle)(&raw mut handle, event.raw) };
        event.driver.check("cuIpcGetEventHandle", code)?;
        Ok((event, from_ipc(handle)))
    }

    /// Another process's event. One that its process made without `CU_EVENT_INTERPROCESS` has no handle, so there is nothing to guess.
    pub fn import(device: &Device, handle: &IpcHandle) -> Result<Self, GpuError> {
        let driver = device.driver();
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer; a handle that means nothing is an error.
        driver.check("cuIpcOpenEventHandle", unsafe { (driver.ipc_open_event_handle)(&raw mut raw, to_ipc(handle)) })?;
        Ok(Self { driver, raw })
    }

    /// Whether all work before it is done. An error of that work, or of any other of this process, is an error here.
    pub fn fired(&self) -> Result<bool, GpuError> {
        // SAFETY: the event is alive.
        match unsafe { (self.driver.event_query)(self.raw) } {
            NOT_READY => Ok(false),
            code => self.driver.check("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: no one has the event any more; the driver frees it when it fired (cuda.h).
        let _ = unsafe { (self.driver.event_destroy)(self.raw) };
    }
}
