//! One CUDA device, ready to launch.

use std::sync::Arc;

use crate::copy_rerotate::Kernels;
use crate::error::{CudaError, Unavailable};
use crate::ffi::{self, Context, DeviceBuffer, Module};
use crate::images;

/// A device with the kernels loaded.
#[derive(Debug)]
pub struct CudaBackend {
    pub(crate) context: Arc<Context>,
    pub(crate) copy_rerotate: Kernels,
}

impl CudaBackend {
    /// Loads the kernels on a device.
    ///
    /// # Errors
    /// [`Unavailable`] when there is no driver, no such device, no kernels in this build, or when
    /// none of them runs on the device.
    pub fn new(device: u32) -> Result<Self, Unavailable> {
        let image = usable()?;
        let count = ffi::device_count().map_err(|error| because(&error))?;
        if device >= count {
            return Err(Unavailable(format!("expected a device below {count}, got {device}")));
        }
        let context = Arc::new(Context::primary(device).map_err(|error| because(&error))?);
        let module = Module::load(&context, image).map_err(|error| because(&error))?;
        let copy_rerotate = Kernels::of(module).map_err(|error| because(&error))?;
        Ok(Self { context, copy_rerotate })
    }

    /// Copies numbers to the device and waits for that: for tables that are made once.
    ///
    /// # Errors
    /// What the driver says; it refuses while a graph is being captured.
    pub fn upload(&self, values: &[f32]) -> Result<DeviceBuffer, CudaError> {
        DeviceBuffer::upload(&self.context, values)
    }
}

/// The kernels' image, or why no device can be used.
fn usable() -> Result<&'static [u8], Unavailable> {
    let Some(image) = images::COPY_REROTATE else {
        return Err(Unavailable(format!("no kernels in this build: {}", images::WHY_ABSENT)));
    };
    if !ffi::present() {
        return Err(Unavailable("no NVIDIA driver on this machine (libcuda was not found)".into()));
    }
    Ok(&image.0)
}

fn because(error: &CudaError) -> Unavailable {
    Unavailable(error.to_string())
}

/// "available: …" with the devices, or "unavailable: …" with the reason.
#[must_use]
pub fn status() -> String {
    let devices = usable().and_then(|_| {
        let count = ffi::device_count().map_err(|error| because(&error))?;
        let describe = |device| {
            let (name, major, minor) = ffi::describe(device).map_err(|error| because(&error))?;
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
    fn a_device_beyond_the_last_is_refused_with_a_reason() {
        let why = CudaBackend::new(u32::MAX).expect_err("no machine has that many");
        assert!(!why.to_string().is_empty());
    }
}
