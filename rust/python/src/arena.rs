//! The arena's memory, and its face as a tensor.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use dlpack_rs::ffi::{DLPACK_FLAG_BITMASK_IS_COPIED, K_DL_CPU};
use dlpack_rs::safe::{TensorInfo, cpu_device};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::dlpack::export;
use crate::dtype::DType;
use crate::failure::Failure;

/// A cache line, and enough for every vector instruction.
const ALIGNMENT: usize = 64;

/// Zeroed memory on a 64-byte boundary. Nothing in Rust reads or writes it except through tensors.
pub struct Memory {
    allocated: NonNull<u8>,
    layout: Layout,
    bytes: usize,
}

// SAFETY: the pointer is owned; who touches the bytes, and when, is decided by the tensors' users,
// as for any tensor.
unsafe impl Send for Memory {}
// SAFETY: as above: no method reads or writes the bytes through `&self`.
unsafe impl Sync for Memory {}

impl Memory {
    /// `bytes` of zeros, which the system provides when they are first touched: the allocation
    /// itself asks for small alignment, because the allocator clears by hand above that.
    pub fn zeroed(bytes: usize) -> Result<Self, Failure> {
        let refuse =
            || Failure::out_of_memory("arena", format!("{bytes} bytes"), "fewer on this machine");
        let padded = bytes.checked_add(ALIGNMENT).ok_or_else(refuse)?;
        let layout = Layout::from_size_align(padded, 16).map_err(|_| refuse())?;
        // SAFETY: the layout's size is at least ALIGNMENT, so not zero.
        let allocated = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refuse)?;
        Ok(Self { allocated, layout, bytes })
    }

    /// The first aligned byte; `bytes` follow.
    fn start(&self) -> *mut u8 {
        let start = self.allocated.as_ptr();
        start.wrapping_add(start.align_offset(ALIGNMENT))
    }

    /// A copy of the bytes as they are now.
    fn duplicate(&self) -> Result<Self, Failure> {
        let twin = Self::zeroed(self.bytes)?;
        // SAFETY: both hold `bytes` bytes and the twin is new, so they do not overlap.
        unsafe { self.start().copy_to_nonoverlapping(twin.start(), self.bytes) };
        Ok(twin)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout, and dropped once.
        unsafe { dealloc(self.allocated.as_ptr(), self.layout) };
    }
}

/// All pages of a cache as a tensor [pages, 2, P, D], without a copy: `torch.from_dlpack(arena)`.
///
/// The memory lives as long as the arena or any tensor made from it.
#[pyclass(frozen, module = "kvweave._native")]
pub struct Arena {
    memory: Arc<Memory>,
    shape: [usize; 4],
    dtype: DType,
}

impl Arena {
    pub fn new(shape: [usize; 4], dtype: DType) -> Result<Self, Failure> {
        let elements = shape.iter().try_fold(dtype.bytes(), |n, &size| n.checked_mul(size));
        let bytes = elements
            .ok_or_else(|| Failure::invalid("arena", "a size in memory", format!("{shape:?}")))?;
        Ok(Self { memory: Arc::new(Memory::zeroed(bytes)?), shape, dtype })
    }

    fn info(&self, memory: &Memory) -> TensorInfo {
        let [pages, parts, tokens, dim] = self.shape.map(|size| size as i64);
        let strides = vec![parts * tokens * dim, tokens * dim, dim, 1];
        let shape = vec![pages, parts, tokens, dim];
        let first = memory.start().cast::<c_void>();
        TensorInfo::strided(first, cpu_device(), self.dtype.to_dlpack(), shape, strides)
    }
}

#[pymethods]
impl Arena {
    /// (pages, 2, P, D).
    #[getter]
    fn shape(&self) -> (usize, usize, usize, usize) {
        let [pages, parts, tokens, dim] = self.shape;
        (pages, parts, tokens, dim)
    }

    /// "float32", "bfloat16" or "float16".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.memory.bytes
    }

    fn __dlpack_device__(&self) -> (u32, i32) {
        (K_DL_CPU, 0)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("stream: expected None for host memory"));
        }
        if dl_device.is_some_and(|device| device != self.__dlpack_device__()) {
            let got = format!("dl_device: expected (1, 0), host memory, got {dl_device:?}");
            return Err(PyBufferError::new_err(got));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let (memory, flags) = if copy == Some(true) {
            let twin = py.detach(|| self.memory.duplicate()).map_err(|error| error.raise(py))?;
            (Arc::new(twin), DLPACK_FLAG_BITMASK_IS_COPIED)
        } else {
            (Arc::clone(&self.memory), 0)
        };
        let info = self.info(&memory);
        export(py, memory, info, versioned, flags)
    }

    fn __repr__(&self) -> String {
        format!("Arena(shape={:?}, dtype={})", self.shape, self.dtype.name())
    }
}
