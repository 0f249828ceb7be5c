//! Devices opened so far, and tables that are copied to each of them once.

use std::sync::{Arc, Mutex, PoisonError};

use kvweave_cuda::{CudaBackend, CudaError, DeviceBuffer, Number, PerDevice};
use pyo3::prelude::*;

use crate::failure::{Failure, call_core};

/// The driver keeps one context per device and process anyhow, so this only mirrors state that is
/// already shared.
static BACKENDS: Mutex<Vec<(u32, Arc<CudaBackend>)>> = Mutex::new(Vec::new());

/// The backend of a device, opened at its first use.
pub fn backend(device: u32) -> Result<Arc<CudaBackend>, Failure> {
    let mut opened = BACKENDS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, backend)) = opened.iter().find(|(of, _)| *of == device) {
        return Ok(Arc::clone(backend));
    }
    let made = CudaBackend::new(device)
        .map_err(|why| Failure::unavailable("cuda", format!("device {device}"), why))?;
    let made = Arc::new(made);
    opened.push((device, Arc::clone(&made)));
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
            CudaError::OutOfMemory { call, got } => Self::out_of_memory(call, "memory for it", got),
            CudaError::Driver { call, got } => Self::unavailable(call, "success", got),
            other => Self::unavailable("cuda", "success", other),
        }
    }
}

/// Copies of one table of numbers, by device.
#[derive(Default)]
pub struct OnDevices(PerDevice<DeviceBuffer>);

impl OnDevices {
    /// The table on a device; the first use there waits for its copy.
    pub fn get<N: Number>(
        &self,
        backend: &CudaBackend,
        device: u32,
        numbers: impl FnOnce() -> Vec<N>,
    ) -> Result<Arc<DeviceBuffer>, Failure> {
        self.0.get_or_make(device, || Ok(backend.upload(&numbers())?))
    }
}

/// "available: …" with the devices, or "unavailable: …" with the reason.
#[pyfunction]
pub fn cuda_status(py: Python<'_>) -> PyResult<String> {
    call_core(py, || Ok::<_, Failure>(kvweave_cuda::status()))
}
