//! `move_pages` on the host, where both arenas are memory.

use kvweave_core::ops::{MovePages, Moves, RowPages, Way};
use pyo3::prelude::*;

use super::element::run;
use crate::arguments::{Table, count, raised};
use crate::choices::way_of_pages;
use crate::dlpack::borrow;
use crate::failure::Failure;
use crate::ops::row_pages::PageArenas;
use crate::scalars::Number;
use crate::tensor::TensorRef;

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
    let steps = Steps::of(&moves, (&slots.1, slots.2), (&home.1, home.2))?;
    let arenas = (borrow("slots", &slots.0)?, borrow("home", &home.0)?);
    let params = || {
        let way = way_of_pages(way)?;
        let sides = PageArenas::of(&arenas.0.tensor, &arenas.1.tensor, way)?;
        let PageArenas { page_bytes, source, target, .. } = sides;
        steps.expect_apart(target.0, target.1)?;
        let moves = steps.moves(sides.slot_pages, sides.home_pages, way)?;
        // SAFETY: what is written lies apart from all that is read; others are excluded as
        // `arguments` says.
        let (source, target) =
            unsafe { (source.1.bytes(source.0)?, target.1.bytes_mut(target.0)?) };
        Ok(MovePages { moves, page_bytes, source, target })
    };
    run!(py, reference, move_pages, raised(py, params())?)
}

/// Moves, their count, and the blocks of rows on both sides.
pub struct Steps<'py> {
    moves: Table<'py>,
    count: Table<'py>,
    slots: (Table<'py>, Number),
    home: (Table<'py>, Number),
}

impl<'py> Steps<'py> {
    /// `slots` and `home`: blocks and their ranks.
    pub fn of(
        moves: &(Any<'py>, Any<'py>),
        slots: (&Any<'py>, Number),
        home: (&Any<'py>, Number),
    ) -> PyResult<Self> {
        Ok(Self {
            moves: Table::of("moves", &moves.0)?,
            count: Table::of("count", &moves.1)?,
            slots: (Table::of("blocks of slots", slots.0)?, slots.1),
            home: (Table::of("blocks of home", home.0)?, home.1),
        })
    }

    /// Refuses to have one of the tables written.
    pub fn expect_apart(&self, what: &str, written: &TensorRef) -> Result<(), Failure> {
        let tables = [
            (&self.moves, "moves"),
            (&self.count, "count"),
            (&self.slots.0, "blocks of slots"),
            (&self.home.0, "blocks of home"),
        ];
        tables
            .iter()
            .try_for_each(|(table, name)| written.expect_apart(what, &table.0.tensor, name))
    }

    /// What is moved where, between arenas of so many pages.
    pub fn moves(&self, slots: usize, home: usize, way: Way) -> Result<Moves<'_>, Failure> {
        Ok(Moves {
            moves: self.moves.rows("moves")?,
            count: self.count.list("count")?,
            slots: rows_of("blocks of slots", &self.slots, slots)?,
            home: rows_of("blocks of home", &self.home, home)?,
            way,
        })
    }
}

fn rows_of<'a>(
    what: &str,
    (table, ranks): &'a (Table<'_>, Number),
    pages: usize,
) -> Result<RowPages<'a>, Failure> {
    table.0.tensor.expect_shape(what, &[("N", None), ("W", None)])?;
    let width = table.0.tensor.shape()[1];
    Ok(RowPages { blocks: table.wide(what, width)?, width, ranks: count("ranks", ranks)?, pages })
}
