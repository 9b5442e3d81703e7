//! Which GPUs there are, and the one that this process takes. Decides by UUID, never by index: an index means another GPU in another
//! process. Parts of partitioned (MIG) GPUs are refused.

use std::ffi::{CStr, c_char, c_int};

use super::GpuError;
use super::driver::{Code, Driver, Handle, Uuid, driver};
use weightsync_core::protocol::worker::GpuFacts;

/// A GPU with its primary context, which torch in another process does not share but which is the cheapest one.
pub struct Device {
    driver: &'static Driver,
    context: Handle,
    ordinal: u32,
    facts: GpuFacts,
}

// SAFETY: a context may be made current in any thread; nothing else is done with the pointer.
unsafe impl Send for Device {}
// SAFETY: as above; the driver locks by itself.
unsafe impl Sync for Device {}

/// All GPUs that this process sees. Makes no context.
pub fn devices() -> Result<Vec<GpuFacts>, GpuError> {
    let driver = driver()?;
    ordinals(driver)?.map(|ordinal| look_at(driver, ordinal).map(|(_, facts)| facts)).collect()
}

fn ordinals(driver: &Driver) -> Result<std::ops::Range<c_int>, GpuError> {
    let mut count = 0;
    // SAFETY: writes one integer.
    driver.check("cuDeviceGetCount", unsafe { (driver.device_get_count)(&raw mut count) })?;
    Ok(0..count)
}

fn text(get: impl FnOnce(*mut c_char, c_int) -> Code) -> String {
    let mut bytes = [0 as c_char; 128];
    if get(bytes.as_mut_ptr(), 127) != 0 {
        return String::new();
    }
    // SAFETY: the last byte was not given to the driver and is zero.
    unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_string_lossy().into_owned()
}

fn uuid_text(uuid: Uuid) -> String {
    let uuid = uuid::Uuid::from_bytes(uuid.0);
    format!("GPU-{}", uuid.hyphenated())
}

fn look_at(driver: &Driver, ordinal: c_int) -> Result<(c_int, GpuFacts), GpuError> {
    let (mut device, mut uuid, mut bytes, mut version) = (0, Uuid([0; 16]), 0_usize, 0);
    // SAFETY: each call writes one value of its type; the device is one that the driver gave.
    unsafe {
        driver.check("cuDeviceGet", (driver.device_get)(&raw mut device, ordinal))?;
        driver.check("cuDeviceGetUuid_v2", (driver.device_get_uuid)(&raw mut uuid, device))?;
        driver.check("cuDeviceTotalMem_v2", (driver.device_total_mem)(&raw mut bytes, device))?;
        driver.check("cuDriverGetVersion", (driver.driver_get_version)(&raw mut version))?;
    }
    // SAFETY: the driver writes a text of at most `length` bytes.
    let name = text(|to, length| unsafe { (driver.device_get_name)(to, length, device) });
    // SAFETY: as above.
    let bus = text(|to, length| unsafe { (driver.device_get_bus)(to, length, device) });
    let uuid = uuid_text(uuid);
    // The driver shows a partition as a device of its own, whose name says so ("NVIDIA H100 MIG 1g.10gb").
    let refused = name.split(' ').any(|word| word == "MIG").then(|| GpuError::Mig { gpu: format!("{uuid} ({name})") }.to_string());
    let driver = u32::try_from(version).unwrap_or(0);
    Ok((device, GpuFacts { uuid, name, bus, memory_bytes: bytes as u64, free_bytes: 0, driver, refused }))
}

impl Device {
    /// Takes the GPU of that UUID, or the only visible one, and makes its context current in this thread.
    pub fn open(uuid: Option<&str>) -> Result<Self, GpuError> {
        if let Some(part) = uuid.filter(|uuid| uuid.starts_with("MIG-")) {
            return Err(GpuError::Mig { gpu: part.to_owned() });
        }
        let driver = driver()?;
        let named = |ordinal| look_at(driver, ordinal).map(|(device, facts)| ((device, ordinal), facts));
        let all = ordinals(driver)?.map(named).collect::<Result<Vec<_>, _>>()?;
        let ((device, ordinal), mut facts) = choose(all, uuid)?;
        if facts.refused.is_some() {
            return Err(GpuError::Mig { gpu: format!("{} ({})", facts.uuid, facts.name) });
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the device is one that the driver gave; the context is kept for the rest of the process's life.
        driver.check("cuDevicePrimaryCtxRetain", unsafe { (driver.primary_context_retain)(&raw mut context, device) })?;
        facts.free_bytes = 0;
        let ordinal = u32::try_from(ordinal).unwrap_or(0);
        let mut device = Self { driver, context, ordinal, facts };
        device.bind()?;
        device.facts.free_bytes = device.memory()?.0;
        Ok(device)
    }

    /// Makes the GPU the one of the calling thread; every thread that uses it does so first.
    pub fn bind(&self) -> Result<(), GpuError> {
        // SAFETY: the context is alive.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.context_set_current)(self.context) })
    }

    /// Its index among the GPUs that this process sees.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    pub fn facts(&self) -> &GpuFacts {
        &self.facts
    }

    /// Free and whole memory in bytes, anyone who uses the rest.
    pub fn memory(&self) -> Result<(u64, u64), GpuError> {
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: writes two integers.
        self.driver.check("cuMemGetInfo_v2", unsafe { (self.driver.mem_get_info)(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }

    pub(super) fn driver(&self) -> &'static Driver {
        self.driver
    }
}

/// The GPU that was asked for, or the only one.
fn choose<T>(all: Vec<(T, GpuFacts)>, uuid: Option<&str>) -> Result<(T, GpuFacts), GpuError> {
    let visible = all.iter().map(|(_, facts)| format!("{} ({})", facts.uuid, facts.name)).collect::<Vec<_>>().join(", ");
    let mut fitting = all.into_iter().filter(|(_, facts)| uuid.is_none_or(|uuid| facts.uuid.eq_ignore_ascii_case(uuid)));
    match (fitting.next(), fitting.next(), uuid) {
        (Some(one), None, _) => Ok(one),
        (Some(_), Some(_), _) => Err(GpuError::NoGpu { cause: format!("several GPUs are visible, name one by its UUID: {visible}") }),
        (None, _, _) if visible.is_empty() => Err(GpuError::NoGpu { cause: "no GPU is visible to this process".into() }),
        (None, _, uuid) => {
            Err(GpuError::NoGpu { cause: format!("{} is not visible to this process, which sees {visible}", uuid.unwrap_or_default()) })
        }
    }
}

#[cfg(test)]
mod tests;
