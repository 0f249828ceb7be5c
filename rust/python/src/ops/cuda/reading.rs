//! What the ops that read pages have in common on CUDA: queries, entries, pages, scoring.

use std::sync::Arc;

use kvweave_core::ops::{
    Bases, HeadRows, KvScales, KvView, OpError, PackedFormat as CoreFormat, PageGeometry, Queries,
    Reach as CoreReach, Scoring,
};
use kvweave_cuda::{CudaBackend, DeviceBuffer, DeviceKv, DeviceReach, DeviceRows, DeviceTensor};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair, extent_of, nothing};
use crate::arguments::{count, pages_of, raised, scales_of};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::Failure;
use crate::ops::reading::AttentionArguments;
use crate::packed::PackedFormat;
use crate::reach::Reach;
use crate::rope::RopeTable;
use crate::tensor::TensorRef;

/// The tensors of a call, borrowed.
pub struct Reading<'py> {
    q: Borrowed<'py>,
    positions: DeviceTable<'py>,
    entries: DeviceTable<'py>,
    entry_offsets: DeviceTable<'py>,
    cache: Borrowed<'py>,
    layer: usize,
    kv_heads: usize,
    rope: &'py RopeTable,
    reach: Option<&'py Reach>,
    scoring: Scoring<'py>,
    scales: KvScales,
}

/// The plain parts of a call, which need no interpreter lock.
pub struct Call<'a> {
    pub place: Place,
    pub q: DeviceRows,
    pub positions: DeviceTensor,
    /// R, H and D of `q`.
    pub vectors: HeadRows<'static, ()>,
    pub scoring: Scoring<'a>,
    /// B: requests that `entry_offsets` splits the entries between.
    pub requests: usize,
    cache: DeviceTensor,
    /// Of the cache, as exact pages have them.
    elements: usize,
    geometry: PageGeometry,
    layer: usize,
    entries: DeviceTensor,
    entry_offsets: DeviceTensor,
    rope: &'a RopeTable,
    reach: Option<&'a Reach>,
    scales: KvScales,
    positions_on_host: Option<&'a [i32]>,
    entries_on_host: Option<(&'a [[i32; 5]], &'a [i32])>,
}

/// Tables that a device keeps.
pub struct KeptTables {
    inv_freq: Arc<DeviceBuffer>,
    heads: Option<Arc<DeviceBuffer>>,
}

impl<'py> Reading<'py> {
    /// `positions` and `entries` of `arguments` are pairs, as `entry_offsets` is.
    pub fn of(
        py: Python<'py>,
        arguments: &'py AttentionArguments<'py>,
        entry_offsets: &TablePair<'py>,
    ) -> PyResult<Self> {
        let pair = |what: &str, object: &Bound<'py, PyAny>| {
            DeviceTable::of(what, &object.extract::<TablePair<'py>>()?)
        };
        Ok(Self {
            q: borrow("q", &arguments.q)?,
            positions: pair("positions", &arguments.positions)?,
            entries: pair("entries", &arguments.entries)?,
            entry_offsets: DeviceTable::of("entry_offsets", entry_offsets)?,
            cache: borrow("cache", &arguments.cache)?,
            layer: raised(py, count("layer", &arguments.layer))?,
            kv_heads: raised(py, count("kv_heads", &arguments.kv_heads))?,
            rope: arguments.rope.get(),
            reach: arguments.reach.as_ref().map(Py::get),
            scoring: raised(py, arguments.scoring())?,
            scales: scales_of(arguments.kv_scales),
        })
    }

    /// Everything that is read, for results to lie apart from.
    pub fn read(&self) -> [(&'static str, &TensorRef); 5] {
        [
            ("q", &self.q.tensor),
            ("positions", &self.positions.on_device.tensor),
            ("entries", &self.entries.on_device.tensor),
            ("entry_offsets", &self.entry_offsets.on_device.tensor),
            ("cache", &self.cache.tensor),
        ]
    }

    pub fn call(&self) -> Result<Call<'_>, Failure> {
        let cache = &self.cache.tensor;
        let place = Place::of("cache", cache)?.with_rows("q", &self.q.tensor)?;
        let geometry = pages_of(cache, self.scoring.rope.layers(), self.kv_heads)?;
        self.call_of(place, geometry, extent_of("cache", cache)?.len)
    }

    /// A call whose cache are packed pages of `format`: as exact ones it has so many elements.
    pub fn call_packed(&self, format: &PackedFormat) -> Result<Call<'_>, Failure> {
        let packed = &self.cache.tensor;
        let place = Place::of_rows("q", &self.q.tensor)?;
        place.expect("packed pages", packed, DType::U8)?;
        format.expect_pages("packed pages", packed)?;
        let (layers, of) = (self.scoring.rope.layers(), &format.format);
        let geometry = PageGeometry::arena(layers, self.kv_heads, of.page_tokens(), of.head_dim());
        let elements = packed.shape()[0].saturating_mul(geometry.block_stride);
        self.call_of(place, geometry, elements)
    }

    /// Of a cache that is packed pages: how many it has.
    pub fn packed_pages(&self) -> usize {
        self.cache.tensor.shape().first().copied().unwrap_or(0)
    }

    fn call_of(
        &self,
        place: Place,
        geometry: PageGeometry,
        elements: usize,
    ) -> Result<Call<'_>, Failure> {
        let (q, vectors) = place.rows("q", &self.q.tensor)?;
        let (positions, _) = self.positions.list("positions", &place)?;
        let (entries, _) = self.entries.rows::<5>("entries", &place)?;
        let (entry_offsets, ends) = self.entry_offsets.list("entry_offsets", &place)?;
        let tables = self.reach.map_or(1, Reach::tables);
        if ends == 0 || !(ends - 1).is_multiple_of(tables) {
            let expected = format!("one more than a multiple of {tables} (tables)");
            return Err(Failure::invalid("entry_offsets", expected, ends));
        }
        let on_host = (
            self.entries.rows_on_host("entries")?,
            self.entry_offsets.list_on_host("entry_offsets")?,
        );
        Ok(Call {
            place,
            q,
            positions,
            vectors,
            scoring: self.scoring,
            requests: (ends - 1) / tables,
            cache: extent_of("cache", &self.cache.tensor)?,
            elements,
            geometry,
            layer: self.layer,
            entries,
            entry_offsets,
            rope: self.rope,
            reach: self.reach,
            scales: self.scales,
            positions_on_host: self.positions.list_on_host("positions")?,
            entries_on_host: on_host.0.zip(on_host.1),
        })
    }
}

impl Call<'_> {
    /// The core's own checks, as far as tables lie on the host: what is on the device is known by
    /// its shape alone. With `bases`, every block that is read has one of them.
    pub fn validate(&self, bases: Option<(&CoreFormat, &Bases<'_, ()>)>) -> Result<(), OpError> {
        let cache = nothing(self.elements);
        let (geometry, layer) = (self.geometry, self.layer);
        let reach = self.reach.map(Reach::core);
        let (entries, offsets) = self.entries_on_host.unwrap_or((&[], &[0]));
        let kv = KvView { cache, geometry, layer, entries, reach, scales: self.scales };
        kv.validate(offsets)?;
        kv.scales.validate(self.place.dtype.is_quantised())?;
        let unknown = match self.positions_on_host {
            Some(_) => Vec::new(),
            None => vec![0; self.positions.len],
        };
        let positions = self.positions_on_host.unwrap_or(&unknown);
        Queries { vectors: self.vectors, positions }.validate(&geometry)?;
        self.scoring.validate(&kv.geometry, kv.scales, kv.reach)?;
        bases.map_or(Ok(()), |(format, bases)| {
            bases.check_entries(format, &kv, &self.scoring, offsets)
        })
    }

    /// The largest end of an entry, where the entries are known on the host.
    pub fn last_end(&self) -> Option<usize> {
        let (entries, _) = self.entries_on_host?;
        let end = |&[_, begin, end, position, _]: &[i32; 5]| {
            i64::from(position) + i64::from(end) - i64::from(begin)
        };
        let last = entries.iter().map(end).max().unwrap_or(0);
        Some(usize::try_from(last).unwrap_or(0))
    }

    /// Tables that stay on the device: the first use there waits for their copy.
    pub fn kept_tables(&self, backend: &CudaBackend) -> Result<KeptTables, Failure> {
        let ordinal = self.place.ordinal;
        let heads = self.reach.map(|reach| reach.on(backend, ordinal)).transpose()?;
        Ok(KeptTables { inv_freq: self.rope.on(backend, ordinal)?, heads })
    }

    pub fn kv<'a>(&self, kept: &'a KeptTables) -> DeviceKv<'a> {
        let reach = self.reach.zip(kept.heads.as_ref()).map(|(reach, heads)| {
            let CoreReach { tables, .. } = reach.core();
            DeviceReach { tables, heads }
        });
        DeviceKv {
            cache: self.cache,
            dtype: self.place.dtype,
            scales: self.scales,
            geometry: self.geometry,
            layer: self.layer,
            entries: self.entries,
            entry_offsets: self.entry_offsets,
            reach,
            window: self.scoring.window,
            inv_freq: &kept.inv_freq,
            pairs: self.scoring.rope.pairs(),
            pairing: self.scoring.rope.pairing(),
        }
    }
}
