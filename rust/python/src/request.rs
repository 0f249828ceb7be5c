//! `KvRequest`: one admitted prompt.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvweave_core::{self as core, Error, GroupId};
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::arguments::{Table, count, raised};
use crate::choices::advice;
use crate::failure::{Failure, call_core};
use crate::freed::FreedPages;
use crate::plan::ReusePlan;
use crate::rows::{Rows, rows};
use crate::scalars::{Number, Text};
use crate::tokens::Tokens;

/// An admitted prompt: its plan, its blocks and their tables. `release`, or the last reference
/// going away, returns everything.
#[pyclass(frozen, module = "kvweave._native")]
pub struct KvRequest {
    request: Mutex<Option<core::Request>>,
    plan: Arc<core::ReusePlan>,
    freed: Arc<FreedPages>,
}

impl KvRequest {
    pub fn new(request: core::Request, freed: Arc<FreedPages>) -> Self {
        let plan = Arc::new(request.plan().clone());
        Self { request: Mutex::new(Some(request)), plan, freed }
    }

    /// Runs `work` on the live request, the interpreter lock released before the request's own is
    /// taken: so no thread ever waits for one while it holds the other.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut core::Request) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        call_core(py, || match self.lock().as_mut() {
            Some(request) => work(request).map_err(Failure::from),
            None => Err(Failure::invalid("request", "a live request", "a released one")),
        })
    }

    /// The same of work that may take blocks, which hold nothing of others when this returns where
    /// that was asked for.
    fn with_blocks<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut core::Request) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let done = self.with(py, work)?;
        self.freed.zero(py)?;
        Ok(done)
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

    /// Token ids so far: i32 [length].
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let tokens = self.with(py, |request| Ok(request.tokens().to_vec()))?;
        Ok(PyArray1::from_iter(py, tokens.into_iter().map(u32::cast_signed)))
    }

    /// The namespace that the prompt was admitted in.
    #[getter]
    fn namespace(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |request| Ok(request.namespace().to_owned()))
    }

    /// The RoPE regime that the prompt was admitted in.
    #[getter]
    fn regime(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |request| Ok(request.regime()))
    }

    /// Whether `release` was called.
    #[getter]
    fn released(&self, py: Python<'_>) -> bool {
        py.detach(|| self.lock().is_none())
    }

    /// Tables that the request reads: one a head group, then one a promoted head.
    #[getter]
    fn tables(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |request| Ok(request.tables()))
    }

    /// Heads that were promoted, as (layer, KV head), in the order of their tables.
    #[getter]
    fn promoted(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32)>> {
        self.with(py, |request| Ok(request.promoted().to_vec()))
    }

    /// What the KV heads of a layer read: i32 [G, 4] of table, rank, window, sink.
    fn head_rows<'py>(&self, py: Python<'py>, layer: Number) -> PyResult<Rows<'py>> {
        let layer = raised(py, saturating_u32("layer", layer))?;
        rows(py, self.with(py, |request| request.head_rows(layer))?)
    }

    /// The KV view of [0, length) in a table: i32 [N, 5] of block, begin, end, position, delta.
    /// That of a window group lists the blocks that are kept.
    #[pyo3(signature = (table=Number::from(0)))]
    fn entries<'py>(&self, py: Python<'py>, table: Number) -> PyResult<Rows<'py>> {
        let table = raised(py, count("table", table))?;
        rows(py, self.with(py, |request| request.entries_of(table))?)
    }

    /// Copies to execute in a head group before the request is read: i32 [C, 6] of src_block,
    /// src_slot, dst_block, dst_slot, count, delta. Their sources stay held until
    /// `finish_copies`.
    #[pyo3(signature = (group=Number::from(0)))]
    fn take_copies<'py>(&self, py: Python<'py>, group: Number) -> PyResult<Rows<'py>> {
        let group = raised(py, group_id(group))?;
        rows(py, self.with(py, |request| request.take_copies_of(group))?)
    }

    /// Says that all copies that were taken have been executed.
    fn finish_copies(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |request| {
            request.finish_copies();
            Ok(())
        })
    }

    /// Makes the blocks of these positions (i32 [R]) private, in one head group or in all. What
    /// this takes is to be copied before anything is written: see `take_copies`.
    #[pyo3(signature = (positions, group=None))]
    fn make_writable(
        &self,
        py: Python<'_>,
        positions: &Bound<'_, PyAny>,
        group: Option<Number>,
    ) -> PyResult<()> {
        let positions = Table::of("positions", positions)?;
        let positions = raised(py, positions.list("positions"))?;
        let group = raised(py, group.map(group_id).transpose())?;
        self.with_blocks(py, |request| request.make_writable(positions, group))
    }

    /// Where K and V of each position (i32 [R]) go in a table: i32 [R, 2] of block, slot; −1 and −1
    /// where a window group keeps nothing.
    #[pyo3(signature = (positions, table=Number::from(0)))]
    fn slots<'py>(
        &self,
        py: Python<'py>,
        positions: &Bound<'py, PyAny>,
        table: Number,
    ) -> PyResult<Rows<'py>> {
        let positions = Table::of("positions", positions)?;
        let positions = raised(py, positions.list("positions"))?;
        let table = raised(py, count("table", table))?;
        rows(py, self.with(py, |request| request.slots_of(table, positions))?)
    }

    /// Says that rows before `start` are done and that [start, end) come next: window groups let
    /// go of what no coming row sees and get room for those rows.
    fn advance(&self, py: Python<'_>, start: Number, end: Number) -> PyResult<()> {
        let start = raised(py, count("start", start))?;
        let end = raised(py, count("end", end))?;
        self.with_blocks(py, |request| request.advance(start, end))
    }

    /// Makes a head of a window group full for this request, with a table of its own of one-page
    /// blocks. Returns the copies that bring in what is stored of it, to be run with
    /// `copy_rerotate(layers=[layer])`: i32 [C, 6].
    fn promote<'py>(&self, py: Python<'py>, layer: Number, head: Number) -> PyResult<Rows<'py>> {
        let layer = raised(py, saturating_u32("layer", layer))?;
        let head = raised(py, saturating_u32("head", head))?;
        rows(py, self.with_blocks(py, |request| request.promote(layer, head))?)
    }

    /// Appends generated tokens and makes room for their KV, all or nothing.
    fn append(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        self.with_blocks(py, |request| request.append(&ids))
    }

    /// Takes back the tokens behind the first `length`, as if they had never been appended.
    fn truncate(&self, py: Python<'_>, length: Number) -> PyResult<()> {
        let length = raised(py, count("length", length))?;
        self.with(py, |request| request.truncate(length))
    }

    /// Says which tokens (i32 [N]) those from `start` on are that were appended before they were
    /// known.
    fn set_tokens(&self, py: Python<'_>, start: Number, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let start = raised(py, count("start", start))?;
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        self.with(py, |request| request.set_tokens(start, &ids))
    }

    /// Says that K and V of [0, computed) are stored, and that those of [0, exact) are what a full
    /// prefill would have stored. From now on others may reuse them.
    fn commit(&self, py: Python<'_>, computed: Number, exact: Number) -> PyResult<()> {
        let computed = raised(py, count("computed", computed))?;
        let exact = raised(py, count("exact", exact))?;
        self.with(py, |request| request.commit(computed, exact))
    }

    /// Takes back what was committed, as its KV has not come: nobody finds it from now on.
    fn retract(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |request| {
            request.retract();
            Ok::<_, Error>(())
        })
    }

    /// Pins the committed blocks of [start, end) as a knowledge-base entry of this request's
    /// namespace; an entry of the same name is replaced.
    fn freeze(&self, py: Python<'_>, name: Text<'_>, start: Number, end: Number) -> PyResult<()> {
        let start = raised(py, count("start", start))?;
        let end = raised(py, count("end", end))?;
        self.with(py, |request| request.freeze(name.0, start..end))
    }

    /// Refuses a name that all of this request could not be frozen under once it was computed and
    /// committed as exact, as `KvCache.require_frozen_room`.
    #[pyo3(signature = (name, *, going=vec![]))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
    fn require_frozen_room(
        &self,
        py: Python<'_>,
        name: Text<'_>,
        going: Vec<(String, String)>,
    ) -> PyResult<()> {
        self.with(py, |request| request.require_frozen_room(name.0, &going))
    }

    /// Takes note of what is known of the positions [start, end): of the blocks that hold any of
    /// them, for everybody who shares these. Only a cache that evicts by "cost-aware" has a use
    /// for it.
    #[pyo3(signature = (
        start, end, *, priority=Number::from(0), cost=Number::from(1), until=None,
        past=Text("first"), hint=Text("none")
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword argument in Python")]
    fn advise(
        &self,
        py: Python<'_>,
        start: Number,
        end: Number,
        priority: Number,
        cost: Number,
        until: Option<Number>,
        past: Text<'_>,
        hint: Text<'_>,
    ) -> PyResult<()> {
        let start = raised(py, count("start", start))?;
        let end = raised(py, count("end", end))?;
        let advice = raised(py, advice(priority, cost, (until, past.0), hint.0))?;
        self.with(py, |request| request.advise(start..end, advice))
    }

    /// A second request with the same tokens; blocks are copied by whichever side writes first.
    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        let fork = self.with(py, |request| request.fork())?;
        Ok(Self::new(fork, self.freed.clone()))
    }

    /// Bytes of the blocks that this request alone pays for, and of those that it reads together
    /// with others, over all head groups.
    fn kv_bytes(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        self.with(py, |request| Ok(request.kv_bytes()))
    }

    /// Says that the next entries of a head group's table have their KV in the host's memory from
    /// now on, in blocks `home` (i32 [N]) there: theirs go back, donors are let go of, and the
    /// request holds at least `slots` in place of all that it spilled. Entries list a block so
    /// spilled as −1 − its number at home. Returns the pages of the slots, i32 [S].
    fn spill<'py>(
        &self,
        py: Python<'py>,
        group: Number,
        home: &Bound<'py, PyAny>,
        slots: Number,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let home = Table::of("home", home)?;
        let home = raised(py, home.list("home"))?;
        let group = raised(py, group_id(group))?;
        let slots = raised(py, count("slots", slots))?;
        let pages = self.with_blocks(py, |request| request.spill(group, home, slots))?;
        Ok(PyArray1::from_vec(py, pages))
    }

    /// Gives all that was spilled of a head group blocks again, into which its KV is to be brought
    /// before anything is read; its slots go.
    fn bring_back(&self, py: Python<'_>, group: Number) -> PyResult<()> {
        let group = raised(py, group_id(group))?;
        self.with_blocks(py, |request| request.bring_back(group))
    }

    /// Entries of a head group's table that lie in the host's memory: its first ones.
    fn spilled(&self, py: Python<'_>, group: Number) -> PyResult<usize> {
        let group = raised(py, group_id(group))?;
        self.with(py, |request| request.spilled(group))
    }

    /// Says that the KV was brought in from elsewhere, to decode from: `commit` is refused from now
    /// on, here and in forks.
    fn bring_in(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |request| {
            request.bring_in();
            Ok(())
        })
    }

    /// Returns the blocks; committed ones stay cached. Safe to call twice.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        call_core(py, || {
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

/// Runs `work` on all requests of a batch, in their order.
///
/// They are locked in the order of their addresses, so that two batches that share some never wait
/// for one another.
pub fn with_all<T>(
    requests: &[Py<KvRequest>],
    work: impl FnOnce(&mut [&mut core::Request]) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let about = |number: usize, what: &str| format!("{what} {number} of {}", requests.len());
    let mut order: Vec<usize> = (0..requests.len()).collect();
    let address = |&number: &usize| std::ptr::from_ref(requests[number].get()).addr();
    order.sort_unstable_by_key(address);
    if let Some(pair) = order.windows(2).find(|pair| address(&pair[0]) == address(&pair[1])) {
        let got = format!("the same as request {}", pair[0].min(pair[1]));
        let what = about(pair[0].max(pair[1]), "request");
        return Err(Failure::invalid(what, "each request once", got));
    }
    let mut held: Vec<_> = requests.iter().map(|_| None).collect();
    for number in order {
        held[number] = Some(requests[number].get().lock());
    }
    let mut live = Vec::with_capacity(requests.len());
    for (number, guard) in held.iter_mut().enumerate() {
        match guard.as_mut().and_then(|guard| guard.as_mut()) {
            Some(request) => live.push(request),
            None => {
                let what = about(number, "request");
                return Err(Failure::invalid(what, "a live request", "a released one"));
            }
        }
    }
    work(&mut live)
}

/// A layer or head: whatever does not fit is one that no model has.
pub fn saturating_u32(what: &str, number: impl Into<Number>) -> Result<u32, Failure> {
    Ok(u32::try_from(count(what, number)?).unwrap_or(u32::MAX))
}

/// A head group: whatever does not fit is one that no cache has.
pub fn group_id(number: impl Into<Number>) -> Result<GroupId, Failure> {
    Ok(GroupId(u8::try_from(count("group", number)?).unwrap_or(u8::MAX)))
}
