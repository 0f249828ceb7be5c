//! What the ops that read pages have in common on the host: queries, entries, pages, offsets.

use kvweave_core::ops::{self, KvScales, KvView, PackedKv, Queries, Scoring};
use pyo3::prelude::*;

use crate::arguments::{Table, count, head_rows, output, pages_of, raised, scales_of};
use crate::dlpack::{Borrowed, borrow};
use crate::failure::Failure;
use crate::ops::reading::AttentionArguments;
use crate::packed::{BasesGiven, PackedFormat};
use crate::tensor::{KvElement, TensorRef};

/// The arguments of an op that reads pages, borrowed.
pub struct Attention<'py> {
    pub q: Borrowed<'py>,
    pub positions: Table<'py>,
    pub entries: Table<'py>,
    pub cache: Borrowed<'py>,
    layer: usize,
    kv_heads: usize,
    pub scoring: Scoring<'py>,
    reach: Option<ops::Reach<'py>>,
    scales: KvScales,
}

impl<'py> Attention<'py> {
    pub fn of(py: Python<'py>, of: &'py AttentionArguments<'py>) -> PyResult<Self> {
        Ok(Self {
            q: borrow("q", &of.q)?,
            positions: Table::of("positions", &of.positions)?,
            entries: Table::of("entries", &of.entries)?,
            cache: borrow("cache", &of.cache)?,
            layer: raised(py, count("layer", &of.layer))?,
            kv_heads: raised(py, count("kv_heads", &of.kv_heads))?,
            scoring: raised(py, of.scoring())?,
            reach: of.reach.as_ref().map(|reach| reach.get().core()),
            scales: scales_of(of.kv_scales),
        })
    }
}

impl Attention<'_> {
    pub fn queries<T: KvElement>(&self) -> Result<Queries<'_, T>, Failure> {
        let positions = self.positions.list("positions")?;
        Ok(Queries { vectors: head_rows("q", &self.q.tensor)?, positions })
    }

    pub fn kv<C: KvElement>(&self) -> Result<KvView<'_, C>, Failure> {
        let cache = &self.cache.tensor;
        let geometry = pages_of(cache, self.scoring.rope.layers(), self.kv_heads)?;
        let entries = self.entries.rows("entries")?;
        // SAFETY: the owner is held by self; writers are excluded as `arguments` says.
        let cache = unsafe { cache.slice("cache") }?;
        let (layer, reach, scales) = (self.layer, self.reach, self.scales);
        Ok(KvView { cache, geometry, layer, entries, reach, scales })
    }

    /// The cache as packed pages of `format`.
    pub fn packed<'a>(
        &'a self,
        format: &PackedFormat,
        bases: Option<&'a BasesGiven<'_>>,
    ) -> Result<PackedKv<'a>, Failure> {
        let packed = &self.cache.tensor;
        format.expect_pages("packed pages", packed)?;
        let entries = self.entries.rows("entries")?;
        // SAFETY: the owner is held by self; writers are excluded as `arguments` says.
        let packed = unsafe { packed.bytes("packed pages") }?;
        let (layers, kv_heads) = (self.scoring.rope.layers(), self.kv_heads);
        let (format, layer, reach) = (format.format, self.layer, self.reach);
        let bases = bases.map(|bases| bases.core(&format)).transpose()?;
        Ok(PackedKv { packed, format, layers, kv_heads, layer, entries, reach, bases })
    }

    pub fn read(&self) -> [(&'static str, &TensorRef); 4] {
        [
            ("q", &self.q.tensor),
            ("positions", &self.positions.0.tensor),
            ("entries", &self.entries.0.tensor),
            ("cache", &self.cache.tensor),
        ]
    }

    /// `out` [R, H, D] and `lse` [R, H] as slices to write.
    pub fn results<'a, T: KvElement>(
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

/// Offsets as given, or those of a call with one request.
pub enum Offsets<'py> {
    Given(Table<'py>),
    Whole([i32; 2]),
}

impl<'py> Offsets<'py> {
    pub fn of(what: &str, given: Option<&Bound<'py, PyAny>>, split: &Table<'_>) -> PyResult<Self> {
        let Some(given) = given else {
            let rows = split.0.tensor.shape().first().copied().unwrap_or(0);
            return Ok(Self::Whole([0, i32::try_from(rows).unwrap_or(i32::MAX)]));
        };
        Table::of(what, given).map(Self::Given)
    }

    pub fn list(&self, what: &str) -> Result<&[i32], Failure> {
        match self {
            Self::Given(table) => table.list(what),
            Self::Whole(offsets) => Ok(offsets),
        }
    }
}
