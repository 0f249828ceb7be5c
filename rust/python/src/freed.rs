//! Pages of blocks that were freed, and who overwrites them.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

use kvweave_core as core;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::failure::{Failure, call_core};
use crate::rows::rows;

/// What overwrites the pages of a cache's freed blocks; nothing where nobody asked for it.
///
/// Calls that take blocks end with `zero`, so that whoever made them may write to these. Calls that
/// only free blocks do not: they should not wait for memory.
pub struct FreedPages {
    cache: core::KvCache,
    fill: OnceLock<Py<PyAny>>,
    /// Held from when pages are taken until they are overwritten: a thread that was given one of
    /// them waits for another that has it overwritten.
    filling: Mutex<()>,
    /// Who holds `filling`.
    filler: Mutex<Option<ThreadId>>,
}

impl FreedPages {
    pub fn of(cache: &core::KvCache) -> Arc<Self> {
        Arc::new(Self {
            cache: cache.clone(),
            fill: OnceLock::new(),
            filling: Mutex::new(()),
            filler: Mutex::new(None),
        })
    }

    /// From now on has `fill` overwrite pages, i32 [N, 2] of a first one and how many they are.
    pub fn set_fill(&self, py: Python<'_>, fill: Py<PyAny>) -> PyResult<()> {
        call_core(py, || self.cache.note_freed_pages())?;
        let refused = |_| Failure::invalid("zero_freed_by", "one call a cache", "a second one");
        self.fill.set(fill).map_err(|fill| refused(fill).raise(py))
    }

    /// Has everything overwritten that was freed by now.
    pub fn zero(&self, py: Python<'_>) -> PyResult<()> {
        let Some(fill) = self.fill.get() else { return Ok(()) };
        let this = Some(thread::current().id());
        // A finalizer may run in the middle of `fill`, and free something.
        if *self.filler() == this {
            return Ok(());
        }
        let _filling = self.filling.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        *self.filler() = this;
        let pages = call_core(py, || Ok::<_, Failure>(self.cache.take_freed()));
        let filled = pages.and_then(|pages| {
            if pages.is_empty() { Ok(()) } else { fill.call1(py, (rows(py, pages)?,)).map(drop) }
        });
        *self.filler() = None;
        filled
    }

    fn filler(&self) -> std::sync::MutexGuard<'_, Option<ThreadId>> {
        self.filler.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
