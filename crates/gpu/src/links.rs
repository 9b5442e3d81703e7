//! How each GPU reaches the memory of the others. Decides what the driver's answers mean; makes no context.

use std::ffi::c_int;

use super::GpuError;
use super::driver::{Driver, driver};
use weightsync_core::protocol::worker::GpuLink;

/// `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED` (cuda.h): atomic operations on the other's memory, which NVLink carries and PCIe
/// does not.
const NATIVE_ATOMICS: c_int = 3;

/// `links[a][b]`, in the order of [`devices`](super::devices).
pub fn links() -> Result<Vec<Vec<GpuLink>>, GpuError> {
    let driver = driver()?;
    let mut count = 0;
    // SAFETY: writes one integer.
    driver.check("cuDeviceGetCount", unsafe { (driver.device_get_count)(&raw mut count) })?;
    let mut devices = Vec::new();
    for ordinal in 0..count {
        let mut device = 0;
        // SAFETY: writes one integer; the ordinal is below the count.
        driver.check("cuDeviceGet", unsafe { (driver.device_get)(&raw mut device, ordinal) })?;
        devices.push(device);
    }
    devices.iter().map(|from| devices.iter().map(|to| link(driver, *from, *to)).collect()).collect()
}

fn link(driver: &Driver, from: c_int, to: c_int) -> Result<GpuLink, GpuError> {
    if from == to {
        return Ok(GpuLink::Same);
    }
    let (mut reaches, mut atomics) = (0, 0);
    // SAFETY: each call writes one integer; the devices are ones that the driver gave.
    unsafe {
        driver.check("cuDeviceCanAccessPeer", (driver.device_can_access_peer)(&raw mut reaches, from, to))?;
        driver.check("cuDeviceGetP2PAttribute", (driver.device_get_p2p_attribute)(&raw mut atomics, NATIVE_ATOMICS, from, to))?;
    }
    Ok(match (reaches != 0, atomics != 0) {
        (true, true) => GpuLink::Nvlink,
        (true, false) => GpuLink::Pcie,
        (false, _) => GpuLink::None,
    })
}
