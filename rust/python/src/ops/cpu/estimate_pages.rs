//! `estimate_pages` on the host.

use kvweave_core::ops::{EstimatePages, KvScales, KvView, Queries, ReadEntries};
use pyo3::prelude::*;

use super::element::{run, with_element};
use crate::arguments::{Table, count, head_rows, output, raised};
use crate::dlpack::borrow;
use crate::dtype::{DType, ROWS};
use crate::failure::Failure;
use crate::ops::page_means::PageMeans;
use crate::reach::Reach;
use crate::tensor::TensorRef;

type Any<'py> = Bound<'py, PyAny>;

/// `attended` and `results` are attention and its log-sum-exp; `listed` and `read` are entries and
/// their offsets, the latter with their reach.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[expect(clippy::too_many_arguments, reason = "tensors by their part in the call")]
#[pyo3(signature = (q, attended, listed, pages, read, results, reference))]
pub fn estimate_pages(
    py: Python<'_>,
    q: &Any<'_>,
    attended: (Any<'_>, Any<'_>),
    listed: (Any<'_>, Any<'_>),
    pages: PageMeans<'_>,
    read: (Any<'_>, Any<'_>, Option<Bound<'_, Reach>>),
    results: (Any<'_>, Any<'_>),
    reference: bool,
) -> PyResult<()> {
    let (q, means) = (borrow("q", q)?, borrow("means", &pages.means)?);
    let (exact, sums) = (borrow("attended", &attended.0)?, borrow("lse of attended", &attended.1)?);
    let (entries, offsets) =
        (Table::of("entries", &listed.0)?, Table::of("entry_offsets", &listed.1)?);
    let (known, ends) = (Table::of("read", &read.0)?, Table::of("read_offsets", &read.1)?);
    let (out, lse) = (borrow("out", &results.0)?, borrow("lse", &results.1)?);
    let (q, means, exact, sums) = (&q.tensor, &means.tensor, &exact.tensor, &sums.tensor);
    let (out, lse) = (&out.tensor, &lse.tensor);
    // What a page's position among its request's is does not matter for its estimate.
    let positions = vec![0; q.shape().first().copied().unwrap_or(0)];
    let geometry = raised(py, pages.geometry(means))?;
    // Of the pages themselves only the number is looked at.
    let whole = vec![(); means.shape()[0].saturating_mul(geometry.block_stride)];
    with_element!(py, ("q", ROWS), q.dtype, T => {
        let params = || {
            let vectors = head_rows::<T>("q", q)?;
            let shape = [("B", vectors.rows), ("H", vectors.heads), ("D", vectors.head_dim)];
            let shape = shape.map(|(name, size)| (name, Some(size)));
            expect_attended((exact, sums), &shape)?;
            means.expect_dtype("means", DType::F32)?;
            let mut others = vec![
                ("q", q), ("means", means), ("attended", exact), ("lse of attended", sums),
                ("entries", &entries.0.tensor), ("entry_offsets", &offsets.0.tensor),
                ("read", &known.0.tensor), ("read_offsets", &ends.0.tensor),
            ];
            let written = output("lse", lse, &shape[..2], &others)?;
            others.push(("lse", lse));
            let out = output::<T>("out", out, &shape, &others)?;
            // SAFETY: outputs are apart from them; others are excluded as `arguments` says.
            let (attended, attended_lse) =
                unsafe { (exact.slice::<T>("attended")?, sums.slice("lse of attended")?) };
            // SAFETY: the same.
            let means = unsafe { means.slice("means") }?;
            Ok(EstimatePages {
                queries: Queries { vectors, positions: &positions },
                attended,
                attended_lse,
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
                read: ReadEntries {
                    entries: known.rows("read")?,
                    offsets: ends.list("read_offsets")?,
                    reach: read.2.as_ref().map(|reach| reach.get().core()),
                },
                means,
                out,
                lse: written,
            })
        };
        run!(py, reference, estimate_pages, raised(py, params())?)
    })
}

/// Refuses what is no attention, and its log-sum-exp, of rows of a shape.
fn expect_attended(
    (attended, lse): (&TensorRef, &TensorRef),
    shape: &[(&str, Option<usize>); 3],
) -> Result<(), Failure> {
    attended.expect_shape("attended", shape)?;
    attended.expect_contiguous("attended")?;
    lse.expect_shape("lse of attended", &shape[..2])?;
    lse.expect_contiguous("lse of attended")
}
