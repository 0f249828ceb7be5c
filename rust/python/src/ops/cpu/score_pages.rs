//! `score_pages` on the host.

use kvweave_core::ops::{KvScales, KvView, PageGeometry, Queries, ScorePages, Scoring};
use pyo3::prelude::*;

use super::element::{run, with_element};
use crate::arguments::{Table, count, head_rows, output, raised};
use crate::choices::{page_score, shared_score};
use crate::dlpack::borrow;
use crate::dtype::{DType, ROWS};
use crate::failure::Failure;
use crate::reach::Reach;
use crate::rope::RopeTable;
use crate::scalars::Number;
use crate::tensor::TensorRef;

/// Bounds of pages and how they are scored: `kvweave.ops.BoundedPages`, whose fields have these
/// names.
#[derive(FromPyObject)]
pub struct BoundedPages<'py> {
    bounds: Bound<'py, PyAny>,
    page_tokens: Number,
    layer: Number,
    kv_heads: Number,
    scale: f32,
    rope: Py<RopeTable>,
    softcap: Option<f32>,
    reach: Option<Py<Reach>>,
    score: String,
    shared: String,
}

/// `results` are scores and counts.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (q, entries, pages, entry_offsets, results, reference))]
pub fn score_pages(
    py: Python<'_>,
    q: &Bound<'_, PyAny>,
    entries: &Bound<'_, PyAny>,
    pages: BoundedPages<'_>,
    entry_offsets: &Bound<'_, PyAny>,
    results: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    reference: bool,
) -> PyResult<()> {
    let (q, bounds) = (borrow("q", q)?, borrow("bounds", &pages.bounds)?);
    let (entries, offsets) =
        (Table::of("entries", entries)?, Table::of("entry_offsets", entry_offsets)?);
    let (scores, counts) = (borrow("scores", &results.0)?, borrow("counts", &results.1)?);
    let (q, bounds, scores, counts) = (&q.tensor, &bounds.tensor, &scores.tensor, &counts.tensor);
    // What a page's position among its request's is does not matter for its score.
    let positions = vec![0; q.shape().first().copied().unwrap_or(0)];
    let geometry = raised(py, geometry_of(&pages, bounds))?;
    // Of the pages themselves only the number is looked at.
    let whole = vec![(); bounds.shape()[0].saturating_mul(geometry.block_stride)];
    with_element!(py, ("q", ROWS), q.dtype, T => {
        let params = || {
            let mut read = vec![
                ("q", q), ("bounds", bounds), ("entries", &entries.0.tensor),
                ("entry_offsets", &offsets.0.tensor),
            ];
            let (requests, width) = (q.shape().first().copied(), scores.shape().last().copied());
            let shape = [("B", requests), ("G", Some(geometry.kv_heads)), ("S", width)];
            let held = output("counts", counts, &shape[..2], &read)?;
            read.push(("counts", counts));
            let scores = output("scores", scores, &shape, &read)?;
            let rope = &pages.rope.get().table;
            // SAFETY: outputs are apart from it; others are excluded as `arguments` says.
            let values = unsafe { bounds.slice("bounds") }?;
            Ok(ScorePages {
                queries: Queries { vectors: head_rows::<T>("q", q)?, positions: &positions },
                kv: KvView {
                    cache: &whole,
                    geometry,
                    layer: count("layer", pages.layer)?,
                    entries: entries.rows("entries")?,
                    reach: pages.reach.as_ref().map(|reach| reach.get().core()),
                    scales: KvScales::ONE,
                },
                scoring: Scoring { scale: pages.scale, rope, window: None, softcap: pages.softcap },
                entry_offsets: offsets.list("entry_offsets")?,
                bounds: values,
                score: page_score(&pages.score)?,
                shared: shared_score(&pages.shared)?,
                scores,
                width: width.unwrap_or(0),
                counts: held,
            })
        };
        run!(py, reference, score_pages, raised(py, params())?)
    })
}

/// The geometry of the pages that bounds [pages, 3, D] are of.
fn geometry_of(pages: &BoundedPages<'_>, bounds: &TensorRef) -> Result<PageGeometry, Failure> {
    bounds.expect_dtype("bounds", DType::F32)?;
    bounds.expect_shape("bounds", &[("pages", None), ("3", Some(3)), ("D", None)])?;
    bounds.expect_contiguous("bounds")?;
    let (page_tokens, kv_heads) =
        (count("page_tokens", pages.page_tokens)?, count("kv_heads", pages.kv_heads)?);
    let (layers, head_dim) = (pages.rope.get().table.layers(), bounds.shape()[2]);
    Ok(PageGeometry::arena(layers, kv_heads, page_tokens, head_dim))
}
