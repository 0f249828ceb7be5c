//! The CUDA side of the ops, and what is kept per device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kvweave_core::KvDtype;
use kvweave_core::ops::{self, validate_copies};
use kvweave_cuda::{CopyRerotateLaunch, CudaBackend, CudaError, DeviceBuffer, DeviceTensor};
use pyo3::prelude::*;

use crate::arguments::{Table, count, pages_of, raised};
use crate::dlpack::borrow;
use crate::dtype::DType;
use crate::failure::{Failure, entry};
use crate::rope::RopeTable;
use crate::tensor::{Device, TensorRef};

/// Kernels loaded so far. The driver keeps one context per device and process anyhow, so this
/// only mirrors state that is already shared.
static BACKENDS: Mutex<Vec<(u32, Arc<CudaBackend>)>> = Mutex::new(Vec::new());

fn backend(device: u32) -> Result<Arc<CudaBackend>, Failure> {
    let mut loaded = BACKENDS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, backend)) = loaded.iter().find(|(of, _)| *of == device) {
        return Ok(Arc::clone(backend));
    }
    let made = CudaBackend::new(device)
        .map_err(|why| Failure::unavailable("cuda", format!("device {device}"), why))?;
    let made = Arc::new(made);
    loaded.push((device, Arc::clone(&made)));
    Ok(made)
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::InvalidArgument { what, expected, got } => {
                Self::invalid(what, expected, got)
            }
            CudaError::Unsupported { what, expected, got } => {
                Self::unsupported(what, expected, got)
            }
            CudaError::Driver { call, got } => Self::unavailable(call, "success", got),
            other => Self::unavailable("cuda", "success", other),
        }
    }
}

/// Copies of a rope table's frequencies, by device.
#[derive(Default)]
pub struct DeviceTables(Mutex<HashMap<u32, Arc<DeviceBuffer>>>);

impl DeviceTables {
    /// The table on a device; the first use there waits for its copy.
    fn on(
        &self,
        backend: &CudaBackend,
        device: u32,
        table: &ops::RopeTable,
    ) -> Result<Arc<DeviceBuffer>, CudaError> {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = made.get(&device) {
            return Ok(Arc::clone(buffer));
        }
        let layers = 0..table.layers();
        let all: Vec<f32> = layers.flat_map(|layer| table.inv_freq(layer).to_vec()).collect();
        let buffer = Arc::new(backend.upload(&all)?);
        made.insert(device, Arc::clone(&buffer));
        Ok(buffer)
    }
}

/// "available: …" with the devices, or "unavailable: …" with the reason.
#[pyfunction]
pub fn cuda_status(py: Python<'_>) -> PyResult<String> {
    entry(py, || Ok::<_, Failure>(kvweave_cuda::status()))
}

/// `copies` lies on the device; `on_host` is the same table where the caller has it, and is then
/// checked. `stream` is the handle of the stream to run on.
#[pyfunction]
#[pyo3(signature = (cache, copies, on_host, rope, kv_heads, stream))]
pub fn copy_rerotate_cuda(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    copies: &Bound<'_, PyAny>,
    on_host: Option<&Bound<'_, PyAny>>,
    rope: &Bound<'_, RopeTable>,
    kv_heads: i64,
    stream: u64,
) -> PyResult<()> {
    let (cache, copies) = (borrow("cache", cache)?, borrow("copies", copies)?);
    let on_host = on_host.map(|table| Table::of("copies", table)).transpose()?;
    let rope = rope.get();
    let (device, call) = raised(py, launch_of(&cache.tensor, &copies.tensor, rope, kv_heads))?;
    if let Some(table) = &on_host {
        let rows = raised(py, table.rows::<6>("copies"))?;
        entry(py, || validate_copies(rows, &call.geometry, &rope.table, call.cache.len))?;
    }
    entry(py, || {
        let backend = backend(device)?;
        let table = rope.on_devices.on(&backend, device, &rope.table)?;
        let launch = call.on(&table, &rope.table, stream);
        // SAFETY: both tensors were read from live owners on this device, which torch keeps until
        // the stream has passed; the table lives as long as `rope`. Blocks read and written were
        // checked on the host, or are the caller's promise where the table is on the device.
        unsafe { backend.copy_rerotate(&launch) }.map_err(Failure::from)
    })
}

/// The plain numbers of a launch: what may cross to a thread without the interpreter lock.
struct Call {
    cache: DeviceTensor,
    dtype: KvDtype,
    geometry: ops::PageGeometry,
    copies: DeviceTensor,
    copy_count: usize,
}

impl Call {
    fn on<'a>(
        &self,
        inv_freq: &'a DeviceBuffer,
        rope: &ops::RopeTable,
        stream: u64,
    ) -> CopyRerotateLaunch<'a> {
        CopyRerotateLaunch {
            cache: self.cache,
            dtype: self.dtype,
            geometry: self.geometry,
            copies: self.copies,
            copy_count: self.copy_count,
            inv_freq,
            pairs: rope.pairs(),
            pairing: rope.pairing(),
            stream,
        }
    }
}

fn launch_of(
    cache: &TensorRef,
    copies: &TensorRef,
    rope: &RopeTable,
    kv_heads: i64,
) -> Result<(u32, Call), Failure> {
    let Device::Cuda(ordinal) = cache.device else {
        return Err(Failure::invalid("cache", "a CUDA tensor", cache.device.name()));
    };
    let dtype = match cache.dtype {
        DType::F32 => KvDtype::F32,
        DType::Bf16 => KvDtype::Bf16,
        DType::F16 => KvDtype::F16,
        other => {
            let expected = "float32, bfloat16 or float16";
            return Err(Failure::invalid("cache", expected, other.name()));
        }
    };
    let geometry = pages_of(cache, rope.table.layers(), count("kv_heads", kv_heads)?)?;
    cache.expect_writable("cache")?;
    cache.expect_aligned("cache", dtype.bytes() as usize)?;
    copies.expect_dtype("copies", DType::I32)?;
    copies.expect_shape("copies", &[("N", None), ("columns", Some(6))])?;
    copies.expect_contiguous("copies")?;
    copies.expect_device("copies", cache.device)?;
    copies.expect_aligned("copies", 4)?;
    copies.expect_apart("copies", cache, "cache")?;
    let device = u32::try_from(ordinal)
        .map_err(|_| Failure::invalid("cache", "a device of at least 0", ordinal))?;
    let at = |tensor: &TensorRef| DeviceTensor { address: tensor.ptr as u64, len: tensor.len() };
    let copy_count = copies.shape()[0];
    let call = Call { cache: at(cache), dtype, geometry, copies: at(copies), copy_count };
    Ok((device, call))
}
