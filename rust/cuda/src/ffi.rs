//! Every call into the CUDA driver. Other files are `unsafe` only where they hand on what a caller
//! promises of addresses and streams.
//!
//! Duties that hold throughout: the library was found before any function is called
//! (`present`), handles come from the driver and are released once, and work runs with the
//! device's primary context current (`Context::enter`), the caller's context put back afterwards.

use std::ffi::{CStr, CString, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{DriverError, result, sys};
use kvweave_core::KvDtype;

use crate::background;
use crate::error::CudaError;
use crate::operands::Tiled;

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
        match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => CudaError::OutOfMemory { call, got },
            _ => CudaError::Driver { call, got },
        }
    }
}

/// The CUDA that the driver is for: 13000 is 13.0.
pub(crate) fn driver_version() -> Result<i32, CudaError> {
    let mut version = 0;
    // SAFETY: writes one number to the place that it is given.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(named("cuDriverGetVersion"))?;
    Ok(version)
}

/// Starts the driver and counts its devices.
pub(crate) fn device_count() -> Result<u32, CudaError> {
    result::init().map_err(named("cuInit"))?;
    let count = result::device::get_count().map_err(named("cuDeviceGetCount"))?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Description {
    pub(crate) name: String,
    /// Compute capability: (9, 0) for H100 and H200.
    pub(crate) capability: (i32, i32),
    /// Streaming multiprocessors.
    pub(crate) processors: u32,
    /// Shared memory that a thread block may ask for.
    shared_bytes: i32,
}

impl Description {
    /// Whether a thread block may have so much shared memory.
    pub(crate) fn gives(&self, shared_bytes: usize) -> bool {
        usize::try_from(self.shared_bytes).is_ok_and(|limit| shared_bytes <= limit)
    }
}

/// Name and limits of a device.
pub(crate) fn describe(device: u32) -> Result<Description, CudaError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let handle = handle_of(device)?;
    let name = result::device::get_name(handle).map_err(named("cuDeviceGetName"))?;
    let attribute = |which| {
        // SAFETY: `handle` came from cuDeviceGet.
        unsafe { result::device::get_attribute(handle, which) }
            .map_err(named("cuDeviceGetAttribute"))
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let shared_bytes = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let processors = u32::try_from(processors).unwrap_or(1).max(1);
    Ok(Description { name, capability: (major, minor), processors, shared_bytes })
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
    pub(crate) device: Description,
}

// SAFETY: a context handle may be used from any thread; the driver locks inside.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn primary(device: u32) -> Result<Self, CudaError> {
        let (handle, described) = (handle_of(device)?, describe(device)?);
        // SAFETY: `handle` came from cuDeviceGet; released in `drop`.
        let raw = unsafe { result::primary_ctx::retain(handle) }
            .map_err(named("cuDevicePrimaryCtxRetain"))?;
        Ok(Self { raw, handle, device: described })
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

    /// The same for work that a stream capture would forbid although it puts nothing on a stream,
    /// such as loading a module: it is allowed while this or another thread captures a graph.
    fn enter_uncaptured<T>(
        &self,
        work: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        self.enter(|| {
            let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            let before = exchange_capture_mode(relaxed)?;
            let outcome = work();
            exchange_capture_mode(before)?;
            outcome
        })
    }
}

/// Sets how this thread takes captures, and returns what was set before.
fn exchange_capture_mode(
    mut mode: sys::CUstreamCaptureMode,
) -> Result<sys::CUstreamCaptureMode, CudaError> {
    // SAFETY: `mode` is one number that the driver reads and replaces.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }
        .result()
        .map_err(named("cuThreadExchangeStreamCaptureMode"))?;
    Ok(mode)
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
#[derive(Debug)]
pub(crate) struct Function {
    raw: sys::CUfunction,
    /// Set once, when a launch first asks for more shared memory than every device gives.
    enlarged: OnceLock<Result<(), CudaError>>,
}

// SAFETY: function handles may be used from any thread with the context current.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Allows launches to ask for all the shared memory that the kernel itself leaves.
    fn enlarge(&self, device: &Description) -> Result<(), CudaError> {
        use sys::CUfunction_attribute_enum as Attribute;
        let set = || {
            let mut own = 0;
            let shared = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            // SAFETY: a live function and a number to write to.
            unsafe { sys::cuFuncGetAttribute(&raw mut own, shared, self.raw) }
                .result()
                .map_err(named("cuFuncGetAttribute"))?;
            let limit = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let rest = device.shared_bytes - own;
            // SAFETY: a live function.
            unsafe { result::function::set_function_attribute(self.raw, limit, rest) }
                .map_err(named("cuFuncSetAttribute"))
        };
        self.enlarged.get_or_init(set).clone()
    }
}

impl Module {
    pub(crate) fn load(context: &Arc<Context>, image: &'static [u8]) -> Result<Self, CudaError> {
        let raw = context.enter_uncaptured(|| {
            // SAFETY: a whole fatbin made by nvcc, aligned, alive as long as the process.
            unsafe { result::module::load_data(image.as_ptr().cast()) }
                .map_err(named("cuModuleLoadData"))
        })?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    pub(crate) fn function(&self, name: &str) -> Result<Function, CudaError> {
        let owned = CString::new(name)
            .map_err(|_| CudaError::invalid("kernel name", "text without zeros", name))?;
        self.context.enter_uncaptured(|| {
            // SAFETY: the module is loaded and not unloaded before `drop`.
            let raw = unsafe { result::module::get_function(self.raw, owned) }
                .map_err(named("cuModuleGetFunction"))?;
            Ok(Function { raw, enlarged: OnceLock::new() })
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

/// Numbers that a table on the device may hold.
pub trait Number: Copy + sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for i32 {}
}

impl Number for f32 {}
impl Number for i32 {}

impl DeviceBuffer {
    /// Copies `values` to the device and waits for that.
    pub(crate) fn upload<N: Number>(
        context: &Arc<Context>,
        values: &[N],
    ) -> Result<Self, CudaError> {
        let bytes = size_of_val(values).max(1);
        let address = context.enter_uncaptured(|| {
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
        // The driver waits for the whole device before it frees. The owner may be an object of
        // Python that goes while work is queued, so neither its thread nor the interpreter's lock
        // waits along.
        let (address, context) = (self.address, Arc::clone(&self.context));
        background::run(move || {
            // SAFETY: allocated once, freed once; the driver waits for kernels that still read it.
            let free = || unsafe { result::free_sync(address) }.map_err(named("cuMemFree"));
            context.enter_uncaptured(free).ok();
        });
    }
}

/// The address under which kernels reach pinned host memory of so many bytes; nothing for memory
/// that is not pinned. Where its end is not, as in memory that is pinned part by part, kernels
/// reach each part only if they go by the host's own addresses.
pub(crate) fn reachable(context: &Context, address: u64, bytes: usize) -> Option<u64> {
    let attribute = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_DEVICE_POINTER;
    let mapped = |address: u64| {
        let mut found: sys::CUdeviceptr = 0;
        // SAFETY: the driver looks the address up without reading there, and writes one number.
        let told =
            unsafe { sys::cuPointerGetAttribute((&raw mut found).cast(), attribute, address) };
        told.result().ok().map(|()| found)
    };
    let ends = || {
        let last = address.checked_add(bytes.checked_sub(1)? as u64)?;
        let first = mapped(address)?;
        let end = mapped(last).unwrap_or(last);
        (end.checked_sub(first) == Some(last - address)).then_some(first)
    };
    context.enter_uncaptured(|| Ok(ends())).ok().flatten()
}

/// The memory that an address lies in, as it was allocated or pinned at once: its addresses.
/// Nothing for memory that the driver does not know.
pub(crate) fn memory_around(context: &Context, address: u64) -> Option<Range<u64>> {
    use sys::CUpointer_attribute_enum as Attribute;
    let told = |attribute| {
        let mut found = 0u64;
        // SAFETY: as in `reachable`; an address and a size are 8 bytes each.
        let told =
            unsafe { sys::cuPointerGetAttribute((&raw mut found).cast(), attribute, address) };
        told.result().ok().map(|()| found)
    };
    let ends = || {
        let begin = told(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)?;
        let size = told(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?;
        Some(begin..begin.checked_add(size)?).filter(|found| found.contains(&address))
    };
    context.enter_uncaptured(|| Ok(ends())).ok().flatten()
}

/// How a launch is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Thread blocks, by axis.
    pub(crate) blocks: [u32; 3],
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
}

/// Launches a kernel whose only argument is `params`.
///
/// # Safety
/// `P` is the kernel's own params struct, and every address in it is valid for what the kernel
/// reads and writes until the stream has run it. `stream` belongs to `context`.
pub(crate) unsafe fn launch<P: Copy>(
    context: &Context,
    function: &Function,
    grid: Grid,
    stream: u64,
    params: &P,
) -> Result<(), CudaError> {
    let stream = stream as sys::CUstream;
    let mut argument = *params;
    let mut arguments = [(&raw mut argument).cast::<c_void>()];
    context.enter(|| {
        // A kernel's own shared memory counts too towards what every launch has.
        if grid.shared_bytes > 0 {
            function.enlarge(&context.device)?;
        }
        let [x, y, z] = grid.blocks;
        let (blocks, threads) = ((x, y, z), (grid.threads, 1, 1));
        let bytes = grid.shared_bytes;
        // SAFETY: the driver copies the argument before it returns; the rest is the caller's.
        unsafe {
            result::launch_kernel(function.raw, blocks, threads, bytes, stream, &mut arguments)
        }
        .map_err(named("cuLaunchKernel"))
    })
}

/// Rows of bytes that a copy engine carries, at even distances on both sides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopiedRows {
    pub(crate) source: u64,
    pub(crate) target: u64,
    /// Bytes of a row.
    pub(crate) width: usize,
    pub(crate) rows: usize,
    /// Bytes from one row to the next, at least `width`.
    pub(crate) source_pitch: usize,
    pub(crate) target_pitch: usize,
}

/// Puts copies on a stream, one behind the other.
///
/// # Safety
/// All rows lie in memory of the context's device, or in pinned memory of the host, that stays
/// valid until the stream has passed. `stream` belongs to `context`.
pub(crate) unsafe fn copy_rows(
    context: &Context,
    copies: impl Iterator<Item = CopiedRows>,
    stream: u64,
) -> Result<(), CudaError> {
    let stream = stream as sys::CUstream;
    context.enter(|| {
        for rows in copies {
            let copy = sys::CUDA_MEMCPY2D_st {
                srcXInBytes: 0,
                srcY: 0,
                srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
                srcHost: ptr::null(),
                srcDevice: rows.source,
                srcArray: ptr::null_mut(),
                srcPitch: rows.source_pitch,
                dstXInBytes: 0,
                dstY: 0,
                dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
                dstHost: ptr::null_mut(),
                dstDevice: rows.target,
                dstArray: ptr::null_mut(),
                dstPitch: rows.target_pitch,
                WidthInBytes: rows.width,
                Height: rows.rows,
            };
            // SAFETY: the driver reads the description before it returns; the rest is the caller's.
            unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, stream) }
                .result()
                .map_err(named("cuMemcpy2DAsync"))?;
        }
        Ok(())
    })
}

/// The words of a `CUtensorMap`: see [`crate::TensorMap::tiled`],
/// which checked that the axes belong together.
pub(crate) fn encode_tiled(tensor: &Tiled<'_>) -> Result<[u64; 16], CudaError> {
    let dtype = match tensor.dtype {
        KvDtype::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        KvDtype::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        KvDtype::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        KvDtype::Fp8E4m3 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    };
    let axes = tensor.dims.len().min(tensor.copied.len()).min(tensor.strides_bytes.len() + 1);
    let every = [1u32; 5];
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: all four arrays have `axes` numbers (strides one fewer), at most 5; `map` is written.
    // The address is only noted: it is the kernel's launch that promises its memory.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            dtype,
            axes.min(every.len()) as u32,
            tensor.address as *mut c_void,
            tensor.dims.as_ptr(),
            tensor.strides_bytes.as_ptr(),
            tensor.copied.as_ptr(),
            every.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(named("cuTensorMapEncodeTiled"))?;
    Ok(map.opaque)
}
