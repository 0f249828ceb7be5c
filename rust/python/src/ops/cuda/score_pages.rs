//! `score_pages` on CUDA.

use kvweave_core::KvDtype;
use kvweave_core::ops::{
    HeadRows, KvScales, KvView, OpError, PageGeometry, PageScore, Queries, Scoring, SharedScore,
    validate_scored,
};
use kvweave_cuda::{BoundNumbers, DeviceReach, DeviceRows, DeviceTensor, ScorePagesLaunch};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair, extent_of, nothing, row_dtype};
use super::device::backend;
use crate::arguments::{count, raised};
use crate::choices::{page_score, shared_score};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::ops::bounded_pages::BoundedPages;
use crate::reach::Reach;
use crate::rope::RopeTable;
use crate::tensor::TensorRef;

/// Bytes that a load of bounds takes.
const LOAD_BYTES: usize = 16;

/// `results` are scores and counts. `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (q, entries, pages, entry_offsets, results, stream))]
pub fn score_pages_cuda(
    py: Python<'_>,
    q: &Bound<'_, PyAny>,
    entries: TablePair<'_>,
    pages: BoundedPages<'_>,
    entry_offsets: TablePair<'_>,
    results: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    stream: u64,
) -> PyResult<()> {
    let tensors = Tensors {
        q: borrow("q", q)?,
        bounds: borrow("bounds", &pages.bounds)?,
        scales: pages.scales.as_ref().map(|scales| borrow("scales", scales)).transpose()?,
        entries: DeviceTable::of("entries", &entries)?,
        offsets: DeviceTable::of("entry_offsets", &entry_offsets)?,
        scores: borrow("scores", &results.0)?,
        counts: borrow("counts", &results.1)?,
    };
    let call = raised(py, tensors.call(&pages))?;
    call_core(py, || call.run(stream))
}

/// The tensors of a call, borrowed.
struct Tensors<'py> {
    q: Borrowed<'py>,
    bounds: Borrowed<'py>,
    scales: Option<Borrowed<'py>>,
    entries: DeviceTable<'py>,
    offsets: DeviceTable<'py>,
    scores: Borrowed<'py>,
    counts: Borrowed<'py>,
}

/// The plain parts of a call, which need no interpreter lock.
struct Call<'a> {
    place: Place,
    dtype: KvDtype,
    q: DeviceRows,
    /// B, H and D of `q`.
    vectors: HeadRows<'static, ()>,
    geometry: PageGeometry,
    bounds: DeviceTensor,
    numbers: BoundNumbers,
    entries: DeviceTensor,
    entry_offsets: DeviceTensor,
    layer: usize,
    reach: Option<&'a Reach>,
    rope: &'a RopeTable,
    scoring: Scoring<'a>,
    kinds: (PageScore, SharedScore),
    scores: DeviceTensor,
    width: usize,
    counts: DeviceTensor,
    on_host: Option<(&'a [[i32; 5]], &'a [i32])>,
}

impl Tensors<'_> {
    fn call<'a>(&'a self, pages: &'a BoundedPages<'_>) -> Result<Call<'a>, Failure> {
        let (q, bounds) = (&self.q.tensor, &self.bounds.tensor);
        let dtype = row_dtype("q", q)?;
        let place = Place::of("q", q)?;
        let (geometry, numbers) = pages.geometry(bounds, Some(dtype.into()))?;
        let scales = self.scales.as_ref().map(|scales| &scales.tensor);
        let reach = pages.reach.as_ref().map(Py::get);
        let (rows, vectors) = place.rows("q", q)?;
        let (entries, _) = self.entries.rows::<5>("entries", &place)?;
        let (entry_offsets, ends) = self.offsets.list("entry_offsets", &place)?;
        let requests = requests_of(ends, reach)?;
        if vectors.rows != requests {
            return Err(Failure::invalid("q rows", format!("{requests} elements"), vectors.rows));
        }
        let (scores, counts) = (&self.scores.tensor, &self.counts.tensor);
        let width = scores.shape().last().copied();
        let shape = [("B", Some(requests)), ("G", Some(geometry.kv_heads)), ("S", width)];
        let mut read = vec![
            ("q", q),
            ("bounds", bounds),
            ("entries", &self.entries.on_device.tensor),
            ("entry_offsets", &self.offsets.on_device.tensor),
        ];
        read.extend(scales.map(|scales| ("scales", scales)));
        let held = place.output("counts", counts, (DType::I32, &shape[..2]), &read)?;
        read.push(("counts", counts));
        let listed = self.entries.rows_on_host("entries")?;
        Ok(Call {
            place,
            dtype,
            q: rows,
            vectors,
            geometry,
            bounds: bounds_of(&place, bounds)?,
            numbers: numbers.on_device(&place, scales, bounds.shape()[0])?,
            entries,
            entry_offsets,
            layer: count("layer", &pages.layer)?,
            reach,
            rope: pages.rope.get(),
            scoring: pages.scoring(),
            kinds: (page_score(&pages.score)?, shared_score(&pages.shared)?),
            scores: place.output("scores", scores, (DType::F32, &shape), &read)?,
            width: width.unwrap_or(0),
            counts: held,
            on_host: listed.zip(self.offsets.list_on_host("entry_offsets")?),
        })
    }
}

impl Call<'_> {
    /// The core's own checks, as far as tables lie on the host: what is on the device is known by
    /// its shape alone.
    fn validate(&self) -> Result<(), OpError> {
        let pages = self.bounds.len / (self.numbers.vectors() * self.geometry.head_dim).max(1);
        let (entries, offsets) = self.on_host.unwrap_or((&[], &[0]));
        let kv = KvView {
            // Of the pages themselves only the number is looked at.
            cache: nothing(pages.saturating_mul(self.geometry.block_stride)),
            geometry: self.geometry,
            layer: self.layer,
            entries,
            reach: self.reach.map(Reach::core),
            scales: KvScales::ONE,
        };
        // What a page's position among its request's is does not matter for its score.
        let positions = vec![0; self.vectors.rows];
        let queries = Queries { vectors: self.vectors, positions: &positions };
        validate_scored(&queries, &kv, &self.scoring, offsets, (pages, self.width))
    }

    fn run(&self, stream: u64) -> Result<(), Failure> {
        self.validate()?;
        let ordinal = self.place.ordinal;
        let backend = backend(ordinal)?;
        let heads = self.reach.map(|reach| reach.on(&backend, ordinal)).transpose()?;
        let tables = self.reach.map_or(1, Reach::tables);
        let launch = ScorePagesLaunch {
            q: self.q,
            dtype: self.dtype,
            requests: self.vectors.rows,
            query_heads: self.vectors.heads,
            kv_heads: self.geometry.kv_heads,
            head_dim: self.geometry.head_dim,
            bounds: self.bounds,
            numbers: self.numbers,
            entries: self.entries,
            entry_offsets: self.entry_offsets,
            layer: self.layer,
            reach: heads.as_deref().map(|heads| DeviceReach { tables, heads }),
            inv_freq: &*self.rope.on(&backend, ordinal)?,
            pairs: self.rope.table.pairs(),
            pairing: self.rope.table.pairing(),
            scale: self.scoring.scale,
            softcap: self.scoring.softcap,
            score: self.kinds.0,
            shared: self.kinds.1,
            scores: self.scores,
            width: self.width,
            counts: self.counts,
            stream,
        };
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed; tables that are kept live as long as their owners. Offsets were
        // checked on the host, or are the caller's promise where they lie on the device.
        unsafe { backend.score_pages(&launch) }.map_err(Failure::from)
    }
}

/// Bounds where a load of them may begin at each row.
fn bounds_of(place: &Place, bounds: &TensorRef) -> Result<DeviceTensor, Failure> {
    place.expect("bounds", bounds, bounds.dtype)?;
    bounds.expect_aligned("bounds", LOAD_BYTES)?;
    extent_of("bounds", bounds)
}

/// B of offsets [B · tables + 1].
fn requests_of(ends: usize, reach: Option<&Reach>) -> Result<usize, Failure> {
    let tables = reach.map_or(1, Reach::tables);
    if ends == 0 || !(ends - 1).is_multiple_of(tables) {
        let expected = format!("one more than a multiple of {tables} (tables)");
        return Err(Failure::invalid("entry_offsets", expected, ends));
    }
    Ok((ends - 1) / tables)
}
