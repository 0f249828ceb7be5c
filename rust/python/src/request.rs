//! `KvRequest`: one admitted prompt.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvweave_core::{self as core, Error};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::arguments::{Table, count, raised};
use crate::failure::{Failure, entry};
use crate::plan::ReusePlan;
use crate::tokens::Tokens;

/// A table of `COLUMNS` columns as numpy int32; the rows are not copied.
pub type Rows<'py> = Bound<'py, PyArray2<i32>>;

fn rows<const COLUMNS: usize>(py: Python<'_>, rows: Vec<[i32; COLUMNS]>) -> PyResult<Rows<'_>> {
    let count = rows.len();
    PyArray1::from_vec(py, rows.into_flattened()).reshape([count, COLUMNS])
}

/// An admitted prompt: its plan, its blocks and their tables. `release`, or the last reference
/// going away, returns everything.
#[pyclass(frozen, module = "kvweave._native")]
pub struct KvRequest {
    request: Mutex<Option<core::Request>>,
    plan: Arc<core::ReusePlan>,
}

impl KvRequest {
    pub fn new(request: core::Request) -> Self {
        let plan = Arc::new(request.plan().clone());
        Self { request: Mutex::new(Some(request)), plan }
    }

    /// Runs `work` on the live request, the interpreter lock released before the request's own is
    /// taken: so no thread ever waits for one while it holds the other.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut core::Request) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        entry(py, || match self.lock().as_mut() {
            Some(request) => work(request).map_err(Failure::from),
            None => Err(Failure::invalid("request", "a live request", "a released one")),
        })
    }

    /// A panic inside the core leaves no half-made state that Rust's types do not cover.
    fn lock(&self) -> MutexGuard<'_, Option<core::Request>> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl KvRequest {
    /// What was reused, what was not, and why.
    #[getter]
    fn plan(&self) -> ReusePlan {
        ReusePlan(Arc::clone(&self.plan))
    }

    /// Tokens so far: prompt and appended.
    #[getter]
    fn length(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |request| Ok(request.len()))
    }

    /// Whether `release` was called.
    #[getter]
    fn released(&self, py: Python<'_>) -> bool {
        py.detach(|| self.lock().is_none())
    }

    /// The KV view of [0, length): i32 [N, 5] of block, begin, end, position, delta.
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Rows<'py>> {
        rows(py, self.with(py, |request| Ok(request.entries()))?)
    }

    /// Copies to execute before the request is read: i32 [C, 6] of src_block, src_slot, dst_block,
    /// dst_slot, count, delta. Their sources stay held until `finish_copies`.
    fn take_copies<'py>(&self, py: Python<'py>) -> PyResult<Rows<'py>> {
        rows(py, self.with(py, |request| Ok(request.take_copies()))?)
    }

    /// Says that all copies that were taken have been executed.
    fn finish_copies(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |request| {
            request.finish_copies();
            Ok(())
        })
    }

    /// Makes the blocks of these positions (i32 [R]) private; returns the copies that this takes,
    /// to be executed before anything is written: i32 [C, 6].
    fn make_writable<'py>(
        &self,
        py: Python<'py>,
        positions: &Bound<'py, PyAny>,
    ) -> PyResult<Rows<'py>> {
        let positions = Table::of("positions", positions)?;
        let positions = raised(py, positions.list("positions"))?;
        rows(py, self.with(py, |request| request.make_writable(positions))?)
    }

    /// Where K and V of each position (i32 [R]) go: i32 [R, 2] of block, slot.
    fn slots<'py>(&self, py: Python<'py>, positions: &Bound<'py, PyAny>) -> PyResult<Rows<'py>> {
        let positions = Table::of("positions", positions)?;
        let positions = raised(py, positions.list("positions"))?;
        rows(py, self.with(py, |request| request.slots(positions))?)
    }

    /// Appends generated tokens and makes room for their KV, all or nothing.
    fn append(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        self.with(py, |request| request.append(&ids))
    }

    /// Says that K and V of [0, computed) are stored, and that those of [0, exact) are what a full
    /// prefill would have stored. From now on others may reuse them.
    fn commit(&self, py: Python<'_>, computed: i64, exact: i64) -> PyResult<()> {
        let computed = raised(py, count("computed", computed))?;
        let exact = raised(py, count("exact", exact))?;
        self.with(py, |request| request.commit(computed, exact))
    }

    /// Pins the committed blocks of [start, end) as a knowledge-base entry of this request's
    /// namespace; an entry of the same name is replaced.
    fn freeze(&self, py: Python<'_>, name: &str, start: i64, end: i64) -> PyResult<()> {
        let start = raised(py, count("start", start))?;
        let end = raised(py, count("end", end))?;
        self.with(py, |request| request.freeze(name, start..end))
    }

    /// A second request with the same tokens; blocks are copied by whichever side writes first.
    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        self.with(py, |request| request.fork()).map(Self::new)
    }

    /// Blocks that this request alone pays for, and blocks that it reads of others.
    fn block_counts(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        self.with(py, |request| Ok((request.private_blocks(), request.shared_blocks())))
    }

    /// Returns the blocks; committed ones stay cached. Safe to call twice.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        entry(py, || {
            drop(self.lock().take());
            Ok::<_, Failure>(())
        })
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.release(py)
    }

    fn __repr__(&self) -> String {
        format!("KvRequest({} tokens)", self.plan.tokens)
    }
}
