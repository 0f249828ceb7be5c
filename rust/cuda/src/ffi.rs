//! Every call into the CUDA driver. Nothing else in this crate is `unsafe`.
//!
//! Duties that hold throughout: the library was found before any function is called
//! (`present`), handles come from the driver and are released once, and work runs with the
//! device's primary context current (`Context::enter`), the caller's context put back afterwards.

use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{DriverError, result, sys};

use crate::error::CudaError;

/// Whether the driver's library can be loaded.
pub(crate) fn present() -> bool {
    // SAFETY: loads libcuda, whose initialisers are the driver's own, and lets it go again.
    unsafe { sys::is_culib_present() }
}

fn named(call: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| {
        let text = |of: Result<&CStr, DriverError>| {
            of.map_or_else(|_| "unknown".into(), |text| text.to_string_lossy().into_owned())
        };
        let got = format!("{} ({})", text(error.error_name()), text(error.error_string()));
        CudaError::Driver { call, got }
    }
}

/// Starts the driver and counts its devices.
pub(crate) fn device_count() -> Result<u32, CudaError> {
    result::init().map_err(named("cuInit"))?;
    let count = result::device::get_count().map_err(named("cuDeviceGetCount"))?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// Name and compute capability of a device.
pub(crate) fn describe(device: u32) -> Result<(String, i32, i32), CudaError> {
    let handle = handle_of(device)?;
    let name = result::device::get_name(handle).map_err(named("cuDeviceGetName"))?;
    let attribute = |which| {
        // SAFETY: `handle` came from cuDeviceGet.
        unsafe { result::device::get_attribute(handle, which) }
            .map_err(named("cuDeviceGetAttribute"))
    };
    use sys::CUdevice_attribute_enum as Attribute;
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok((name, major, minor))
}

fn handle_of(device: u32) -> Result<sys::CUdevice, CudaError> {
    let ordinal = i32::try_from(device)
        .map_err(|_| CudaError::invalid("device", "a small number", device))?;
    result::device::get(ordinal).map_err(named("cuDeviceGet"))
}

/// The primary context of a device: the one that torch uses.
#[derive(Debug)]
pub(crate) struct Context {
    raw: sys::CUcontext,
    handle: sys::CUdevice,
}

// SAFETY: a context handle may be used from any thread; the driver locks inside.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn primary(device: u32) -> Result<Self, CudaError> {
        let handle = handle_of(device)?;
        // SAFETY: `handle` came from cuDeviceGet; released in `drop`.
        let raw = unsafe { result::primary_ctx::retain(handle) }
            .map_err(named("cuDevicePrimaryCtxRetain"))?;
        Ok(Self { raw, handle })
    }

    /// Runs `work` with this context current on the thread.
    pub(crate) fn enter<T>(
        &self,
        work: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let before = result::ctx::get_current().map_err(named("cuCtxGetCurrent"))?;
        if before == Some(self.raw) {
            return work();
        }
        // SAFETY: retained in `primary` and not released before `drop`.
        unsafe { result::ctx::set_current(self.raw) }.map_err(named("cuCtxSetCurrent"))?;
        let outcome = work();
        let before = before.unwrap_or(ptr::null_mut());
        // SAFETY: the context that was current a moment ago, or none.
        let restored = unsafe { result::ctx::set_current(before) };
        restored.map_err(named("cuCtxSetCurrent"))?;
        outcome
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: balances the one retain. A failure leaves a context that the process's end frees.
        unsafe { result::primary_ctx::release(self.handle) }.ok();
    }
}

/// A loaded image.
#[derive(Debug)]
pub(crate) struct Module {
    raw: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: module handles may be used from any thread with the context current.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel of a module; valid as long as it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: function handles may be used from any thread with the context current.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    pub(crate) fn load(context: &Arc<Context>, image: &'static [u8]) -> Result<Self, CudaError> {
        let raw = context.enter(|| {
            // SAFETY: a whole fatbin made by nvcc, aligned, alive as long as the process.
            unsafe { result::module::load_data(image.as_ptr().cast()) }
                .map_err(named("cuModuleLoadData"))
        })?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    pub(crate) fn function(&self, name: &str) -> Result<Function, CudaError> {
        let owned = CString::new(name)
            .map_err(|_| CudaError::invalid("kernel name", "text without zeros", name))?;
        self.context.enter(|| {
            // SAFETY: the module is loaded and not unloaded before `drop`.
            unsafe { result::module::get_function(self.raw, owned) }
                .map(Function)
                .map_err(named("cuModuleGetFunction"))
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once. A failure leaves code that the context's end frees.
        let unload =
            || unsafe { result::module::unload(self.raw) }.map_err(named("cuModuleUnload"));
        self.context.enter(unload).ok();
    }
}

/// Device memory that holds a copy of host data.
#[derive(Debug)]
pub struct DeviceBuffer {
    address: sys::CUdeviceptr,
    context: Arc<Context>,
}

impl DeviceBuffer {
    /// Copies `values` to the device and waits for that. Not allowed while a graph is captured.
    pub(crate) fn upload(context: &Arc<Context>, values: &[f32]) -> Result<Self, CudaError> {
        let bytes = size_of_val(values).max(1);
        let address = context.enter(|| {
            // SAFETY: a plain allocation; the address is freed in `drop`.
            let address = unsafe { result::malloc_sync(bytes) }.map_err(named("cuMemAlloc"))?;
            // SAFETY: `address` is a fresh allocation at least as long as `values`.
            unsafe { result::memcpy_htod_sync(address, values) }.map_err(named("cuMemcpyHtoD"))?;
            Ok(address)
        })?;
        Ok(Self { address, context: Arc::clone(context) })
    }

    /// The device address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once; the driver waits for kernels that still read it.
        let free = || unsafe { result::free_sync(self.address) }.map_err(named("cuMemFree"));
        self.context.enter(free).ok();
    }
}

/// Launches a kernel whose only argument is `params`.
///
/// # Safety
/// `P` is the kernel's own params struct, and every address in it is valid for what the kernel
/// reads and writes until the stream has run it. `stream` belongs to `context`.
pub(crate) unsafe fn launch<P: Copy>(
    context: &Context,
    function: Function,
    (grid, block, shared_bytes): (u32, u32, u32),
    stream: u64,
    params: &P,
) -> Result<(), CudaError> {
    let stream = stream as sys::CUstream;
    let mut argument = *params;
    let mut arguments = [(&raw mut argument).cast::<c_void>()];
    context.enter(|| {
        // SAFETY: the driver copies the argument before it returns; the rest is the caller's.
        unsafe {
            let (grid, block) = ((grid, 1, 1), (block, 1, 1));
            result::launch_kernel(function.0, grid, block, shared_bytes, stream, &mut arguments)
        }
        .map_err(named("cuLaunchKernel"))
    })
}
