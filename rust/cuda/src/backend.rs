//! One CUDA device, ready to launch.

use std::sync::Arc;

use crate::error::{CudaError, Unavailable};
use crate::ffi::{self, Context, DeviceBuffer, Function, Grid, Number};
use crate::images;
use crate::kernels::Kernels;

/// A device and the kernels that its ops have asked for so far.
#[derive(Debug)]
pub struct CudaBackend {
    pub(crate) context: Arc<Context>,
    kernels: Kernels,
}

impl CudaBackend {
    /// Opens a device. Kernels are loaded when an op first needs them.
    ///
    /// # Errors
    /// [`Unavailable`] when there is no driver, no such device or no kernels in this build.
    pub fn new(device: u32) -> Result<Self, Unavailable> {
        usable()?;
        let count = ffi::device_count().map_err(|error| because(&error))?;
        if device >= count {
            return Err(Unavailable(format!("expected a device below {count}, got {device}")));
        }
        let context = Arc::new(Context::primary(device).map_err(|error| because(&error))?);
        Ok(Self { context, kernels: Kernels::default() })
    }

    /// Copies numbers to the device and waits for that: for tables that are made once.
    ///
    /// # Errors
    /// What the driver says.
    pub fn upload<N: Number>(&self, values: &[N]) -> Result<DeviceBuffer, CudaError> {
        DeviceBuffer::upload(&self.context, values)
    }

    /// Streaming multiprocessors of the device.
    #[must_use]
    pub fn processors(&self) -> u32 {
        self.context.device.processors
    }

    /// Compute capability: (9, 0) for H100 and H200.
    #[must_use]
    pub fn capability(&self) -> (i32, i32) {
        self.context.device.capability
    }

    /// The kernel `name` of `csrc/<source>.cu`.
    pub(crate) fn kernel(
        &self,
        source: &'static str,
        name: &str,
    ) -> Result<Arc<Function>, CudaError> {
        self.kernels.get(&self.context, source, name)
    }

    /// Puts the kernel `name` of `csrc/<source>.cu` on a stream.
    ///
    /// # Safety
    /// As for [`ffi::launch`].
    pub(crate) unsafe fn launch<P: Copy>(
        &self,
        (source, name): (&'static str, &str),
        grid: Grid,
        stream: u64,
        params: &P,
    ) -> Result<(), CudaError> {
        let kernel = self.kernel(source, name)?;
        // SAFETY: the caller's promise.
        unsafe { ffi::launch(&self.context, &kernel, grid, stream, params) }
    }
}

/// Refuses a build without kernels, and a machine whose driver is absent or too old for them.
fn usable() -> Result<(), Unavailable> {
    if !images::present() {
        return Err(Unavailable(format!("no kernels in this build: {}", images::WHY_ABSENT)));
    }
    if !ffi::present() {
        return Err(Unavailable("no NVIDIA driver on this machine (libcuda was not found)".into()));
    }
    let version = ffi::driver_version().map_err(|error| because(&error))?;
    new_enough(version, images::CUDA_MAJOR)
}

/// Drivers load what any compiler of their own major version made, or of an earlier one.
fn new_enough(driver: i32, major: i32) -> Result<(), Unavailable> {
    let (found, minor) = (driver / 1000, driver % 1000 / 10);
    if found >= major {
        return Ok(());
    }
    let expected = format!("expected a driver for CUDA {major}.0 or later");
    Err(Unavailable(format!("{expected}, got one for CUDA {found}.{minor}")))
}

fn because(error: &CudaError) -> Unavailable {
    Unavailable(error.to_string())
}

/// "available: …" with the devices, or "unavailable: …" with the reason.
#[must_use]
pub fn status() -> String {
    let devices = usable().and_then(|()| {
        let count = ffi::device_count().map_err(|error| because(&error))?;
        let describe = |device| {
            let found = ffi::describe(device).map_err(|error| because(&error))?;
            let (name, (major, minor)) = (found.name, found.capability);
            Ok(format!("cuda:{device} {name} (compute {major}.{minor})"))
        };
        (0..count).map(describe).collect::<Result<Vec<_>, Unavailable>>()
    });
    match devices {
        Ok(devices) if devices.is_empty() => "unavailable: the driver has no device".into(),
        Ok(devices) => format!("available: {}", devices.join(", ")),
        Err(why) => format!("unavailable: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_agrees_with_new() {
        let text = status();
        match CudaBackend::new(0) {
            Ok(_) => assert!(text.starts_with("available: cuda:0"), "{text}"),
            Err(why) => {
                assert!(text.starts_with("unavailable: "), "{text}");
                assert!(!why.to_string().is_empty());
            }
        }
    }

    #[test]
    fn a_driver_too_old_for_the_kernels_is_refused_with_both_versions() {
        let why = new_enough(12_080, 13).expect_err("12.8 is older than 13.0");
        assert_eq!(
            why.to_string(),
            "expected a driver for CUDA 13.0 or later, got one for CUDA 12.8"
        );
        for driver in [13_000, 13_020, 14_000] {
            assert_eq!(new_enough(driver, 13), Ok(()));
        }
    }

    #[test]
    fn a_device_beyond_the_last_is_refused_with_a_reason() {
        let why = CudaBackend::new(u32::MAX).expect_err("no machine has that many");
        assert!(!why.to_string().is_empty());
    }
}
