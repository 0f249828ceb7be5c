//! `recycle_pages` on the host.

use kvweave_core::ops::RecyclePages;
use pyo3::prelude::*;

use super::element::run;
use crate::arguments::{Table, count, output, raised};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::scalars::Number;

type Any<'py> = Bound<'py, PyAny>;

/// `chosen` are the pages and how many were selected; `room` are the slots, written in place, and
/// which of them are pinned; `results` are places, moves, their count, and what was refused.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (chosen, limit, room, results, reference))]
pub fn recycle_pages(
    py: Python<'_>,
    chosen: (Any<'_>, Any<'_>),
    limit: Number,
    room: (Any<'_>, Option<Any<'_>>),
    results: (Any<'_>, Any<'_>, Any<'_>, Any<'_>),
    reference: bool,
) -> PyResult<()> {
    let (pages, selected) = (Table::of("pages", &chosen.0)?, Table::of("selected", &chosen.1)?);
    let slots = borrow("slots", &room.0)?;
    let pinned = room.1.as_ref().map(|pinned| borrow("pinned", pinned)).transpose()?;
    let (places, moves) = (borrow("places", &results.0)?, borrow("moves", &results.1)?);
    let (moved, refused) = (borrow("count", &results.2)?, borrow("refused", &results.3)?);
    let params = || {
        let mut read = vec![("pages", &pages.0.tensor), ("selected", &selected.0.tensor)];
        pages.0.tensor.expect_shape("pages", &[("R", None), ("K", None)])?;
        slots.tensor.expect_shape("slots", &[("R", None), ("S", None)])?;
        let (most, width) = (pages.0.tensor.shape()[1], slots.tensor.shape()[1]);
        let rows = ("R", Some(slots.tensor.shape()[0]));
        let pins = match &pinned {
            None => None,
            Some(Borrowed { tensor, .. }) => {
                tensor.expect_dtype("pinned", DType::U8)?;
                tensor.expect_shape("pinned", &[rows, ("S", Some(width))])?;
                read.push(("pinned", tensor));
                // SAFETY: outputs are apart from it; others are excluded as `arguments` says.
                Some(unsafe { tensor.bytes("pinned") }?)
            }
        };
        let held = output("slots", &slots.tensor, &[rows, ("S", None)], &read)?;
        read.push(("slots", &slots.tensor));
        let found = output("places", &places.tensor, &[rows, ("K", Some(most))], &read)?;
        read.push(("places", &places.tensor));
        let steps: &mut [i32] =
            output("moves", &moves.tensor, &[("M", None), ("columns", Some(3))], &read)?;
        read.push(("moves", &moves.tensor));
        let number = output("count", &moved.tensor, &[("1", Some(1))], &read)?;
        read.push(("count", &moved.tensor));
        Ok(RecyclePages {
            pages: pages.wide("pages", most)?,
            most,
            selected: selected.list("selected")?,
            limit: count("limit", limit)?,
            pinned: pins,
            slots: held,
            width,
            places: found,
            moves: steps.as_chunks_mut().0,
            count: number,
            refused: output("refused", &refused.tensor, &[rows], &read)?,
        })
    };
    run!(py, reference, recycle_pages, raised(py, params())?)
}
