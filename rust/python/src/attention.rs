//! The ops that read pages: attention of prefill rows and of decode rows, and token scores.

use half::{bf16, f16};
use kvweave_core::ops::{
    self, AttendDecode, AttendPrefill, EdgeMass, Fp8E4m3, KvScales, KvView, Queries, ScoreTokens,
    Scoring,
};
use kvweave_cpu as cpu;
use kvweave_reference as reference;
use pyo3::prelude::*;

use crate::arguments::{Table, count, head_rows, output, pages_of, raised, scales_of};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::ops::{run, with_element, with_rows};
use crate::reach::Reach;
use crate::rope::RopeTable;
use crate::scalars::Number;
use crate::tensor::{KvElement, TensorRef};

/// What all three ops take: `kvweave.ops.reading.Reading`, whose fields have these names.
#[derive(FromPyObject)]
pub struct AttentionArguments<'py> {
    pub q: Bound<'py, PyAny>,
    pub positions: Bound<'py, PyAny>,
    pub entries: Bound<'py, PyAny>,
    pub cache: Bound<'py, PyAny>,
    pub layer: Number,
    pub kv_heads: Number,
    pub scale: f32,
    pub rope: Py<RopeTable>,
    pub window: Option<Number>,
    pub softcap: Option<f32>,
    pub reach: Option<Py<Reach>>,
    pub kv_scales: Option<(f32, f32)>,
}

/// The same, borrowed.
struct Attention<'py> {
    q: Borrowed<'py>,
    positions: Table<'py>,
    entries: Table<'py>,
    cache: Borrowed<'py>,
    layer: usize,
    kv_heads: usize,
    scoring: Scoring<'py>,
    reach: Option<ops::Reach<'py>>,
    scales: KvScales,
}

impl<'py> AttentionArguments<'py> {
    pub fn scoring(&self) -> Result<Scoring<'_>, Failure> {
        let window = self.window.map(|window| keys("window", window)).transpose()?;
        let (scale, softcap, rope) = (self.scale, self.softcap, &self.rope.get().table);
        Ok(Scoring { scale, rope, window, softcap })
    }

    fn borrow(&'py self, py: Python<'py>) -> PyResult<Attention<'py>> {
        Ok(Attention {
            q: borrow("q", &self.q)?,
            positions: Table::of("positions", &self.positions)?,
            entries: Table::of("entries", &self.entries)?,
            cache: borrow("cache", &self.cache)?,
            layer: raised(py, count("layer", self.layer))?,
            kv_heads: raised(py, count("kv_heads", self.kv_heads))?,
            scoring: raised(py, self.scoring())?,
            reach: self.reach.as_ref().map(|reach| reach.get().core()),
            scales: scales_of(self.kv_scales),
        })
    }
}

impl Attention<'_> {
    fn queries<T: KvElement>(&self) -> Result<Queries<'_, T>, Failure> {
        let positions = self.positions.list("positions")?;
        Ok(Queries { vectors: head_rows("q", &self.q.tensor)?, positions })
    }

    fn kv<C: KvElement>(&self) -> Result<KvView<'_, C>, Failure> {
        let cache = &self.cache.tensor;
        let geometry = pages_of(cache, self.scoring.rope.layers(), self.kv_heads)?;
        let entries = self.entries.rows("entries")?;
        // SAFETY: the owner is held by self; writers are excluded as `arguments` says.
        let cache = unsafe { cache.slice("cache") }?;
        let (layer, reach, scales) = (self.layer, self.reach, self.scales);
        Ok(KvView { cache, geometry, layer, entries, reach, scales })
    }

    fn read(&self) -> [(&'static str, &TensorRef); 4] {
        [
            ("q", &self.q.tensor),
            ("positions", &self.positions.0.tensor),
            ("entries", &self.entries.0.tensor),
            ("cache", &self.cache.tensor),
        ]
    }

    /// `out` [R, H, D] and `lse` [R, H] as slices to write.
    fn results<'a, T: KvElement>(
        &self,
        out: &TensorRef,
        lse: &TensorRef,
    ) -> Result<(&'a mut [T], &'a mut [f32]), Failure> {
        let size = |axis: usize| self.q.tensor.shape().get(axis).copied();
        let shape = [("R", size(0)), ("H", size(1)), ("D", size(2))];
        let [q, positions, entries, cache] = self.read();
        let read = [q, positions, entries, cache, ("lse", lse)];
        let values = output("out", out, &shape, &read)?;
        Ok((values, output("lse", lse, &shape[..2], &read[..4])?))
    }
}

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, row_offsets, entry_offsets, out, lse, reference))]
pub fn attend_prefill(
    py: Python<'_>,
    arguments: AttentionArguments<'_>,
    row_offsets: Option<&Bound<'_, PyAny>>,
    entry_offsets: Option<&Bound<'_, PyAny>>,
    out: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    reference: bool,
) -> PyResult<()> {
    let call = arguments.borrow(py)?;
    let row_offsets = Offsets::of("row_offsets", row_offsets, &call.positions)?;
    let entry_offsets = Offsets::of("entry_offsets", entry_offsets, &call.entries)?;
    let (out, lse) = (borrow("out", out)?, borrow("lse", lse)?);
    with_rows!(py, call.cache.tensor.dtype, ("q", call.q.tensor.dtype), (T, C) => {
        let params = || {
            let (queries, kv) = (call.queries::<T>()?, call.kv::<C>()?);
            let (out, lse) = call.results(&out.tensor, &lse.tensor)?;
            let row_offsets = row_offsets.list("row_offsets")?;
            let entry_offsets = entry_offsets.list("entry_offsets")?;
            let scoring = call.scoring;
            Ok(AttendPrefill { queries, kv, scoring, row_offsets, entry_offsets, out, lse })
        };
        run!(py, reference, attend_prefill, raised(py, params())?)
    })
}

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, entry_offsets, out, lse, reference))]
pub fn attend_decode(
    py: Python<'_>,
    arguments: AttentionArguments<'_>,
    entry_offsets: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    reference: bool,
) -> PyResult<()> {
    let call = arguments.borrow(py)?;
    let entry_offsets = Table::of("entry_offsets", entry_offsets)?;
    let (out, lse) = (borrow("out", out)?, borrow("lse", lse)?);
    with_rows!(py, call.cache.tensor.dtype, ("q", call.q.tensor.dtype), (T, C) => {
        let params = || {
            let (queries, kv) = (call.queries::<T>()?, call.kv::<C>()?);
            let (out, lse) = call.results(&out.tensor, &lse.tensor)?;
            let entry_offsets = entry_offsets.list("entry_offsets")?;
            Ok(AttendDecode { queries, kv, scoring: call.scoring, entry_offsets, out, lse })
        };
        run!(py, reference, attend_decode, raised(py, params())?)
    })
}

/// `edge` is written when it is given.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, entry_offsets, mass, edge, reference))]
pub fn score_tokens(
    py: Python<'_>,
    arguments: AttentionArguments<'_>,
    entry_offsets: Option<&Bound<'_, PyAny>>,
    mass: &Bound<'_, PyAny>,
    edge: Option<EdgeArguments<'_>>,
    reference: bool,
) -> PyResult<()> {
    let call = arguments.borrow(py)?;
    let entry_offsets = Offsets::of("entry_offsets", entry_offsets, &call.entries)?;
    let mass = borrow("mass", mass)?;
    let edge = edge.map(|edge| Edge::of(py, &edge)).transpose()?;
    with_rows!(py, call.cache.tensor.dtype, ("q", call.q.tensor.dtype), (T, C) => {
        let params = || {
            let (queries, kv) = (call.queries::<T>()?, call.kv::<C>()?);
            let mut read = call.read().to_vec();
            let values = output("mass", &mass.tensor, &[("T", None)], &read)?;
            read.push(("mass", &mass.tensor));
            let rows = &queries.vectors;
            let shape = [("R", Some(rows.rows)), ("H", Some(rows.heads))];
            let edge = edge.as_ref().map(|edge| edge.params(&shape, &read)).transpose()?;
            let entry_offsets = entry_offsets.list("entry_offsets")?;
            let (scoring, mass) = (call.scoring, values);
            Ok(ScoreTokens { queries, kv, scoring, entry_offsets, mass, edge })
        };
        run!(py, reference, score_tokens, raised(py, params())?)
    })
}

/// The share [R, H] to write, and the window and sink of what is not edge.
pub type EdgeArguments<'py> = (Bound<'py, PyAny>, Number, Number);

/// The same, borrowed.
struct Edge<'py> {
    share: Borrowed<'py>,
    window: u32,
    sink: u32,
}

impl<'py> Edge<'py> {
    fn of(py: Python<'py>, (share, window, sink): &EdgeArguments<'py>) -> PyResult<Self> {
        let window = raised(py, keys("window of edge", *window))?;
        let sink = raised(py, keys("sink of edge", *sink))?;
        Ok(Self { share: borrow("edge", share)?, window, sink })
    }

    fn params<'a>(
        &self,
        shape: &[(&str, Option<usize>)],
        read: &[(&str, &TensorRef)],
    ) -> Result<EdgeMass<'a>, Failure> {
        let share = output("edge", &self.share.tensor, shape, read)?;
        Ok(EdgeMass { window: self.window, sink: self.sink, share })
    }
}

/// A number of keys; more than positions can be is as good as all.
pub fn keys(what: &str, value: impl Into<i64>) -> Result<u32, Failure> {
    Ok(u32::try_from(count(what, value)?).unwrap_or(u32::MAX))
}

/// Offsets as given, or those of a call with one request.
enum Offsets<'py> {
    Given(Table<'py>),
    Whole([i32; 2]),
}

impl<'py> Offsets<'py> {
    fn of(what: &str, given: Option<&Bound<'py, PyAny>>, split: &Table<'_>) -> PyResult<Self> {
        let Some(given) = given else {
            let rows = split.0.tensor.shape().first().copied().unwrap_or(0);
            return Ok(Self::Whole([0, i32::try_from(rows).unwrap_or(i32::MAX)]));
        };
        Table::of(what, given).map(Self::Given)
    }

    fn list(&self, what: &str) -> Result<&[i32], Failure> {
        match self {
            Self::Given(table) => table.list(what),
            Self::Whole(offsets) => Ok(offsets),
        }
    }
}
