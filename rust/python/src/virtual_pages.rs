//! `VirtualPages`: where the KV of page numbers lies that somebody else hands out.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvweave_core::Error;
use kvweave_core::virtual_pages::{ClassPage, VirtualPages as Pages};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{Table, count, raised};
use crate::failure::{Failure, call_core};
use crate::request::saturating_u32;
use crate::rows::{Rows, rows};
use crate::scalars::Number;

/// Tables from virtual page to block for classes of heads, over blocks of one size.
#[pyclass(frozen, module = "kvweave._native")]
pub struct VirtualPages(Mutex<Pages>);

impl VirtualPages {
    fn lock(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on (class, page) rows, the interpreter lock released before ours is taken.
    fn with<T: Send>(
        &self,
        pages: &Bound<'_, PyAny>,
        work: impl FnOnce(&mut Pages, &[ClassPage]) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let py = pages.py();
        let table = Table::of("pages", pages)?;
        let named = raised(py, table.rows::<2>("pages").and_then(class_pages))?;
        call_core(py, || work(&mut self.lock(), &named).map_err(Failure::from))
    }
}

fn class_pages(rows: &[[i32; 2]]) -> Result<Vec<ClassPage>, Failure> {
    let number = |value: i32| {
        u32::try_from(value).map_err(|_| Failure::invalid("pages", "numbers from 0 on", value))
    };
    rows.iter().map(|&[class, page]| Ok((number(class)?, number(page)?))).collect()
}

#[pymethods]
impl VirtualPages {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
    fn new(
        py: Python<'_>,
        pages: Number,
        arena_pages: Number,
        block_pages: Number,
        parts: Vec<Number>,
    ) -> PyResult<Self> {
        let made = call_core(py, || {
            let parts: Result<Vec<u32>, Failure> =
                parts.iter().map(|part| saturating_u32("parts", part)).collect();
            let (pages, block_pages) =
                (saturating_u32("pages", pages)?, saturating_u32("block_pages", block_pages)?);
            let arena_pages = count("arena_pages", arena_pages)? as u64;
            Pages::new(pages, arena_pages, block_pages, &parts?).map_err(Failure::from)
        })?;
        Ok(Self(Mutex::new(made)))
    }

    /// Gives (class, page) rows i32 [N, 2] blocks and a holder, all or nothing.
    fn take(&self, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with(pages, |tables, pages| tables.take(pages))
    }

    /// Adds a holder to each of i32 [N, 2].
    fn hold(&self, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with(pages, |tables, pages| tables.hold(pages))
    }

    /// Removes a holder of each of i32 [N, 2]; what loses its last stays findable or not.
    #[pyo3(signature = (pages, *, keep))]
    fn release(&self, pages: &Bound<'_, PyAny>, keep: bool) -> PyResult<()> {
        self.with(pages, |tables, pages| tables.release(pages, keep))
    }

    /// Whether each of i32 [N, 2] is kept: bool [N].
    fn is_kept<'py>(&self, pages: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<bool>>> {
        let kept = self.with(pages, |tables, pages| {
            pages.iter().map(|&at| tables.is_kept(at)).collect::<Result<Vec<bool>, Error>>()
        })?;
        Ok(PyArray1::from_vec(pages.py(), kept))
    }

    /// Blocks that could be had for all but i32 [N, 2].
    fn room_beside(&self, pages: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.with(pages, |tables, pages| tables.room_beside(pages))
    }

    /// Blocks that nobody would hold any more if each of i32 [N, 2] lost a holder.
    fn held_alone(&self, pages: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.with(pages, |tables, pages| tables.held_alone(pages))
    }

    /// (table, page, arena page of the block or 0) of what changed since this was last asked:
    /// i32 [N, 3].
    fn take_changes<'py>(&self, py: Python<'py>) -> PyResult<Rows<'py>> {
        let changes = py.detach(|| self.lock().take_changes());
        rows(py, changes)
    }

    /// (class, page) of what was kept and had to go since this was last asked: i32 [N, 2].
    fn take_forgotten<'py>(&self, py: Python<'py>) -> PyResult<Rows<'py>> {
        let forgotten = py.detach(|| self.lock().take_forgotten());
        rows(py, forgotten)
    }

    /// Blocks: total, free, held, cached.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = py.detach(|| self.lock().counts());
        let stats = PyDict::new(py);
        stats.set_item("total", counts.total)?;
        stats.set_item("free", counts.free)?;
        stats.set_item("held", counts.held)?;
        stats.set_item("cached", counts.cached)?;
        Ok(stats)
    }

    /// Recounts everything.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        call_core(py, || self.lock().check().map_err(Failure::from))
    }
}
