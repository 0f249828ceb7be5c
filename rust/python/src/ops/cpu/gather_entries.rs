//! `gather_entries` on the host.

use kvweave_core::ops::GatherEntries;
use kvweave_reference as reference;
use pyo3::prelude::*;

use crate::arguments::{Table, output, raised};
use crate::dlpack::borrow;
use crate::dtype::DType;
use crate::failure::call_core;
use crate::reach::Reach;

/// `chosen` are the pages and how many were selected; `results` are entries and offsets.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (chosen, entries, entry_offsets, reach, results))]
pub fn gather_entries(
    py: Python<'_>,
    chosen: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    entries: &Bound<'_, PyAny>,
    entry_offsets: &Bound<'_, PyAny>,
    reach: Option<&Bound<'_, Reach>>,
    results: (Bound<'_, PyAny>, Bound<'_, PyAny>),
) -> PyResult<()> {
    let (pages, selected) = (borrow("pages", &chosen.0)?, borrow("selected", &chosen.1)?);
    let (pages, selected) = (&pages.tensor, &selected.tensor);
    let (entries, ends) =
        (Table::of("entries", entries)?, Table::of("entry_offsets", entry_offsets)?);
    let (gathered, offsets) = (borrow("gathered", &results.0)?, borrow("offsets", &results.1)?);
    let params = || {
        pages.expect_dtype("pages", DType::I32)?;
        pages.expect_shape("pages", &[("B", None), ("G", None), ("K", None)])?;
        pages.expect_contiguous("pages")?;
        let (heads, most) = (pages.shape()[1], pages.shape()[2]);
        selected.expect_dtype("selected", DType::I32)?;
        selected.expect_shape("selected", &[("B", Some(pages.shape()[0])), ("G", Some(heads))])?;
        selected.expect_contiguous("selected")?;
        let mut read = vec![
            ("pages", pages),
            ("selected", selected),
            ("entries", &entries.0.tensor),
            ("entry_offsets", &ends.0.tensor),
        ];
        let written: &mut [i32] = output("offsets", &offsets.tensor, &[("ends", None)], &read)?;
        read.push(("offsets", &offsets.tensor));
        let shape = [("N", None), ("columns", Some(5))];
        let rows: &mut [i32] = output("gathered", &gathered.tensor, &shape, &read)?;
        // SAFETY: outputs are apart from them; others are excluded as `arguments` says.
        let (pages, selected) = unsafe { (pages.slice("pages")?, selected.slice("selected")?) };
        Ok(GatherEntries {
            pages,
            most,
            selected,
            heads,
            entries: entries.rows("entries")?,
            entry_offsets: ends.list("entry_offsets")?,
            reach: reach.map(|reach| reach.get().core()),
            gathered: rows.as_chunks_mut().0,
            offsets: written,
        })
    };
    let params = raised(py, params())?;
    call_core(py, move || reference::gather_entries(params))
}
