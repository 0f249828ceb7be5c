//! `score_pages` on the host.

use kvweave_core::ops::{Bounds, Fp8Bounds, KvScales, KvView, Queries, ScorePages};
use pyo3::prelude::*;

use super::element::{run, with_element};
use crate::arguments::{Table, count, head_rows, output, raised};
use crate::choices::{page_score, shared_score};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::ROWS;
use crate::failure::Failure;
use crate::ops::bounded_pages::{BoundedPages, NumbersOfBounds};
use crate::tensor::TensorRef;

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
    let scales = pages.scales.as_ref().map(|scales| borrow("scales", scales)).transpose()?;
    let (geometry, numbers) = raised(py, pages.geometry(bounds, None))?;
    // Of the pages themselves only the number is looked at.
    let whole = vec![(); bounds.shape()[0].saturating_mul(geometry.block_stride)];
    with_element!(py, ("q", ROWS), q.dtype, T => {
        let params = || {
            let mut read = vec![
                ("q", q), ("bounds", bounds), ("entries", &entries.0.tensor),
                ("entry_offsets", &offsets.0.tensor),
            ];
            read.extend(scales.as_ref().map(|scales| ("scales", &scales.tensor)));
            let (requests, width) = (q.shape().first().copied(), scores.shape().last().copied());
            let shape = [("B", requests), ("G", Some(geometry.kv_heads)), ("S", width)];
            let held = output("counts", counts, &shape[..2], &read)?;
            read.push(("counts", counts));
            let scores = output("scores", scores, &shape, &read)?;
            // SAFETY: outputs are apart from it; others are excluded as `arguments` says.
            let bounds = unsafe { bounds_of(bounds, numbers, scales.as_ref()) }?;
            Ok(ScorePages {
                queries: Queries { vectors: head_rows::<T>("q", q)?, positions: &positions },
                kv: KvView {
                    cache: &whole,
                    geometry,
                    layer: count("layer", &pages.layer)?,
                    entries: entries.rows("entries")?,
                    reach: pages.reach.as_ref().map(|reach| reach.get().core()),
                    scales: KvScales::ONE,
                },
                scoring: pages.scoring(),
                entry_offsets: offsets.list("entry_offsets")?,
                bounds,
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

/// Bounds of these numbers, read in place.
///
/// # Safety
/// The tensors outlive what is made of them, and nobody writes to them meanwhile.
unsafe fn bounds_of<'a>(
    bounds: &TensorRef,
    numbers: NumbersOfBounds,
    scales: Option<&Borrowed<'_>>,
) -> Result<Bounds<'a>, Failure> {
    match (numbers, scales) {
        (NumbersOfBounds::Fp8(score), Some(scales)) => {
            let scales = &scales.tensor;
            scales.expect_shape("scales", &[("pages", Some(bounds.shape()[0]))])?;
            scales.expect_contiguous("scales")?;
            // SAFETY: the caller's promise.
            let (numbers, scales) = unsafe { (bounds.slice("bounds")?, scales.slice("scales")?) };
            Ok(Bounds::Fp8(Fp8Bounds { score, numbers, scales }))
        }
        // SAFETY: the caller's promise.
        _ => Ok(Bounds::F32(unsafe { bounds.slice("bounds") }?)),
    }
}
