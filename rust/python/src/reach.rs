//! `Reach` as Python sees it.

use std::sync::Arc;

use kvweave_core::ops;
use kvweave_cuda::{CudaBackend, DeviceBuffer};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::arguments::{Table, count, raised};
use crate::failure::Failure;
use crate::ops::cuda::device::OnDevices;
use crate::scalars::Number;

/// What each KV head of a layer reads: heads of one retention share an entry table, and a local
/// head sees a window of keys and those at the start.
///
/// `tables` R ≥ 1 entry tables of a request; `heads` i32 [G, 4], a row `table, rank, window, sink`
/// a KV head: which of the tables; its page in a block, from the block's first on; the latest keys
/// that a row sees, 0 for all; the keys at the start of the sequence that it sees besides. Shapes
/// are checked here, the rest by the op that is given it. On CUDA an op reads a copy that lives as
/// long as this: whoever captures a call in a graph keeps it for as long as the graph is replayed.
#[pyclass(frozen, module = "kvweave._native")]
pub struct Reach {
    tables: usize,
    heads: Vec<[i32; 4]>,
    /// Copies of the rows on CUDA devices, made at the first use there.
    on_devices: OnDevices,
}

impl Reach {
    /// As the core takes it.
    pub fn core(&self) -> ops::Reach<'_> {
        ops::Reach { tables: self.tables, heads: &self.heads }
    }

    /// R, at least 1.
    pub fn tables(&self) -> usize {
        self.tables
    }

    /// The rows on a device.
    pub fn on(&self, backend: &CudaBackend, device: u32) -> Result<Arc<DeviceBuffer>, Failure> {
        self.on_devices.get(backend, device, || self.heads.as_flattened().to_vec())
    }
}

#[pymethods]
impl Reach {
    #[new]
    fn new(tables: Number, heads: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = heads.py();
        let heads = Table::of("heads", heads)?;
        let checks = || {
            let tables = count("tables", tables)?;
            if tables == 0 {
                return Err(Failure::invalid("tables", "at least 1", tables));
            }
            Ok((tables, heads.rows::<4>("heads")?.to_vec()))
        };
        let (tables, heads) = raised(py, checks())?;
        Ok(Self { tables, heads, on_devices: OnDevices::default() })
    }

    /// R.
    #[getter(tables)]
    fn tables_in_python(&self) -> usize {
        self.tables
    }

    /// A copy of the rows, i32 [G, 4].
    #[getter]
    fn heads<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let numbers = self.heads.as_flattened().iter().copied();
        PyArray1::from_iter(py, numbers).reshape([self.heads.len(), 4])
    }

    fn __repr__(&self) -> String {
        format!("Reach(tables={}, heads={:?})", self.tables, self.heads)
    }
}
