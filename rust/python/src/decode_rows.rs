//! `DecodeRows`: what decode steps must know of the requests that take part.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvweave_core::{self as core, StepHead, StepRows};
use numpy::{PyArray1, PyArray2, PyArray3, PyArrayMethods};
use pyo3::prelude::*;

use crate::arguments::{Table, count, raised};
use crate::cache::KvCache;
use crate::failure::{Failure, call_core};
use crate::freed::FreedPages;
use crate::request::{KvRequest, saturating_u32, with_all};
use crate::rows::rows as table;
use crate::scalars::Number;
use crate::tokens::Tokens;

/// The tables of requests that decode together, their entries in one array of the caller's.
///
/// A request joins with its tables and leaves them behind; nobody else's are touched. A step has a
/// table for each head group of the cache, then one for each head of `set_heads`. A request that
/// has not promoted such a head lists in that table what the head sees, slot by slot; block numbers
/// there are such that the head's page is `block + rank`, its rank in its group, whoever has
/// promoted it.
#[pyclass(frozen, module = "kvweave._native")]
pub struct DecodeRows {
    rows: Mutex<core::DecodeRows>,
    freed: Arc<FreedPages>,
}

impl DecodeRows {
    fn lock(&self) -> MutexGuard<'_, core::DecodeRows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What `DecodeRows.step` returns.
#[pyclass(frozen, get_all, module = "kvweave._native")]
pub struct DecodeStep {
    /// i32 [R]: of the new tokens, one a request or one request behind the other.
    positions: Py<PyArray1<i32>>,
    /// i32 [T, R, 2]: block and slot of their K, V.
    slots: Py<PyArray3<i32>>,
    /// i32 [B, T, 2]: from where to where a table's entries lie in the array.
    spans: Py<PyArray3<i32>>,
    /// i64 [M]: places of the array whose entries have changed, each once.
    places: Py<PyArray1<i64>>,
    /// i32 [M, 5]: what is to be written there.
    moved: Py<PyArray2<i32>>,
    /// i32 [C, 8] of request, group, src_block, src_slot, dst_block, dst_slot, count, delta: copies
    /// to be executed before anything is written.
    copies: Py<PyArray2<i32>>,
    /// Entries of the array, which doubles when it must.
    entries: usize,
    /// The most tables that one of the rows keeps up by itself.
    lanes: usize,
}

impl DecodeStep {
    fn new(py: Python<'_>, step: StepRows, rows: [usize; 3]) -> PyResult<Self> {
        let (new, [tables, entries, lanes]) = (step.positions.len(), rows);
        let batch = step.spans.len() / tables.max(1);
        let cube = |pairs: Vec<[i32; 2]>, sizes: [usize; 3]| {
            PyArray1::from_vec(py, pairs.into_flattened()).reshape(sizes).map(Bound::unbind)
        };
        Ok(Self {
            positions: PyArray1::from_vec(py, step.positions).unbind(),
            slots: cube(step.slots, [tables, new, 2])?,
            spans: cube(step.spans, [batch, tables, 2])?,
            places: PyArray1::from_vec(py, step.moves.places).unbind(),
            moved: table(py, step.moves.entries)?.unbind(),
            copies: table(py, step.copies)?.unbind(),
            entries,
            lanes,
        })
    }
}

#[pymethods]
impl DecodeRows {
    #[new]
    fn new(cache: &Bound<'_, KvCache>) -> Self {
        let cache = cache.get();
        Self { rows: Mutex::new(cache.cache.decode_rows()), freed: cache.freed.clone() }
    }

    /// T: tables of a request in a step.
    #[getter]
    fn tables(&self, py: Python<'_>) -> usize {
        py.detach(|| self.lock().tables())
    }

    /// Entries of the array that the next step may name places of; it may grow with every step.
    #[getter]
    fn entries(&self, py: Python<'_>) -> usize {
        py.detach(|| self.lock().entries())
    }

    /// Says which heads have tables of their own from the next step on: i32 [N, 4] of layer, KV
    /// head, and the window and sink of what the head sees where it was not promoted. They are all
    /// that any request of the batch has promoted; while there are rows, those that were said
    /// before stay first.
    fn set_heads(&self, py: Python<'_>, heads: &Bound<'_, PyAny>) -> PyResult<()> {
        let heads = Table::of("heads", heads)?;
        let head = |&[layer, head, window, sink]: &[i32; 4]| {
            Ok::<_, Failure>(StepHead {
                layer: saturating_u32("layer", layer)?,
                head: saturating_u32("head", head)?,
                window: count("window", window)?,
                sink: count("sink", sink)?,
            })
        };
        let all = || heads.rows::<4>("heads")?.iter().map(head).collect::<Result<Vec<_>, _>>();
        let all = raised(py, all())?;
        call_core(py, || self.lock().set_heads(&all))
    }

    /// A row for one more request.
    fn join(&self, py: Python<'_>) -> usize {
        py.detach(|| self.lock().join())
    }

    /// Gives a row up.
    fn leave(&self, py: Python<'_>, row: Number) -> PyResult<()> {
        let row = raised(py, count("row", row))?;
        call_core(py, || self.lock().leave(row))
    }

    /// Appends a token (i32 [B]) to each request, all or none, and says what the step reads and
    /// writes. `rows` (i32 [B]): the row of each request. `counts` (i32 [B]): so many tokens for
    /// each, at least one; `tokens` are those of all then, one request behind the other.
    #[pyo3(signature = (requests, rows, tokens, counts=None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
    fn step(
        &self,
        py: Python<'_>,
        requests: Vec<Py<KvRequest>>,
        rows: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        counts: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<DecodeStep> {
        let (rows, tokens) = (Table::of("rows", rows)?, Tokens::of(tokens)?);
        let counts = counts.map(|counts| Table::of("counts", counts)).transpose()?;
        let numbers = || {
            let rows = rows.list("rows")?.iter().map(|&row| count("row", row));
            rows.collect::<Result<Vec<_>, _>>()
        };
        let numbers = raised(py, numbers())?;
        let ids = raised(py, tokens.ids())?;
        let each = |counts: &Table<'_>| {
            let each = counts.list("counts")?.iter().map(|&of| count("counts", of));
            each.collect::<Result<Vec<_>, _>>()
        };
        let counts = raised(py, counts.as_ref().map(each).transpose())?;
        let (step, sizes) = call_core(py, || {
            with_all(&requests, |requests| {
                let mut rows = self.lock();
                let step = match &counts {
                    Some(counts) => rows.steps(requests, &numbers, &ids, counts)?,
                    None => rows.step(requests, &numbers, &ids)?,
                };
                Ok((step, [rows.tables(), rows.entries(), rows.lanes()]))
            })
        })?;
        self.freed.zero(py)?;
        DecodeStep::new(py, step, sizes)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("DecodeRows({} tables, {} entries)", self.tables(py), self.entries(py))
    }
}
