//! `select_pages` on the host.

use kvweave_core::ops::SelectPages;
use pyo3::prelude::*;

use super::element::run;
use crate::arguments::{Table, count, output, raised};
use crate::dlpack::borrow;
use crate::dtype::DType;
use crate::scalars::Number;

/// `always` are the numbers of pages at the start and at the end of a row; `results`
/// are the pages and how many were selected.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (scores, counts, budgets, always, results, reference))]
pub fn select_pages(
    py: Python<'_>,
    scores: &Bound<'_, PyAny>,
    counts: &Bound<'_, PyAny>,
    budgets: &Bound<'_, PyAny>,
    always: (Number, Number),
    results: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    reference: bool,
) -> PyResult<()> {
    let scores = borrow("scores", scores)?;
    let (counts, budgets) = (Table::of("counts", counts)?, Table::of("budgets", budgets)?);
    let (pages, selected) = (borrow("pages", &results.0)?, borrow("selected", &results.1)?);
    let (scores, pages, selected) = (&scores.tensor, &pages.tensor, &selected.tensor);
    let params = || {
        scores.expect_dtype("scores", DType::F32)?;
        scores.expect_shape("scores", &[("R", None), ("S", None)])?;
        scores.expect_contiguous("scores")?;
        let (rows, width) = (scores.shape()[0], scores.shape()[1]);
        let tables = [("counts", &counts.0.tensor), ("budgets", &budgets.0.tensor)];
        let mut read = vec![("scores", scores), tables[0], tables[1]];
        let held = output("selected", selected, &[("R", Some(rows))], &read)?;
        read.push(("selected", selected));
        let chosen = output("pages", pages, &[("R", Some(rows)), ("K", None)], &read)?;
        // SAFETY: outputs are apart from it; others are excluded as `arguments` says.
        let values = unsafe { scores.slice("scores") }?;
        Ok(SelectPages {
            scores: values,
            width,
            counts: counts.list("counts")?,
            budgets: budgets.list("budgets")?,
            sink: count("sink", always.0)?,
            recent: count("recent", always.1)?,
            pages: chosen,
            most: pages.shape()[1],
            selected: held,
        })
    };
    run!(py, reference, select_pages, raised(py, params())?)
}
