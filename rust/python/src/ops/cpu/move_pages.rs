//! `move_pages` on the host, where both arenas are memory.

use kvweave_core::ops::{MovePages, Moves, RowPages, Way};
use pyo3::prelude::*;

use super::element::run;
use crate::arguments::{Table, count, raised};
use crate::choices::way_of_pages;
use crate::dlpack::borrow;
use crate::failure::Failure;
use crate::ops::row_pages::{equal_pages, pages_of_arena};
use crate::scalars::Number;

type Any<'py> = Bound<'py, PyAny>;

/// `moves` and their count; `slots` and `home` are an arena, its blocks and their ranks.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (moves, slots, home, way, reference))]
pub fn move_pages(
    py: Python<'_>,
    moves: (Any<'_>, Any<'_>),
    slots: (Any<'_>, Any<'_>, Number),
    home: (Any<'_>, Any<'_>, Number),
    way: &str,
    reference: bool,
) -> PyResult<()> {
    let (steps, number) = (Table::of("moves", &moves.0)?, Table::of("count", &moves.1)?);
    let arenas = (borrow("slots", &slots.0)?, borrow("home", &home.0)?);
    let tables = (Table::of("blocks of slots", &slots.1)?, Table::of("blocks of home", &home.1)?);
    let params = || {
        let way = way_of_pages(way)?;
        let (of_slots, of_home) = (&arenas.0.tensor, &arenas.1.tensor);
        let (slot_pages, slot_bytes) = pages_of_arena("slots", of_slots)?;
        let (home_pages, home_bytes) = pages_of_arena("home", of_home)?;
        let page_bytes = equal_pages(slot_bytes, home_bytes)?;
        let (source, target) = match way {
            Way::Fetch => (("home", of_home), ("slots", of_slots)),
            Way::Spill => (("slots", of_slots), ("home", of_home)),
        };
        let read = [
            source,
            ("moves", &steps.0.tensor),
            ("count", &number.0.tensor),
            ("blocks of slots", &tables.0.0.tensor),
            ("blocks of home", &tables.1.0.tensor),
        ];
        for (what, other) in read {
            target.1.expect_apart(target.0, other, what)?;
        }
        let of_rows = |what: &str, table: &Table<'_>| {
            table.0.tensor.expect_shape(what, &[("N", None), ("W", None)])?;
            Ok::<_, Failure>(table.0.tensor.shape()[1])
        };
        let widths =
            (of_rows("blocks of slots", &tables.0)?, of_rows("blocks of home", &tables.1)?);
        let moves = Moves {
            moves: steps.rows("moves")?,
            count: number.list("count")?,
            slots: RowPages {
                blocks: tables.0.wide("blocks of slots", widths.0)?,
                width: widths.0,
                ranks: count("ranks", slots.2)?,
                pages: slot_pages,
            },
            home: RowPages {
                blocks: tables.1.wide("blocks of home", widths.1)?,
                width: widths.1,
                ranks: count("ranks", home.2)?,
                pages: home_pages,
            },
            way,
        };
        // SAFETY: what is written lies apart from all that is read; others are excluded as
        // `arguments` says.
        let (source, target) =
            unsafe { (source.1.bytes(source.0)?, target.1.bytes_mut(target.0)?) };
        Ok(MovePages { moves, page_bytes, source, target })
    };
    run!(py, reference, move_pages, raised(py, params())?)
}
