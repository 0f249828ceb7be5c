//! `RopeTable` as Python sees it.

use std::sync::Arc;

use kvweave_core::ops::{self, Pairing};
use kvweave_cuda::{CudaBackend, DeviceBuffer};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::arguments::raised;
use crate::choices::pairing_kind;
use crate::dlpack::borrow;
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::ops::cuda::device::OnDevices;
use crate::tensor::Device;

/// Inverse frequencies of every layer and how elements pair up: all that moving a key needs.
///
/// `inv_freq` f32 [L, rotary_dim/2]; `pairing` is "half" for pairs (x[i], x[i + rotary_dim/2]) or
/// "interleaved" for (x[2i], x[2i+1]). Elements past rotary_dim are not rotated.
#[pyclass(frozen, module = "kvweave._native")]
pub struct RopeTable {
    pub table: ops::RopeTable,
    /// Copies on CUDA devices, made at the first use there.
    on_devices: OnDevices,
}

impl RopeTable {
    /// The frequencies of all layers on a device.
    pub fn on(&self, backend: &CudaBackend, device: u32) -> Result<Arc<DeviceBuffer>, Failure> {
        let layers = || 0..self.table.layers();
        let all = || layers().flat_map(|layer| self.table.inv_freq(layer)).copied().collect();
        self.on_devices.get(backend, device, all)
    }
}

#[pymethods]
impl RopeTable {
    #[new]
    #[pyo3(signature = (inv_freq, pairing = "half"))]
    fn new(inv_freq: &Bound<'_, PyAny>, pairing: &str) -> PyResult<Self> {
        let py = inv_freq.py();
        let pairing = raised(py, pairing_kind(pairing))?;
        let borrowed = borrow("inv_freq", inv_freq)?;
        let tensor = borrowed.tensor;
        let checks = || {
            tensor.expect_dtype("inv_freq", DType::F32)?;
            tensor.expect_device("inv_freq", Device::Cpu)?;
            tensor.expect_shape("inv_freq", &[("L", None), ("rotary_dim/2", None)])?;
            tensor.expect_contiguous("inv_freq")?;
            // SAFETY: `borrowed` holds the owner; the lock is held, so no Python code writes to
            // it while these few numbers are copied.
            let values = unsafe { tensor.slice::<f32>("inv_freq") }?;
            Ok::<_, Failure>((values.to_vec(), tensor.shape()[0]))
        };
        let (values, layers) = checks().map_err(|failure| failure.raise(py))?;
        let table = call_core(py, || ops::RopeTable::new(values, layers, pairing))?;
        Ok(Self { table, on_devices: OnDevices::default() })
    }

    /// L.
    #[getter]
    fn layers(&self) -> usize {
        self.table.layers()
    }

    /// Elements of a key that are rotated.
    #[getter]
    fn rotary_dim(&self) -> usize {
        2 * self.table.pairs()
    }

    /// "half" or "interleaved".
    #[getter]
    fn pairing(&self) -> &'static str {
        match self.table.pairing() {
            Pairing::Half => "half",
            Pairing::Interleaved => "interleaved",
        }
    }

    /// A copy of the frequencies, f32 [L, rotary_dim/2].
    #[getter]
    fn inv_freq<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (layers, pairs) = (self.table.layers(), self.table.pairs());
        let all = (0..layers).flat_map(|layer| self.table.inv_freq(layer).iter().copied());
        PyArray1::from_iter(py, all).reshape([layers, pairs])
    }

    fn __repr__(&self) -> String {
        format!(
            "RopeTable(layers={}, rotary_dim={}, pairing={:?})",
            self.table.layers(),
            self.rotary_dim(),
            self.pairing()
        )
    }
}
