//! `select_pages` on CUDA.

use kvweave_core::ops::SelectPages;
use kvweave_cuda::SelectPagesLaunch;
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair, extent_of};
use super::device::backend;
use crate::arguments::{count, raised};
use crate::dlpack::borrow;
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::scalars::Number;

/// `always` are the numbers of pages at the start and at the end of a row; `results` are the pages
/// and how many were selected. `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (scores, counts, budgets, always, results, stream))]
pub fn select_pages_cuda(
    py: Python<'_>,
    scores: &Bound<'_, PyAny>,
    counts: TablePair<'_>,
    budgets: TablePair<'_>,
    always: (Number, Number),
    results: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    stream: u64,
) -> PyResult<()> {
    let scores = borrow("scores", scores)?;
    let (counts, budgets) =
        (DeviceTable::of("counts", &counts)?, DeviceTable::of("budgets", &budgets)?);
    let (pages, selected) = (borrow("pages", &results.0)?, borrow("selected", &results.1)?);
    let (scores, pages, selected) = (&scores.tensor, &pages.tensor, &selected.tensor);
    let checks = || {
        scores.expect_dtype("scores", DType::F32)?;
        let place = Place::of("scores", scores)?;
        scores.expect_shape("scores", &[("R", None), ("S", None)])?;
        scores.expect_contiguous("scores")?;
        let (rows, width) = (scores.shape()[0], scores.shape()[1]);
        let of_rows = |what: &str, table: &DeviceTable<'_>| match table.list(what, &place)? {
            (tensor, listed) if listed == rows => Ok(tensor),
            (_, listed) => Err(Failure::invalid(what, format!("{rows} elements"), listed)),
        };
        let (of_counts, of_budgets) = (of_rows("counts", &counts)?, of_rows("budgets", &budgets)?);
        let tables = [("counts", &counts.on_device.tensor), ("budgets", &budgets.on_device.tensor)];
        let mut read = vec![("scores", scores), tables[0], tables[1]];
        let held = place.output("selected", selected, (DType::I32, &[("R", Some(rows))]), &read)?;
        read.push(("selected", selected));
        let shape = [("R", Some(rows)), ("K", None)];
        let launch = SelectPagesLaunch {
            scores: extent_of("scores", scores)?,
            width,
            counts: of_counts,
            budgets: of_budgets,
            rows,
            sink: count("sink", always.0)?,
            recent: count("recent", always.1)?,
            pages: place.output("pages", pages, (DType::I32, &shape), &read)?,
            most: pages.shape()[1],
            selected: held,
            stream,
        };
        Ok((place, launch, counts.list_on_host("counts")?, budgets.list_on_host("budgets")?))
    };
    let (place, launch, counts, budgets) = raised(py, checks())?;
    call_core(py, || {
        let always = launch.sink.saturating_add(launch.recent);
        SelectPages::check_numbers("counts", counts.unwrap_or(&[]), (0, launch.width))?;
        SelectPages::check_numbers("budgets", budgets.unwrap_or(&[]), (always, launch.most))?;
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed.
        unsafe { backend(place.ordinal)?.select_pages(&launch) }.map_err(Failure::from)
    })
}
